"""Looking for inf and nan: in gradients of every kind, at once on a CPU and without waiting elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from amp_fx.scaling import findings
from amp_fx.scaling.findings import Finding, look
from amp_fx.scaling.history import History

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["host", "device"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of looking, on CPU tensors."""
    if request.param == "device":
        monkeypatch.setattr(findings, "_AT_HAND", frozenset())
    return request.param


def parameter(grad: Tensor | None) -> nn.Parameter:
    p = nn.Parameter(
        torch.zeros(() if grad is None else grad.shape, dtype=None if grad is None else grad.dtype)
    )
    p.grad = grad
    return p


def seen(*parameters: nn.Parameter) -> Finding:
    return look(parameters, torch.zeros(()))


def sparse(values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor(values), (4,), check_invariants=True)


def spoilt(dtype: torch.dtype, value: float = NAN) -> Tensor:
    grad = torch.ones(100, 7, dtype=dtype)
    grad[99, 3] = value
    return grad


BAD: dict[str, Callable[[], Tensor]] = {
    **{
        f"one {v} in {d}": lambda d=d, v=v: spoilt(d, v)
        for d in (torch.float32, torch.bfloat16)
        for v in (INF, NAN)
    },
    "one -inf in fp64": lambda: spoilt(torch.float64, -INF),
    "inf and -inf": lambda: torch.tensor([INF, -INF]),
    "one number": lambda: torch.tensor(NAN),
    "complex": lambda: torch.tensor([1.0, complex(0.0, INF)]),
    "sparse": lambda: sparse([1.0, INF]),
    "sparse, finite until its duplicates are added": lambda: sparse([3e38, 3e38]),
    "strides": lambda: spoilt(torch.float32).t()[1::2],
    "channels last": lambda: spoilt(torch.float32).view(2, 5, 10, 7).to(memory_format=torch.channels_last),
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
    good, bad = parameter(torch.ones(5)), parameter(make())
    finding = seen(good, bad)
    assert finding.found.item() == 1.0
    assert finding.nonfinite() == {id(bad)}


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_what_is_good_is_not_suspected(make: Callable[[], Tensor | None]) -> None:
    finding = seen(parameter(torch.ones(5)), parameter(make()))
    assert finding.found.item() == 0.0
    assert finding.nonfinite() == set()


def test_where_there_is_no_gradient_nothing_is_found() -> None:
    for finding in (seen(), seen(parameter(None))):
        assert finding.found.item() == 0.0
        assert finding.nonfinite() == set()


def test_the_bad_are_told_from_those_whose_sum_overflows() -> None:
    large, bad = parameter(torch.full((4,), 3e38)), parameter(torch.tensor([INF, 1.0]))
    assert seen(large, bad).nonfinite() == {id(bad)}


def test_what_was_found_in_several_dtypes_is_one_number() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    assert seen(*(parameter(spoilt(dtype)) for dtype in dtypes)).found.item() == 1.0
    assert seen(*(parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes)).found.item() == 0.0


def test_nothing_is_written() -> None:
    parameters = [parameter(spoilt(torch.float32)), parameter(torch.ones(3))]
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    seen(*parameters)
    for p, value in zip(parameters, before, strict=True):
        assert p.grad is not None
        assert p.grad._version == (1 if p is parameters[0] else 0)
        assert torch.equal(p.grad.nan_to_num(7.0), value.nan_to_num(7.0))


def test_parameters_of_an_optimizer_that_died_are_not_named() -> None:
    bad, history = parameter(torch.tensor([INF])), History()
    optimizer = torch.optim.SGD([bad])
    history.add_finding(optimizer, seen(bad))
    assert history.names(history.bad(), {id(bad): "bad"}) == ["bad"]
    # its parameters may die with it, and others have their ids
    del optimizer
    gc.collect()
    assert history.bad() == set()
