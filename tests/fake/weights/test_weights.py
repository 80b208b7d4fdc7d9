"""Low copies of weights: large writes are noticed at once, others in turn, and copies die with their weights."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx import WeightsError, backend, compiling, weights
from amp_fx._torch import AFTER_STEP
from amp_fx.graphs.calls import is_cast
from amp_fx.weights import changes, values
from amp_fx.weights.changes import Check, State, state_of, states
from amp_fx.weights.kept import Kept
from amp_fx.weights.recipes import Cast
from amp_fx.weights.values import Input, Values
from holding import Held

SHAPES = ((64, 48), (48,), (3,), (8, 4, 3, 3))


def new_weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def copies_for(parameters: list[Any], dtype: torch.dtype = torch.bfloat16) -> Kept[list[Tensor]]:
    places = range(len(parameters))
    return Kept(Values([(Cast(dtype), (at,)) for at in places], [*map(Input, places)]).make)


def are_current(copies: Kept[list[Tensor]], parameters: list[Any]) -> bool:
    return all(torch.equal(c, p.to(c.dtype)) for c, p in zip(copies.of(parameters), parameters, strict=True))


def test_copies_are_made_once(held: Held) -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    first = copies.of(parameters)
    assert are_current(copies, parameters)
    assert copies.of(parameters) is first
    assert held.bytes() == sum(2 * p.numel() for p in parameters)


@pytest.mark.parametrize("asked", ["cache", "freeze"])
def test_graphs_with_gradients_cast_their_weights_and_the_log_says_so_once(
    asked: str, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lowered: list[torch.fx.GraphModule] = []

    def lower(gm: torch.fx.GraphModule, *_: Any) -> torch.fx.GraphModule:
        lowered.append(gm)
        return gm

    monkeypatch.setattr(compiling, "lower", lower)
    backend._say_cast.cache_clear()
    options = {"weights": asked, "profile": "off", "strict": True}
    with caplog.at_level(logging.INFO, logger="amp_fx.backend"):
        for width in (16, 32):
            torch.compile(nn.Linear(width, 8), backend="amp_fx", options=options)(torch.randn(4, width))
    inputs = [gm.graph.find_nodes(op="placeholder") for gm in lowered]
    assert [*map(len, inputs)] == [3, 3]
    assert all(map(is_cast, (user for found in inputs for node in found for user in node.users)))
    assert held.bytes() == 0
    assert [record.levelname for record in caplog.records if "'cast'" in record.getMessage()] == ["INFO"]


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
    monkeypatch.setattr(AFTER_STEP, "listen", lambda _: None)
    monkeypatch.setattr(states, "mark_stale", lambda state: setattr(state, "is_stale", True))
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


def test_a_weight_in_another_order_of_memory_gets_a_copy_in_that_order() -> None:
    parameter = nn.Parameter(torch.randn(8, 4, 3, 3))
    copies = copies_for([parameter])
    assert are_current(copies, [parameter])
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    assert are_current(copies, [parameter])
    assert copies.of([parameter])[0].stride() == parameter.stride()


# ---- large writes are seen by the next call, any write in a while ----

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "packed experts": lambda: torch.randn(8, 64, 64),
    "a number": lambda: torch.randn(()),
    "a vector": lambda: torch.randn(1000),
    "a matrix": lambda: torch.randn(64, 48),
    "long rows": lambda: torch.randn(90, 2048),
    "many long rows": lambda: torch.randn(180, 2048),
    "a transposed convolution": lambda: torch.randn(8, 60, 4, 4),
    "experts that are multiplied from the right": lambda: torch.randn(4, 90, 96),
    "a transposed matrix": lambda: torch.randn(48, 64).t(),
    "many rows": lambda: torch.randn(300, 7),
    "channels last": lambda: torch.randn(24, 16, 3, 3).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(33, 20).bfloat16(),
    "every second column": lambda: torch.randn(40, 60)[:, ::2],
    "half of it zeros": lambda: torch.randn(16, 128).relu(),
    "nearly all of it zeros": lambda: torch.zeros(16, 128).index_fill_(1, torch.tensor([3, 125]), 2.0),
    "a view that lies between others": lambda: torch.randn(1001)[1:].view(8, 125),
}


def slices_of(value: Tensor) -> Iterator[Tensor]:
    """Along each dimension: each slice of up to 64, runs of 1/16 of more."""
    for at, size in enumerate(value.shape):
        length = 1 if size <= 64 else -(-size // 16)
        for start in range(0, size - length + 1, 1 if size <= 64 else max(1, size // 50)):
            yield value.narrow(at, start, length)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_to_a_sixteenth_or_to_a_slice_is_seen_by_the_next_call(layout: str) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(LAYOUTS[layout]())
    copies = copies_for([parameter])
    order = sorted(range(parameter.ndim), key=lambda at: -parameter.stride(at))
    flat = parameter.data.permute(order).view(-1) if layout != "every second column" else parameter.data[:0]
    size = -(-len(flat) // 16)
    pieces = [flat[at : at + size] for at in range(0, len(flat) - size + 1, max(1, len(flat) // 47))]
    for piece in (*pieces, *slices_of(parameter.data)):
        assert are_current(copies, [parameter])
        before = piece.clone()
        piece.mul_(3.0)
        if not torch.equal(piece, before):
            assert are_current(copies, [parameter])
        piece.copy_(before)


def calls_until_seen(copies: Kept[list[Tensor]], parameters: list[Any]) -> int:
    """How many calls still had the copies of before."""
    before = states.changes
    for call in range(3000):
        copies.of(parameters)
        if states.changes != before:
            assert are_current(copies, parameters)
            return call
    raise AssertionError("never seen")


def swap_two(p: nn.Parameter) -> None:
    first, second = p.data[3].clone(), p.data[5].clone()
    p.data[3], p.data[5] = second, first


SMALL_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "a row": lambda p: p.data[33].mul_(300.0),
    "one element": lambda p: p.data[57, 3].add_(1.0),
    "the last element": lambda p: p.data[-1, -1].neg_(),
    "two rows change places": swap_two,
    "numpy": lambda p: p.detach().numpy()[99].fill(0.0),
}


@pytest.mark.parametrize("write", SMALL_WRITES)
@pytest.mark.parametrize("width", [16, 1024])
def test_any_write_is_seen_within_2049_calls(write: str, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 600), nn.Linear(600, width))
    parameters = list(model.parameters())
    copies = copies_for(parameters)
    for parameter in (parameters[0], parameters[2]):
        if len(parameter) < 100:
            continue
        assert are_current(copies, parameters)
        before = parameter.detach().clone()
        SMALL_WRITES[write](parameter)
        assert not torch.equal(parameter, before)
        assert calls_until_seen(copies, parameters) <= 2049


def test_of_larger_models_any_write_is_seen_within_2049_calls() -> None:
    parameters = [nn.Parameter(torch.randn(2100, 2048)) for _ in range(5)]
    copies = copies_for(parameters)
    copies.of(parameters)
    parameters[3].data[2000, 5] += 1.0
    assert 1 <= calls_until_seen(copies, parameters) <= 2049


def test_touch_says_at_once_that_a_weight_was_written_to() -> None:
    parameters = [nn.Parameter(torch.randn(1000, 16)), nn.Parameter(torch.randn(1000, 16))]
    copies = copies_for(parameters)
    assert are_current(copies, parameters)
    parameters[0].data[501, 3] = 0.0
    parameters[1].data[501, 3] = 0.0
    assert not are_current(copies, parameters)
    weights.touch(parameters[0], parameters[1].data)
    assert are_current(copies, parameters)
    with pytest.raises(WeightsError, match=r"touch\(\*model.parameters\(\)\)"):
        weights.touch(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


def test_clear_says_it_of_all_weights() -> None:
    parameter = nn.Parameter(torch.randn(1000, 16))
    copies = copies_for([parameter])
    assert are_current(copies, [parameter])
    parameter.data[501] = 0.0
    weights.clear()
    assert are_current(copies, [parameter])


# ---- events elsewhere ----


class Casts:
    """Counts the weights that are cast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = Tensor.copy_

        def copy_(self_: Tensor, source: Tensor, *args: Any) -> Tensor:
            self.count += self_.dtype is torch.bfloat16
            return original(self_, source, *args)

        monkeypatch.setattr(Tensor, "copy_", copy_)


def train(parameters: list[nn.Parameter]) -> None:
    """One call of a graph with gradients."""
    changes.counting(lambda *args: None)(*parameters, torch.ones(3))


def test_a_step_of_a_student_costs_its_teacher_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = new_weights(), new_weights()
    of_teacher, of_student = copies_for(teacher), copies_for(student)
    first = of_teacher.of(teacher)
    of_student.of(student)
    optimizer = torch.optim.SGD(student, lr=0.1)
    casts, before = Casts(monkeypatch), states.changes
    for _ in range(3):
        train(teacher[:0] + student)
        step(optimizer, student)
        assert of_teacher.of(teacher) is first
    assert casts.count == 0
    assert states.changes > before
    assert are_current(of_student, student)
    assert casts.count == len(student)


def test_only_the_weights_of_a_step_are_cast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    copies.of(parameters)
    casts = Casts(monkeypatch)
    step(torch.optim.SGD(parameters[:1], lr=0.1), parameters[:1])
    assert are_current(copies, parameters)
    assert casts.count == 1
    # an optimizer that has it, but no gradient
    torch.optim.SGD(parameters, lr=0.1).step()
    assert are_current(copies, parameters)
    assert casts.count == 1


def test_on_a_device_the_copies_of_changed_weights_alone_are_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed: list[list[bool]] = []
    kernels = SimpleNamespace(make=lambda: None, fits=lambda *_: True, renew=changed.append)
    module = SimpleNamespace(DeviceCopies=lambda *_: kernels)
    monkeypatch.setitem(sys.modules, "amp_fx.weights.device_copies", module)
    monkeypatch.setattr(values, "is_renewed_on_device", lambda *_: True)
    parameters = new_weights()
    copies = copies_for(parameters)
    copies.of(parameters)
    in_no_grad(parameters[1])
    copies.of(parameters)
    assert changed == [[False, True, False, False]]


def test_a_call_with_gradients_has_its_weights_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.randn(1000, 16)), nn.Parameter(torch.randn(1000, 16))]
    parameters[1].requires_grad_(False)
    copies = copies_for(parameters)
    copies.of(parameters)
    casts = Casts(monkeypatch)
    train(parameters)
    # an optimizer of one's own, that is no torch.optim.Optimizer and writes to one row
    parameters[0].data[501] -= 1.0
    assert are_current(copies, parameters)
    assert casts.count == 1
    train(parameters)
    assert are_current(copies, parameters)
    assert casts.count == 1


def test_an_optimizer_of_a_flat_piece_of_memory_is_noticed() -> None:
    flat = torch.randn(2000)
    parameters = [nn.Parameter(flat[:1000].view(10, 100)), nn.Parameter(flat[1000:].view(100, 10))]
    copies = copies_for(parameters)
    copies.of(parameters)
    flat.requires_grad_(True)
    flat.grad = torch.zeros(2000)
    flat.grad[[501, 1501]] = 1.0
    torch.optim.SGD([flat], lr=0.1, fused=True).step()
    assert are_current(copies, parameters)


def test_two_models_that_share_weights_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = nn.Parameter(torch.randn(64, 64)), new_weights()
    models = [[shared, own[0]], [shared, nn.Parameter(torch.randn(64, 48))]]
    copies = copies_for(models[0])
    first = [copies.of(model) for model in models]
    casts = Casts(monkeypatch)
    for _ in range(3):
        assert all(copies.of(model) is kept for model, kept in zip(models, first, strict=True))
    assert first[0][0] is first[1][0]
    shared.data.mul_(2.0)
    assert all(are_current(copies, model) for model in models)
    assert casts.count == 1


# ---- lives ----


def test_copies_die_with_their_weights(held: Held) -> None:
    parameters = new_weights()
    copies = copies_for(parameters)
    low = weakref.ref(copies.of(parameters)[0])
    storage = weakref.ref(parameters[0].untyped_storage())
    gc.disable()
    try:
        del parameters
        assert (low(), storage(), held.bytes()) == (None, None, 0)
    finally:
        gc.enable()


def test_memory_that_outlives_its_weight_keeps_one_copy_for_whoever_is_there(held: Held) -> None:
    flat = torch.randn(64 * 48)
    copies = copies_for([flat])
    for size in (64, 48, 64):
        # a new object each time, perhaps with the id of the one before
        parameter = nn.Parameter(flat[: size * 48].view(size, 48))
        assert are_current(copies, [parameter])
        assert copies.of([parameter])[0].shape == parameter.shape
        flat.mul_(2.0)
        assert are_current(copies, [parameter])
    assert held.bytes() <= 2 * (64 + 48) * 48
    del flat, parameter
    assert held.bytes() == 0


def test_weights_that_change_between_two_pieces_of_memory_have_one_copy(held: Held) -> None:
    parameter = nn.Parameter(torch.randn(64, 48))
    # as moving averages are put in the place of what is trained, and taken out again
    values = [parameter.data, torch.randn(64, 48)]
    copies = copies_for([parameter])
    for step in range(4):
        parameter.data = values[step % 2]
        assert are_current(copies, [parameter])
        assert held.bytes() == 2 * 64 * 48


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


def check_of(parameters: list[nn.Parameter]) -> tuple[Check, list[State]]:
    now = [*map(state_of, parameters)]
    return Check(parameters, now, lambda _: None), now


def test_a_write_during_a_copy_counts_even_if_it_is_undone() -> None:
    parameters = new_weights()
    check, before = check_of(parameters)
    parameters[1].data.mul_(2.0)
    check.confirm(parameters)
    parameters[1].data.mul_(0.5)
    assert not check.is_current(parameters)
    _, now = check_of(parameters)
    assert now[1] is not before[1]


def test_nothing_is_left_of_a_weight_that_has_died() -> None:
    before = len(states)
    parameters = new_weights()
    copies = copies_for(parameters)
    copies.of(parameters)
    assert len(states) == before + len(parameters)
    del parameters
    assert len(states) == before
