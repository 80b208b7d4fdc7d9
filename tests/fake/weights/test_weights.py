"""Low copies of weights: every write to a whole weight is noticed, and copies die with their weights."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx import weights
from amp_fx.weights import LowCopies, watch
from amp_fx.weights.watch import Watch

SHAPES = ((64, 48), (48,), (3,), (8, 4, 3, 3))


@pytest.fixture(autouse=True)
def _no_copies() -> Iterator[None]:
    weights.clear()
    yield
    weights.clear()


def new_weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def copies_for(parameters: list[Any], dtype: torch.dtype = torch.bfloat16) -> LowCopies:
    return LowCopies(range(len(parameters)), [dtype] * len(parameters))


def are_current(copies: LowCopies, parameters: list[Any]) -> bool:
    return all(torch.equal(c, p.to(c.dtype)) for c, p in zip(copies.of(parameters), parameters, strict=True))


def test_copies_are_made_once() -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    first = copies.of(parameters)
    assert are_current(copies, parameters)
    assert copies.of(parameters) is first
    assert weights.held_bytes() == sum(2 * p.numel() for p in parameters)


def test_graphs_that_read_the_same_weights_share_copies() -> None:
    parameters = new_weights()
    one, other = copies_for(parameters), copies_for(parameters[:2])
    assert [c.data_ptr() for c in one.of(parameters)[:2]] == [c.data_ptr() for c in other.of(parameters[:2])]


# ---- optimizers ----

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
}  # fmt: skip
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}


def test_all_optimizers_of_torch_are_here() -> None:
    known = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    # these have no forms, or take parameters of one kind only; they step below
    assert known - set(OPTIMIZERS) == {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in parameters:
        p.grad = None


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in OPTIMIZERS for form in FORMS if form != "fused" or name in FUSED],
)
def test_a_step_of_an_optimizer_is_noticed(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # not even the hook is needed, as every element moves
    monkeypatch.setattr(watch, "advance", lambda: None)
    parameters = new_weights()
    copies = copies_for(parameters)
    optimizer = OPTIMIZERS[name](parameters, lr=0.1, **FORMS[form])
    for _ in range(3):
        assert are_current(copies, parameters)
        before = [p.detach().clone() for p in parameters]
        step(optimizer, parameters)
        assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert are_current(copies, parameters)


# of torch 2.11, also where they are enabled
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("name", ["LBFGS", "Muon", "SparseAdam"])
def test_a_step_of_the_other_optimizers_is_noticed(name: str) -> None:
    parameters = new_weights()[:1]
    copies = copies_for(parameters)
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
    assert are_current(copies, parameters)
    if name == "SparseAdam":
        # some rows only
        rows = torch.tensor([[7, 9]])
        parameters[0].grad = torch.sparse_coo_tensor(
            rows, torch.randn(2, 48), (64, 48), check_invariants=True
        )
        optimizer.step()
    elif name == "LBFGS":

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = parameters[0].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        step(optimizer, parameters)
    assert are_current(copies, parameters)


def test_a_fused_step_that_changes_a_few_rows_is_noticed() -> None:
    parameter = nn.Parameter(torch.randn(1000, 16))
    copies = copies_for([parameter])
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    assert are_current(copies, [parameter])
    version = parameter._version
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[501] = 1.0
    optimizer.step()
    # neither version nor sample say so
    assert parameter._version == version
    assert are_current(copies, [parameter])


def test_a_compiled_step_is_noticed() -> None:
    parameters = new_weights()[:2]
    copies = copies_for(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        assert are_current(copies, parameters)
        for p in parameters:
            p.grad = torch.randn_like(p)
        compiled()
    assert are_current(copies, parameters)


# ---- other writes ----


def by_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[...] += 1.0


def by_storage(p: nn.Parameter) -> None:
    p.untyped_storage().copy_(torch.randn_like(p).untyped_storage())


def by_swap(p: nn.Parameter) -> None:
    p.data = torch.randn_like(p)


def in_no_grad(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1.0)


def in_inference_mode(p: nn.Parameter) -> None:
    with torch.inference_mode():
        p.data.mul_(0.5)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": lambda p: p.data.copy_(torch.randn_like(p)),
    "data.mul_, as moving averages do": lambda p: p.data.mul_(0.999).add_(torch.randn_like(p), alpha=0.001),
    "data[...] =": lambda p: p.data.__setitem__(..., 3.0),
    "numpy": by_numpy,
    "storage": by_storage,
    ".data = another": by_swap,
    "in no_grad": in_no_grad,
    "in inference_mode": in_inference_mode,
    "init": lambda p: nn.init.normal_(p),
    "one element, in place": lambda p: p.detach().view(-1)[-2:].zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_noticed(write: str) -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    for parameter in parameters:
        assert are_current(copies, parameters)
        before = parameter.detach().clone()
        WRITES[write](parameter)
        assert not torch.equal(parameter, before)
        assert are_current(copies, parameters)


def test_loading_a_state_dict_and_replacing_a_parameter_are_noticed() -> None:
    model = nn.Linear(32, 32)
    copies = copies_for(list(model.parameters()))
    assert are_current(copies, list(model.parameters()))
    model.load_state_dict(nn.Linear(32, 32).state_dict())
    assert are_current(copies, list(model.parameters()))
    model.load_state_dict(nn.Linear(32, 32).state_dict(), assign=True)
    assert are_current(copies, list(model.parameters()))
    model.weight = nn.Parameter(torch.ones(32, 32))
    assert are_current(copies, list(model.parameters()))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_weight_of_one_value_is_watched_and_cast_once(value: float) -> None:
    parameter = nn.Parameter(torch.full((64, 64), value))
    copies = copies_for([parameter])
    first = copies.of([parameter])
    assert copies.of([parameter]) is first
    parameter.data.fill_(1.0)
    assert are_current(copies, [parameter])


def test_a_weight_that_is_nearly_all_zeros_is_watched_where_it_is_not() -> None:
    value = torch.zeros(64, 64)
    value[40, 3] = 1.0
    parameter = nn.Parameter(value)
    copies = copies_for([parameter])
    assert are_current(copies, [parameter])
    parameter.data.mul_(3.0)
    assert are_current(copies, [parameter])


def test_weights_in_any_order_of_memory_are_watched() -> None:
    base = torch.randn(64, 64)
    parameters = [
        nn.Parameter(value) for value in (base.t(), base[::2], base[:, 3:5], base[5], torch.randn(()))
    ]
    copies = copies_for(parameters)
    for parameter in parameters:
        assert are_current(copies, parameters)
        parameter.data.mul_(2.0)
    assert are_current(copies, parameters)


def test_a_weight_in_another_order_of_memory_gets_a_copy_in_that_order() -> None:
    parameter = nn.Parameter(torch.randn(8, 4, 3, 3))
    copies = copies_for([parameter])
    assert are_current(copies, [parameter])
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    assert are_current(copies, [parameter])
    assert copies.of([parameter])[0].stride() == parameter.stride()


def test_a_write_to_a_few_elements_through_data_needs_clear() -> None:
    parameter = nn.Parameter(torch.randn(1000, 16))
    copies = copies_for([parameter])
    assert are_current(copies, [parameter])
    parameter.data[501] = 0.0
    # what the documentation says
    assert not are_current(copies, [parameter])
    weights.clear()
    assert are_current(copies, [parameter])


# ---- lives ----


def test_copies_die_with_their_weights() -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    low = weakref.ref(copies.of(parameters)[0])
    storage = weakref.ref(parameters[0].untyped_storage())
    gc.disable()
    try:
        del parameters
        assert (low(), storage(), weights.held_bytes()) == (None, None, 0)
    finally:
        gc.enable()


def test_models_of_one_class_have_copies_of_their_own() -> None:
    one, other = new_weights(), new_weights()
    copies = copies_for(one)
    for p in other:
        p.data.neg_()
    first = copies.of(one)
    assert are_current(copies, other)
    assert copies.of(one) is first


def test_inference_tensors_are_weights_too() -> None:
    with torch.inference_mode():
        parameters = [nn.Parameter(torch.randn(64, 64))]
        copies = copies_for(parameters)
        assert are_current(copies, parameters)
        parameters[0].mul_(2.0)
        assert are_current(copies, parameters)


def test_copies_that_were_made_in_inference_mode_can_be_renewed_outside() -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    with torch.inference_mode():
        copies.of(parameters)
    parameters[0].data.mul_(2.0)
    with torch.no_grad():
        assert are_current(copies, parameters)


def test_threads_see_current_copies() -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    turns: list[bool] = []
    threads = [
        threading.Thread(target=lambda: turns.extend(are_current(copies, parameters) for _ in range(200)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(turns) == 800
    assert all(turns)


def test_a_thorough_watch_is_not_disturbed_by_steps_of_other_models() -> None:
    parameters, other = new_weights(), new_weights()
    watch, glance = Watch(parameters, lambda _: None), Watch(parameters, lambda _: None)
    watch.sum_up(parameters)
    step(torch.optim.SGD(other, lr=0.1), other)
    assert not glance.is_current(parameters)
    assert watch.is_current(parameters)
    parameters[0].data.mul_(2.0)
    assert not watch.is_current(parameters)


def test_a_watch_names_the_weights_that_changed() -> None:
    parameters = new_weights()
    before = Watch(parameters, lambda _: None)
    parameters[1].data.mul_(2.0)
    assert Watch(parameters, lambda _: None).changed_since(before) == [
        at == 1 for at in range(len(parameters))
    ]
    # whose step it was is not known
    step(torch.optim.SGD(parameters[:1], lr=0.0), parameters)
    assert all(Watch(parameters, lambda _: None).changed_since(before))


def test_a_write_during_a_copy_counts_even_if_it_is_undone() -> None:
    parameters = new_weights()
    watch = Watch(parameters, lambda _: None)
    parameters[1].data.mul_(2.0)
    watch.confirm(parameters)
    parameters[1].data.mul_(0.5)
    assert not watch.is_current(parameters)
    assert all(Watch(parameters, lambda _: None).changed_since(watch))
