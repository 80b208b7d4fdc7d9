"""Looking for inf and nan: in gradients of every kind, at once on a CPU and without waiting elsewhere."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from amp_fx.runtime.scaling import findings
from amp_fx.runtime.scaling.findings import ScaledStep, bad_of, look
from support.models.loss_scaled import INF, NAN

FP32 = torch.float32


@pytest.fixture(params=["host", "device"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of looking, on CPU tensors."""
    if request.param == "device":
        monkeypatch.setattr(findings, "AT_HAND", frozenset())


def parameter(grad: Tensor | None) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(()) if grad is None else torch.zeros(grad.shape, dtype=grad.dtype))
    p.grad = grad
    return p


def seen(*parameters: nn.Parameter) -> tuple[float, set[int]]:
    """Whether something was found, and the ids of bad parameters."""
    found = torch.zeros(())
    bad = bad_of(look(parameters, found))
    return found.item(), bad


def sparse(values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor(values), (4,), check_invariants=True)


def spoilt(dtype: torch.dtype, value: float = NAN) -> Tensor:
    grad = torch.ones(100, 7, dtype=dtype)
    grad[99, 3] = value
    return grad


BAD: dict[str, Callable[[], Tensor]] = {
    **{f"one {v} in {d}": lambda d=d, v=v: spoilt(d, v) for d in (FP32, torch.bfloat16) for v in (INF, NAN)},
    "one -inf in fp64": lambda: spoilt(torch.float64, -INF),
    "inf and -inf": lambda: torch.tensor([INF, -INF]),
    "one number": lambda: torch.tensor(NAN),
    "complex": lambda: torch.tensor([1.0, complex(0.0, INF)]),
    "sparse": lambda: sparse([1.0, INF]),
    "sparse, finite until its duplicates are added": lambda: sparse([3e38, 3e38]),
    "strides": lambda: spoilt(FP32).t()[1::2],
    "channels last": lambda: spoilt(FP32).view(2, 5, 10, 7).to(memory_format=torch.channels_last),
    "made of two": lambda: TwoTensor(torch.ones(3), torch.tensor([1.0, NAN, 1.0])),
}

GOOD: dict[str, Callable[[], Tensor | None]] = {
    "no gradient": lambda: None,
    "empty": lambda: torch.empty(0, 3),
    "a sum that overflows": lambda: torch.full((4,), 3e38),
    "a sum of squares that overflows": lambda: torch.full((4,), 1e30),
    "denormal": lambda: torch.full((4,), 1e-40),
    "sparse zeros": lambda: sparse([0.0, 0.0]).coalesce() * 0,
    "sparse": lambda: sparse([1.0, 2.0]),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "made of two": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_what_is_bad_is_found_among_what_is_good(make: Callable[[], Tensor]) -> None:
    # the sum of one that is good overflows
    good, bad = parameter(torch.full((4,), 3e38)), parameter(make())
    assert seen(good, bad) == (1.0, {id(bad)})


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_what_is_good_is_not_suspected(make: Callable[[], Tensor | None]) -> None:
    assert seen(parameter(torch.ones(5)), parameter(make())) == (0.0, set())


def test_what_was_found_in_several_dtypes_is_one_number_and_of_no_gradients_nothing() -> None:
    dtypes = (FP32, torch.bfloat16, torch.float64)
    assert seen(*(parameter(spoilt(dtype)) for dtype in dtypes))[0] == 1.0
    assert seen(*(parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes))[0] == 0.0
    assert seen() == seen(parameter(None)) == (0.0, set())


def test_nothing_is_written() -> None:
    grads = [spoilt(FP32), torch.ones(3)]
    before, versions = [grad.clone() for grad in grads], [grad._version for grad in grads]
    seen(*map(parameter, grads))
    assert [grad._version for grad in grads] == versions
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(grads, before, strict=True))


def test_bad_parameters_are_named_by_graphs_then_by_optimizers_and_not_once_these_are_dead() -> None:
    graphs, own, gone = (parameter(torch.tensor([INF])) for _ in range(3))
    optimizer, dies = torch.optim.SGD([own, graphs]), torch.optim.SGD([gone])
    step = ScaledStep()
    step.enter(["head", "good"], [graphs, good := parameter(torch.ones(1))])
    assert step.nonfinite() == ["head"], "before any optimizer looks"
    for each, parameters in ((optimizer, [own, graphs]), (dies, [gone])):
        step.looks.append((weakref.ref(each), look(parameters, torch.zeros(()))))
    step.leaves.clear()
    assert step.nonfinite() == ["parameter 0 of group 0", "head"]
    # its parameters may die with it, and others have their ids
    del optimizer, each
    gc.collect()
    assert step.nonfinite() == ["parameter 0 of group 0"]
    assert good.grad is not None
