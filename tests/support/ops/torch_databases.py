"""Torch's own databases of ops and modules through the backend, beside eager autocast.

Asked are the first samples that torch has of each op of ``op_db`` and of each module of ``module_db``. A sample is
compiled by the backend, with AOTAutograd instead of Inductor, and asked twice: in the user's ``torch.autocast``, where
it has to return what eager autocast does (or stock ``aot_eager``, where AOTAutograd's own formulas make a difference),
and by itself, where it has to return the dtypes of eager fp32 and be no further from fp64 than autocast.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

import amp_fx
from amp_fx import Report
from support.checks.whole_program import NOISE
from support.tracing.captured_graphs import DEFAULTS, without_inductor

#: samples of each op and of each module
EACH = 2

#: samples that differ on purpose, by name, and why
EXPLAINED: dict[str, str] = dict.fromkeys(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    "memory that nobody has written to",
)


@dataclass(frozen=True)
class Sample:
    """One call; ``make`` returns a new program and its inputs, the same ones each time."""

    name: str  # of the op or module, with its number
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


def ops(step: int = 1) -> Iterator[Sample]:
    """The first samples of every ``step``-th op."""
    for op in op_db[::step]:
        if torch.float32 not in op.dtypes:
            continue
        for number in range(EACH):
            name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
            yield Sample(f"{name} {number}", functools.partial(_op_call, op, number))


def _op_call(op: Any, number: int) -> Any:
    torch.manual_seed(0)
    # op.sample_inputs() looks up the source of every frame above it for each sample, which takes seconds
    sample = next(itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, False), number, None))
    return op.op, (sample.input, *sample.args), sample.kwargs


def modules(step: int = 1) -> Iterator[Sample]:
    """The first samples of every ``step``-th module, each with its own arguments."""
    for module in module_db[::step]:
        for number in range(EACH):
            yield Sample(f"{module.name} {number}", functools.partial(_module_call, module, number))


def _module_call(module: Any, number: int) -> Any:
    torch.manual_seed(0)
    own = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": True}
    found = module.module_inputs_func(module, **own)
    sample = next(itertools.islice(found, number, None))
    made = sample.constructor_input
    instance = module.module_cls(*made.args, **made.kwargs)
    return instance, sample.forward_input.args, sample.forward_input.kwargs


def outcome(sample: Sample) -> str:
    """``"agrees"``, ``"not asked: why"``, or what differs."""
    try:
        sample.make()
    except StopIteration:
        return "not asked: no more samples"
    try:
        autocast, eager = _run(sample, low=True), _run(sample)
    except Exception as error:  # whatever a sample raises by itself is no question for us
        return f"not asked: eager raises {type(error).__name__}"
    try:
        inside, ours = _run(sample, backend="amp_fx", low=True), _run(sample, backend="amp_fx")
    except Exception as error:  # this one is an answer, unless torch.compile raises without us
        try:
            _run(sample, backend="aot_eager", low=True)
            _run(sample, backend="aot_eager")
        except Exception as stock:  # what a sample raises under torch.compile by itself is none for us either
            return f"not asked: torch.compile raises {type(stock).__name__}"
        return f"raises {type(error).__name__}: {str(error)[:300]}"
    differs = _differs(inside, autocast)
    if differs and _differs(inside, _run(sample, backend="aot_eager", low=True)):
        return f"{differs}, in autocast"
    return _compare(sample, autocast, ours, eager)


class _Taken(nn.Module):
    """Takes the arguments of a program as two, so that none of them is taken for an option of ``explain``."""

    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.program = program

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.program(*args, **kwargs)


def explanation(sample: Sample) -> str:
    """``"explained"``, ``"not asked: why"``, or what :func:`amp_fx.explain` raises."""
    try:
        sample.make()
    except StopIteration:
        return "not asked: no more samples"
    program, args, kwargs = sample.make()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = amp_fx.explain(_Taken(program), (args, kwargs))
        except Exception as error:
            try:
                _run(sample)
                _run(sample, backend="aot_eager")
            except Exception as stock:  # as in outcome()
                return f"not asked: without amp_fx raises {type(stock).__name__}"
            return f"raises {type(error).__name__}: {str(error)[:300]}"
    fallbacks = [plan.fallback for plan in report.plans if plan.fallback]
    told = str(report)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    # what runs otherwise than asked is told
    return "explained" if all(reason[:20] in told for reason in fallbacks) else f"not told: {fallbacks}"


def _differs(got: list[Any], wanted: list[Any]) -> str:
    """How results differ; an empty string: they do not, bit for bit."""
    if _kinds(got) != _kinds(wanted):
        return f"returns {_kinds(got)}, not {_kinds(wanted)}"
    if [getattr(v, "shape", None) for v in got] != [getattr(v, "shape", None) for v in wanted]:
        return "other shapes"
    return "" if all(map(_equal, got, wanted)) else "other values"


def _compare(sample: Sample, autocast: list[Any], ours: list[Any], eager: list[Any]) -> str:
    """The answer for a sample outside autocast."""
    if _kinds(ours) != _kinds(eager):
        return f"returns {_kinds(ours)}, eager {_kinds(eager)}"
    try:
        exact = _run(sample, double=True)
    except Exception:  # as in outcome()
        exact = eager
    if len(exact) != len(ours):
        exact = eager
    for one, theirs, reference in zip(ours, autocast, exact, strict=True):
        if isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()):
            allowed = 1.25 * _error(theirs, reference) + NOISE
            if not (error := _error(one, reference)) <= allowed:
                return f"error {error:.2e}, allowed {allowed:.2e}"
    return "agrees"


def _kinds(values: list[Any]) -> list[Any]:
    return [v.dtype if isinstance(v, Tensor) else type(v) for v in values]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _error(value: Tensor, exact: Tensor) -> float:
    wide = torch.complex128 if value.is_complex() or exact.is_complex() else torch.float64
    value, exact = value.to_dense().to(wide), exact.to_dense().to(wide)
    same = torch.isclose(value, exact, equal_nan=True, rtol=0, atol=0)
    left, right = torch.where(same, 0, value), torch.where(same, 0, exact)
    if not left.numel() or bool(same.all()):
        return 0.0
    norm = torch.where(exact.isfinite(), exact, 0).abs().square().sum().sqrt().item()
    return (left - right).abs().square().sum().sqrt().item() / max(norm, 1e-12)


def _run(sample: Sample, backend: str = "", *, low: bool = False, double: bool = False) -> list[Any]:
    """What a sample returns, its inputs included, for it may write to them."""
    program, args, kwargs = sample.make()
    if double:
        args, kwargs = tree_map(_double, (args, kwargs))
        program = program.double() if isinstance(program, nn.Module) else program
    called = program
    if backend:
        torch._dynamo.reset()
        options = {**DEFAULTS, "numerics": "eager"} if low else dict(DEFAULTS)
        called = _wrapped(program)
        called = torch.compile(called, backend=backend, options=options if backend == "amp_fx" else None)
    region = torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()
    with warnings.catch_warnings(), without_inductor(), region:
        warnings.simplefilter("ignore")
        if backend == "amp_fx":
            warnings.filterwarnings("error", message="amp_fx")
        torch.manual_seed(1)
        result = called(*args, **kwargs)
    return tree_leaves((result, args, kwargs))


def _wrapped(program: Callable[..., Any]) -> Callable[..., Any]:
    """A frame of its own: Dynamo skips those in torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    return call


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if value is torch.float32 else value
