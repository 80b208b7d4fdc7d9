"""How a changed weight is noticed: the table of writes, optimizers, graphs with gradients, samples."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from amp_fx import WeightsError, weights
from amp_fx._torch import AFTER_STEP, FakeTensorMode
from amp_fx.runtime.weights import changes
from amp_fx.runtime.weights.changes import SAMPLED, Fingerprint, sampled_offsets
from support.checks.weight_writes import WRITES, are_current, copies_for, new_layer, new_weights


@pytest.mark.parametrize("way", WRITES)
def test_a_write_is_seen_by_the_next_call_or_after_touch(way: str) -> None:
    write, is_seen = WRITES[way]
    layer = new_layer()
    copies = copies_for(1)
    before = layer.weight.detach().clone()
    assert are_current(copies, [layer.weight])
    write(layer)
    is_changed = way != "another slice of a flat vector"
    assert torch.equal(layer.weight, before) != is_changed
    assert are_current(copies, [layer.weight]) == (is_seen or not is_changed)
    weights.touch(layer.weight)
    assert are_current(copies, [layer.weight])


def test_touch_takes_tensors_in_the_memory_of_a_weight_and_nothing_else() -> None:
    parameters = [nn.Parameter(torch.randn(1000, 16)) for _ in range(2)]
    # a graph that clear() does not reach counts as well
    fingerprint, copies = Fingerprint(parameters, parameters), copies_for(2)
    for tell in (
        lambda: weights.touch(parameters[0], parameters[1].data),
        # all weights: clear, and what has no memory of its own
        weights.clear,
        lambda: weights.touch(TwoTensor(torch.ones(2), torch.ones(2))),
    ):
        assert are_current(copies, parameters)
        for parameter in parameters:
            parameter.data[501] += 1.0
        assert not are_current(copies, parameters)
        assert fingerprint.matches(parameters)
        tell()
        assert are_current(copies, parameters)
        assert not fingerprint.matches(parameters)
        fingerprint = Fingerprint(parameters, parameters)
    with pytest.raises(WeightsError, match=r"touch\(\*model.parameters\(\)\)"):
        weights.touch(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


# ---- the sample ----

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "nothing": lambda: torch.randn(0, 3),
    "a number": lambda: torch.randn(()),
    "a vector of few": lambda: torch.randn(5),
    "a vector of few, not a multiple of a word": lambda: torch.randn(15)[1:8].bfloat16(),
    "a matrix": lambda: torch.randn(64, 48),
    "a transposed matrix": lambda: torch.randn(48, 64).t(),
    "channels last": lambda: torch.randn(24, 16, 3, 3).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(33, 20).bfloat16(),
    "float8": lambda: torch.randn(33, 20).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(20, 20, dtype=torch.complex128),
    "every second column": lambda: torch.randn(40, 60)[:, ::2],
    "a view that lies between others": lambda: torch.randn(1001)[1:].view(8, 125),
    "one value": lambda: torch.zeros(64, 64),
    "nan": lambda: torch.full((64, 64), torch.nan),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_element_of_each_piece_of_a_weight_is_sampled_and_compared_by_bits(layout: str) -> None:
    weight = LAYOUTS[layout]()
    places = torch.arange(weight.numel()).reshape(weight.shape)
    # which element lies at an offset
    at = torch.full((1 + sum((n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True)),), -1)
    at.as_strided(weight.shape, weight.stride()).copy_(places) if weight.numel() else None
    found = np.array([int(at[offset]) for offset in sampled_offsets(weight)])
    if weight.numel() <= SAMPLED:
        assert found.tolist() == list(range(weight.numel()))
    else:
        # where a piece ends within an element, that is of both
        bounds = np.arange(SAMPLED + 1) * weight.numel() / SAMPLED
        assert np.all((np.floor(bounds[:-1]) <= found) & (found < np.ceil(bounds[1:])))
    # and is compared by its bits
    fingerprint = Fingerprint([weight], [weight])
    assert fingerprint.matches([weight])
    if weight.numel():
        weight.data.copy_(torch.ones(weight.shape).mul_(-3.0))
        assert not fingerprint.matches([weight])


def test_weights_without_a_version_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():
        weight = torch.randn(64, 64)
        for _ in range(2):
            fingerprint = Fingerprint([weight], [weight])
        assert fingerprint.matches([weight])
        weight.mul_(2.0)
        assert not fingerprint.matches([weight])
    [text] = [record.getMessage() for record in caplog.records if "version" in record.getMessage()]
    assert "amp_fx.weights.touch(parameter)" in text


def test_a_call_compares_all_weights_by_one_read_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[int]()
    original = Tensor.index_select

    def index_select(self_: Tensor, dim: int, index: Tensor) -> Tensor:
        reads.append(len(index))
        return original(self_, dim, index)

    parameters = [nn.Parameter(torch.randn(256, 256)) for _ in range(20)]
    copies = copies_for(20)
    copies.of(parameters)
    monkeypatch.setattr(Tensor, "index_select", index_select)
    for _ in range(3):
        copies.of(parameters)
    assert reads == [20 * SAMPLED] * 3


# ---- optimizers ----

#: those of torch that take any parameters
OPTIMIZERS = {
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
} - {"Optimizer", "LBFGS", "Muon", "SparseAdam"}
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}


def step(run: Callable[[], object], parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.randn_like(p)
    run()
    for p in parameters:
        p.grad = None


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_an_optimizer_is_noticed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # not even the hook is needed, as every element moves
    monkeypatch.setattr(AFTER_STEP, "listen", lambda _: None)
    for name in OPTIMIZERS:
        if form == "fused" and name not in FUSED:
            continue
        parameters = new_weights()
        copies = copies_for(len(parameters))
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **FORMS[form])
        for _ in range(2):
            assert are_current(copies, parameters)
            step(optimizer.step, parameters)
        assert are_current(copies, parameters), name


def test_a_step_that_writes_to_some_rows_is_noticed() -> None:
    parameters, copies = new_weights()[:1], copies_for(1)
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
    assert are_current(copies, parameters)
    rows = torch.tensor([[7, 9]])
    parameters[0].grad = torch.sparse_coo_tensor(rows, torch.randn(2, 48), (64, 48), check_invariants=True)
    optimizer.step()
    assert are_current(copies, parameters)


def test_a_compiled_step_is_noticed() -> None:
    parameters = new_weights()[:2]
    copies = copies_for(2)
    compiled = torch.compile(torch.optim.AdamW(parameters, lr=0.1).step, backend="aot_eager")
    for _ in range(2):
        assert are_current(copies, parameters)
        step(compiled, parameters)
    assert are_current(copies, parameters)


# ---- events elsewhere ----


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that are cast."""
    found = list[Tensor]()
    original = Tensor.copy_

    def copy_(self_: Tensor, source: Tensor, *args: Any) -> Tensor:
        found.extend([source] if self_.dtype is torch.bfloat16 else [])
        return original(self_, source, *args)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    return found


def train(parameters: list[nn.Parameter]) -> None:
    """One call of a graph with gradients."""
    changes.counting(lambda *args: None)(*parameters, torch.ones(3))


def test_a_step_of_a_student_costs_its_teacher_nothing(casts: list[Tensor]) -> None:
    teacher, student = new_weights(), new_weights()
    of_teacher, of_student = copies_for(4), copies_for(4)
    first = of_teacher.of(teacher)
    of_student.of(student)
    optimizer = torch.optim.SGD(student, lr=0.1)
    casts.clear()
    for _ in range(3):
        train(student)
        step(optimizer.step, student)
        assert of_teacher.of(teacher) is first
    assert len(casts) == 0
    assert are_current(of_student, student)
    assert len(casts) == len(student)


def test_a_step_on_fake_weights_asks_for_no_memory(recwarn: pytest.WarningsRecorder) -> None:
    served = new_weights()
    copies = copies_for(4)
    copies.of(served)
    with FakeTensorMode():
        layer = nn.Linear(4, 4)
        layer(torch.randn(2, 4)).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not [str(warning.message) for warning in recwarn if "data pointer" in str(warning.message)]


def test_only_the_weights_of_a_step_are_cast_again(casts: list[Tensor]) -> None:
    parameters = new_weights()
    parameters[3].requires_grad_(False)
    copies = copies_for(4)
    copies.of(parameters)
    casts.clear()
    step(torch.optim.SGD(parameters[:1], lr=0.1).step, parameters[:1])
    assert are_current(copies, parameters)
    assert len(casts) == 1
    # of an optimizer that has all of them, those that it may have written to
    torch.optim.SGD(parameters, lr=0.1).step()
    assert are_current(copies, parameters)
    assert len(casts) == 4


def test_after_a_call_with_gradients_its_weights_count_as_written_to(casts: list[Tensor]) -> None:
    parameters = [nn.Parameter(torch.randn(1000, 16)) for _ in range(3)]
    parameters[1].requires_grad_(False)
    copies = copies_for(3)
    copies.of(parameters)
    casts.clear()
    train(parameters[:2])
    # an optimizer of one's own, that is no torch.optim.Optimizer and writes to one row
    parameters[0].data[501] -= 1.0
    assert are_current(copies, parameters)
    assert len(casts) == 1


def test_what_torch_calls_after_a_step_goes_with_the_last_weight() -> None:
    weights.clear()
    # graphs of other tests
    gc.collect()
    parameters = new_weights()
    copies = copies_for(4)
    copies.of(parameters)
    assert [each for each in AFTER_STEP.listeners if each.__module__ == changes.__name__]
    del parameters
    torch.optim.SGD([nn.Parameter(torch.ones(2))]).step()
    assert not [each for each in AFTER_STEP.listeners if each.__module__ == changes.__name__]
