"""One assertion about all of a rewritten program: casts, dtypes, aliases, and numerics beside autocast."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from amp_fx import record
from amp_fx.compiler.settings import Options
from amp_fx.precision.plans.plan import Plan, dtype_name
from support.tracing.captured_graphs import (
    DEFAULTS,
    Program,
    Rewritten,
    autocast_in,
    casts_of,
    plans,
    rewrite,
    without_inductor,
)

#: casts from and to a dtype
DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")

#: error a result may have beyond 1.25 times that of torch.autocast
NOISE = 1e-3


def check(
    program: Program,
    *args: Any,
    casts: Mapping[tuple[str, str], int],
    dtypes: Mapping[str, str | Sequence[str]] | None = None,
    options: Mapping[str, Any] | None = None,
    ambient: torch.dtype | None = None,
    tolerance: float = NOISE,
    reference: torch.dtype = torch.float64,
) -> Rewritten:
    """Asserts everything that is promised about a rewritten program at once.

    Its inputs are copied before every run. ``casts`` is the exact number of float casts in the rewritten graph, bodies
    included, by (from, to); ``dtypes`` the planned dtype by op (of all its calls, or one per call in order) or by node
    name; ``tolerance`` the error allowed on top of 1.25 times that of torch.autocast, or all that is allowed where
    autocast raises or is not finite; ``reference`` the dtype of the exact run, float32 for programs that name dtypes.

    Also asserted: outputs, mutated inputs, buffers and gradients have the dtypes of the eager program under
    the same ambient autocast, and outputs alias inputs and each other exactly where they do eagerly.
    """
    opts = Options.parse(None, options)
    low = ambient or opts.low_dtype("cpu")
    result: list[Rewritten] = []

    def compiled(of: Program) -> Program:
        def ours(*inputs: Any) -> Any:
            result.append(rewrite(of, *inputs, options=options, ambient=ambient))
            return result[-1].outputs

        return ours

    got = _run(program, args, compiled)
    rewritten = result[0]
    assert casts_of(rewritten.gm) == dict(casts), casts_of(rewritten.gm)
    assert casts_of(rewritten.gm) == Counter(
        (dtype_name(cast.from_dtype), dtype_name(cast.to_dtype)) for cast in rewritten.plan.casts
    )
    for key, wanted in (dtypes or {}).items():
        rows = plans(rewritten.plan, key) or [row for row in rewritten.plan.nodes if row.name == key]
        assert rows, f"{key!r} is neither a node nor an op; ops: {sorted(rewritten.plan.ops_by_dtype())}"
        planned = [dtype_name(row.dtype) if row.dtype else "none" for row in rows]
        assert planned == ([wanted] * len(rows) if isinstance(wanted, str) else list(wanted)), (key, planned)
    _assert_same(got, program, args, ambient, low, reference, tolerance)
    return rewritten


def checked(*args: Any, **promised: Any) -> Callable[[Program], Callable[[], None]]:
    """Makes a test of a program: it is rewritten, and :func:`check` asserts what is promised about it."""

    def as_test(program: Program) -> Callable[[], None]:
        def test() -> None:
            check(program, *args, **promised)

        return test

    return as_test


def agree(
    program: Program,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    ambient: torch.dtype | None = None,
    tolerance: float = NOISE,
    reference: torch.dtype = torch.float64,
    fullgraph: bool = True,
    dynamic: bool | None = None,
) -> list[Plan]:
    """Asserts what :func:`check` does, but for casts, of a program compiled by the backend itself, with AOTAutograd.

    Several graphs are fine; their plans are returned in order of compilation.
    """
    low = ambient or Options.parse(None, options).low_dtype("cpu")

    def compiled(of: Program) -> Program:
        given = {**DEFAULTS, **(options or {})}
        own = torch.compile(of, backend="amp_fx", fullgraph=fullgraph, dynamic=dynamic, options=given)
        return _under(ambient)(own)

    with without_inductor(), record() as recording:
        got = _run(program, args, compiled)
    _assert_same(got, program, args, ambient, low, reference, tolerance)
    return recording.plans


@dataclass(frozen=True)
class _Run:
    """One arm: every floating or other tensor that is visible afterwards, and who shares a storage."""

    values: dict[str, Tensor]
    aliases: frozenset[frozenset[str]]


_Arm = Callable[[Program], Program]


def _under(dtype: torch.dtype | None) -> _Arm:
    """The arm that runs a program under autocast, or as it is."""

    def arm(of: Program) -> Program:
        def call(*inputs: Any) -> Any:
            with autocast_in(dtype):
                return of(*inputs)

        return call

    return arm


def _assert_same(
    got: _Run,
    program: Program,
    args: Sequence[Any],
    ambient: torch.dtype | None,
    low: torch.dtype,
    reference: torch.dtype,
    tolerance: float,
) -> None:
    """Dtypes and aliases of the eager program; at most 1.25 times the error of autocast, and the tolerance."""
    eager, exact = _run(program, args, _under(ambient)), _run(program, args, _under(None), dtype=reference)
    try:
        autocast = _run(program, args, _under(low))
    except RuntimeError:
        autocast = None
    assert {name: value.dtype for name, value in got.values.items()} == {
        name: value.dtype for name, value in eager.values.items()
    }
    assert got.aliases == eager.aliases, (got.aliases, eager.aliases)
    for name, value in got.values.items():
        if not value.is_floating_point():
            assert torch.equal(value, eager.values[name]), name
            continue
        allowed = tolerance
        if autocast is not None:
            theirs = _error(autocast.values[name], exact.values[name])
            allowed += 1.25 * theirs if math.isfinite(theirs) else 0.0
        error = _error(value, exact.values[name])
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def _run(program: Program, args: Sequence[Any], arm: _Arm, dtype: torch.dtype | None = None) -> _Run:
    torch._dynamo.reset()
    own, inputs = copy.deepcopy((program, args))
    if dtype is not None:
        own = own.to(dtype) if isinstance(own, nn.Module) else own
        inputs = tree_map(lambda value: _converted(value, dtype), inputs)
    torch.manual_seed(0)
    outputs = arm(own)(*inputs)
    named, results = (
        {
            f"{what} {index}": value
            for index, value in enumerate(tree_leaves(values))
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        }
        for what, values in (("input", inputs), ("output", outputs))
    )
    aliases = shared_storages({**named, **results})
    roots = [value for value in results.values() if value.requires_grad and value.grad_fn is not None]
    if roots:
        torch.autograd.backward(roots, gradients_for(roots))
    leaves = dict(named)
    if isinstance(own, nn.Module):
        results.update({f"buffer {name}": value for name, value in own.named_buffers()})
        leaves.update(own.named_parameters())
    grads = {f"gradient of {name}": v.grad for name, v in leaves.items() if v.is_leaf and v.grad is not None}
    values = {**named, **results, **grads}
    return _Run({name: value.detach() for name, value in values.items()}, aliases)


def shared_storages(values: Mapping[str, Tensor]) -> frozenset[frozenset[str]]:
    """Who shares a storage with whom; what has no elements shares nothing that is seen."""
    found: dict[int, set[str]] = {}
    for name, value in values.items():
        if value.numel():
            found.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
    return frozenset(frozenset(names) for names in found.values() if len(names) > 1)


def gradients_for(values: Sequence[Tensor]) -> list[Tensor]:
    """Random gradients, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype) for v in values]


def _error(value: Tensor, exact: Tensor) -> float:
    """Relative L2 distance."""
    if torch.equal(value.double(), exact.double()):
        return 0.0
    norm = exact.double().norm().item()
    return (value.double() - exact.double()).norm().item() / max(norm, 1e-12)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)
