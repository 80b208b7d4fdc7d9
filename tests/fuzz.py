"""Random small programs, held against eager autocast: ``python tests/fuzz.py --cases 5000``.

A program is a few lines of Python that use ops of the lists, views, in-place writes, mixed dtypes, casts, and
regions of autocast and of ``no_grad``. Each is traced by Dynamo, rewritten twice (both ``numerics``) and run, with
options that are drawn as well (``random_programs.py``). Compared with the same lines run eagerly:

1. dtypes of outputs, mutated inputs and gradients: equal.
2. who shares a storage with whom, and which inputs were written to: equal.
3. values under ``numerics="eager"`` and the user's own autocast: equal bit for bit, where options place every op as
   autocast does.
4. values otherwise: within low-precision error of the program in fp64, where no rule sends an op low.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import torch
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError, Unsupported, UserError

import amp_fx.compiler.rewriting
from amp_fx._torch import GROUPS
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import graph_devices
from amp_fx.precision.plans.plan import Plan
from support.checks.whole_program import gradients_for, shared_storages
from support.ops.random_programs import FP64, Program, programs, quiet
from support.tracing.captured_graphs import autocast_in

#: Dynamo does not trace every program, and fails on some
UNTRACED = (InternalTorchDynamoError, TorchRuntimeError, Unsupported, UserError)


class DisagreementError(AssertionError):
    """A program on which amp_fx and eager autocast disagree."""


# ---- running and comparing ----


@dataclass
class _Run:
    """What is visible after a run, by name; inputs count, too: they may have been written to."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor] | None
    aliases: frozenset[frozenset[str]]
    requires_grad: dict[str, bool]


def compare(program: Program) -> None:
    """Runs a program in every way, op by op, and compares; DisagreementError says how they differ."""
    function = program.function()
    with quiet():
        eager = _run(function, program.arguments(), program.ambient)
        if eager is None:
            return
        ours = _rewritten(function, program)
        for numerics, got in ours.items():
            _compare_facts(f"numerics={numerics!r}", got, eager)
        if program.ambient is not None and program.options.is_autocast and not program.is_wider:
            for name, value in ours["eager"].values.items():
                wanted = eager.values[name]
                if not torch.equal(_as_bits(value), _as_bits(wanted)):
                    raise DisagreementError(f"numerics='eager': {name} is {value}, eagerly {wanted}")
        if not program.decides:
            _compare_values(function, program, ours["compiled"])


def _rewritten(function: Callable[..., Any], program: Program) -> dict[str, _Run]:
    """The rewritten program under both numerics, traced once."""
    torch._dynamo.reset()
    chosen, reached = "compiled", False

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal reached
        reached = True
        training = torch.is_grad_enabled() and any(v.requires_grad for v in inputs if isinstance(v, Tensor))
        regions = ambient_regions(dict.fromkeys(graph_devices(gm), program.low))
        runs: dict[str, Callable[..., Any]] = {}
        for numerics in ("compiled", "eager"):
            opts = program.options.options(numerics)
            rewritten, plan = amp_fx.compiler.rewriting.rewrite(gm, regions, opts, training=training)
            if program.options.replayed:
                opts = replace(opts, plan=(Plan.from_json(plan.to_json()),))
                rewritten, _ = amp_fx.compiler.rewriting.rewrite(gm, regions, opts, training=training)
            runs[numerics] = rewritten

        def run(*given: Any) -> Any:
            with torch._C._DisableAutocast():
                return runs[chosen](*given)

        return run

    # frames of amp_fx alone know the shapes of grouped products in fp32
    GROUPS.install()
    backend.__module__ = "amp_fx"
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=program.dynamic)
    result = {}
    for chosen in ("compiled", "eager"):
        with torch._dynamo.config.patch(error_on_recompile=chosen == "eager"):
            try:
                result[chosen] = _raising_run(compiled, program.arguments(), program.ambient)
            except AssertionError as error:
                if reached:
                    raise
                # Dynamo's own, of a while_loop behind another
                raise InternalTorchDynamoError(str(error)) from error
    return result


def _run(function: Callable[..., Any], inputs: list[Tensor], ambient: Any = None) -> _Run | None:
    """One run; None where the program itself does not work with these inputs."""
    try:
        return _raising_run(function, inputs, ambient)
    except RuntimeError:
        return None


def _raising_run(function: Callable[..., Any], inputs: list[Tensor], ambient: torch.dtype | None) -> _Run:
    """Everything that is visible afterwards."""
    torch.manual_seed(0)
    with autocast_in(ambient):
        outputs = function(*inputs)
    named = {f"x{index}": value for index, value in enumerate(inputs)}
    results = {f"output {i}": value for i, value in enumerate(outputs) if isinstance(value, Tensor)}
    values = {**named, **results}
    return _Run(
        {name: value.detach().clone() for name, value in values.items()},
        _gradients(named, results),
        shared_storages(values),
        {name: value.requires_grad for name, value in results.items()},
    )


def _gradients(named: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Gradients of the inputs, from fixed random gradients of the outputs; None where backward fails."""
    roots = [v for v in results.values() if v.grad_fn is not None and v.is_floating_point()]
    leaves = {name: value for name, value in named.items() if value.requires_grad and value.is_leaf}
    if not roots or not leaves:
        return {}
    try:
        found = torch.autograd.grad(roots, list(leaves.values()), gradients_for(roots), allow_unused=True)
    except RuntimeError:
        # a value that the backward needs was overwritten: the program's own mistake
        return None
    return {f"gradient of {n}": g for n, g in zip(leaves, found, strict=True) if g is not None}


def _compare_facts(label: str, got: _Run, eager: _Run) -> None:
    """Dtypes, shapes, strides, aliases, and who requires a gradient."""
    for part in ("values", "gradients", "aliases", "requires_grad"):
        if getattr(eager, part) is None:
            continue
        # what is compared of a part of a run
        ours, theirs = (
            sorted(map(sorted, facts))
            if isinstance(facts, frozenset)
            else {n: (v.dtype, v.shape) if isinstance(v, Tensor) else v for n, v in (facts or {}).items()}
            for facts in (getattr(run, part) for run in (got, eager))
        )
        if ours != theirs:
            raise DisagreementError(f"{label}: {part} are {ours}, eagerly {theirs}")


def _compare_values(function: Callable[..., Any], program: Program, got: _Run) -> None:
    """Within a few times the error of autocast, or of the inputs rounded, whichever is larger."""
    low = program.low
    eps = torch.finfo(low).eps
    exact = None if program.names_dtypes else _run(function, program.arguments(FP64))
    exact = exact or _run(function, program.arguments())
    if exact is None:
        return
    dtype = FP64 if all(given.dtype is not FP64 for given in program.inputs) else None
    others = [
        _run(function, program.arguments(), low),
        *(_run(function, program.arguments(dtype, eps, seed)) for seed in range(3)),
    ]
    for part in ("values", "gradients"):
        for name, wanted in (getattr(exact, part) or {}).items():
            value = (getattr(got, part) or {}).get(name)
            if value is None or not wanted.is_floating_point() or not wanted.numel():
                continue
            theirs = [values[name] for run in others if run and name in (values := getattr(run, part) or {})]
            # bits that are read have other sizes in other dtypes, and nothing to be compared with
            theirs = [each for each in theirs if each.shape == wanted.shape]
            if value.shape != wanted.shape:
                continue
            # elements that overflow in autocast, too, say nothing of the others
            kept = torch.stack([each.isfinite() for each in (wanted, *theirs)]).all(0)
            if not kept.any():
                continue
            spread = [_distance(each[kept], wanted[kept]) for each in theirs]
            allowed = 8 * max([eps * wanted[kept].abs().max().item(), *spread])
            distance = _distance(value[kept], wanted[kept])
            if not distance <= allowed:
                error = f"off by {distance:.1e}, allowed {allowed:.1e}"
                raise DisagreementError(f"{name} is {error}: {value}, {wanted}")


def _as_bits(value: Tensor) -> Tensor:
    """What is compared, with one NaN."""
    return (torch.view_as_real(value) if value.is_complex() else value).nan_to_num()


def _distance(value: Tensor, exact: Tensor) -> float:
    return (value.double() - exact.double()).abs().max().item()


# ---- searching ----


def search(cases: int, seed: int, report: Callable[[Program, Exception], None]) -> Counter[str]:
    """Runs random programs, goes on after findings, which it reports, and counts what came out."""
    counts: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore
    )
    @hypothesis.given(programs())
    def each(program: Program) -> None:
        try:
            compare(program)
        except UNTRACED:
            # Dynamo does not trace the program: it never reaches a backend
            counts["not traced"] += 1
        except Exception as error:
            # a documented fallback: an autograd.Function in a region of the user's
            is_refused = "inside torch.autocast cannot be rewritten" in str(error)
            counts["refused" if is_refused else "findings"] += 1
            if not is_refused:
                report(program, error)
        else:
            counts["agree"] += 1

    each()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compares random programs with eager autocast.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    def report(program: Program, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)
        print(f"{program}{type(cause).__name__}: {str(cause)[:600]}\n", flush=True)

    start = time.perf_counter()
    counts = search(given.cases, given.seed, report)
    seconds = time.perf_counter() - start
    words = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{counts.total()} programs, seed {given.seed}, {seconds:.0f} s: {words}")
    return bool(counts["findings"])


if __name__ == "__main__":
    sys.exit(main())
