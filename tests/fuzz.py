"""Random small programs, held against eager autocast: ``python tests/fuzz.py --cases 5000``.

A program is a few lines of Python that use ops of the lists, views, in-place writes, mixed dtypes, casts, and
regions of autocast and of ``no_grad``. Each is traced by Dynamo, rewritten twice (both ``numerics``) and run, with
options that are drawn as well (``fuzz_options.py``). Compared with the same lines run eagerly:

1. dtypes of outputs, mutated inputs and gradients: equal.
2. who shares a storage with whom, and which inputs were written to: equal.
3. values under ``numerics="eager"`` and the user's own autocast: equal bit for bit, where options place every op as
   autocast does.
4. values otherwise: within low-precision error of the program in fp64, where no rule sends an op low.
"""

from __future__ import annotations

import argparse
import contextlib
import linecache
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, Unsupported, UserError

import amp_fx.rewriting
from amp_fx._torch import autocast_shield
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import graph_devices
from amp_fx.plans.plan import Plan
from fuzz_options import DEFAULTS, DrawnOptions, drawn_options

__all__ = ["UNTRACED", "DisagreementError", "Input", "Program", "TorchError", "compare", "programs", "search"]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

#: expressions; a name in braces is a value made before
EXPRESSIONS = (
    # listed low
    "torch.matmul({a}, {b})", "torch.matmul({a}, {b})", "F.linear({a}, {b})", "F.linear({a}, {b}, {c})",
    "torch.addmm({a}, {b}, {c})", "torch.bmm({a}, {b})", "torch.baddbmm({a}, {b}, {c})", "torch.mv({a}, {b})",
    "torch.dot({a}, {b})", "torch.outer({a}, {b})", "torch.einsum('...ij,...jk->...ik', {a}, {b})",
    "F.conv1d({a}, {b})", "F.scaled_dot_product_attention({a}, {b}, {c})",
    # listed fp32
    "{a}.softmax(-1)", "F.log_softmax({a}, -1)", "F.layer_norm({a}, {a}.shape[-1:])",
    "F.rms_norm({a}, {a}.shape[-1:])", "F.mse_loss({a}, {b})", "F.l1_loss({a}, {b})", "{a}.cumsum(-1)",
    "{a}.norm()", "torch.cdist({a}, {b})", "F.avg_pool1d({a}, 2)",
    # promote and pointwise
    "{a} + {b}", "{a} * {b}", "{a} - 0.5 * {b}", "{a} / ({b}.abs() + 1)", "{a} * 0.3", "{a} + 1e6",
    "torch.cat([{a}, {b}])", "torch.stack([{a}, {b}])", "torch.where({a} > 0, {a}, {b})",
    "torch.addcmul({a}, {b}, {c})", "torch.lerp({a}, {b}, 0.3)", "torch.maximum({a}, {b})", "F.gelu({a})",
    "{a}.tanh()", "{a}.sigmoid()", "{a}.exp()", "{a}.pow(2)", "({a}.abs() + 1e-8).rsqrt()", "{a}.clamp(-1, 1)",
    "{a}.sum(-1)", "{a}.mean(-1, keepdim=True)", "{a}.sum()", "{a}.var(-1, correction=0)",
    "{a}.masked_fill({a} > 0, -1e9)", "{a}.masked_fill({a} > 0, torch.finfo({a}.dtype).min)",
    "torch.scatter_add({a}, 0, torch.zeros_like({a}, dtype=torch.int64), {a})",
    # follow
    "{a}.relu()", "-{a}", "{a}.abs()", "{a}.amax(-1)", "{a}.max(-1)[0]", "{a}.sort(-1)[0]",
    "{a}.gather(-1, {a}.argmax(-1, keepdim=True))", "{a}.tril()", "{a}.roll(1, -1)", "{a}.flip(-1)",
    "F.pad({a}, (1, 1))", "F.dropout({a}, 0.5, training=False)", "{a}.repeat(2, *[1] * ({a}.ndim - 1))",
    "{a}.index_select(0, torch.tensor([1, 0]))",
    # views
    "{a}.mT", "{a}.view(-1)", "{a}.reshape(4, -1)", "{a}[0]", "{a}[..., :2]", "{a}[1:]", "{a}.chunk(2)[0]",
    "{a}.split(2, -1)[-1]", "{a}.unbind(0)[1]", "{a}.unsqueeze(0)", "{a}.squeeze()",
    "{a}.expand(2, *{a}.shape)", "{a}.diagonal()", "{a}.detach()", "{a}.view_as({b})",
    "{a}.as_strided((2, 2), (2, 1))", "{a}.contiguous()", "{a}.clone()",
    # dtypes named, read and copied
    "{a}.to(torch.bfloat16)", "{a}.half()", "{a}.float()", "{a}.double()", "{a}.to({b}.dtype)",
    "{a}.type_as({b})", "{a}.to({b})", "torch.zeros_like({a})", "{a}.new_ones({b}.shape)",
    "torch.empty_like({a}).copy_({b})", "torch.full_like({a}, 0.25)", "{a}.sum(-1, dtype=torch.float32)",
    "({a} > {b})", "{a}.argmax(-1)", "{a}.long()",
)  # fmt: skip

#: statements that write
STATEMENTS = (
    "{a}.add_({b})", "{a} += {b}", "{a}.mul_(0.5)", "{a}.relu_()", "{a}.copy_({b})", "{a}.sub_({b}, alpha=0.5)",
    "{a}.div_(2)", "{a}.zero_()", "{a}.fill_(0.25)", "{a}.clamp_(-1, 1)", "{a}.masked_fill_({a} > 0, 0.5)",
    "{a}.index_copy_(0, torch.tensor([1]), {b}[:1])", "{a}.index_add_(0, torch.tensor([1]), {b}[:1])",
    "{a}.addcmul_({b}, {c})", "{a}.lerp_({b}, 0.3)", "{a}.transpose_(0, -1)", "{a}[0] = {b}",
    "{a}[..., :2] = {b}", "{a}[1:] += {b}", "{a}[{a} > 0] = 0.5", "{a}.view(-1)[:2] = 0.25", "{a}.mT.add_({b})",
    "torch.add({b}, {c}, out={a})",
)  # fmt: skip

#: what may stand around a line
BLOCKS = (
    "with torch.autocast('cpu', enabled=False):",
    "with torch.autocast('cpu', torch.bfloat16):",
    "with torch.autocast('cpu', torch.float16):",
    "with torch.no_grad():",
)

#: words of lines that decide on a value: an error below may flip them, so no bound holds for what follows
_DECIDES = (">", "max", "sort", "long", "relu", "clamp")

#: Dynamo does not trace every program, and fails on some
UNTRACED = (InternalTorchDynamoError, Unsupported, UserError)

#: words of lines that name a dtype
_CONVERTS = ("dtype", ".to(", "float()", "half()", "double()", "type_as", "long()")

_SHAPES = ((4, 4), (4, 4), (4, 4), (4,), (2, 4, 4), (), (0, 4), (1, 4))
_DTYPES = (FP32, FP32, FP32, FP32, FP32, BF16, FP16, FP64)


@dataclass(frozen=True)
class Input:
    """One argument: normal random numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Program:
    """A program and the way to call it."""

    inputs: tuple[Input, ...]  # named x0, x1, ...
    lines: tuple[str, ...]
    outputs: tuple[str, ...]  # names that it returns, repeats allowed
    ambient: torch.dtype | None  # of the user's autocast around the call
    options: DrawnOptions = DEFAULTS

    @property
    def low(self) -> torch.dtype:
        """The low dtype."""
        return self.ambient or self.options.low

    @property
    def source(self) -> str:
        """The program as Python."""
        arguments = ", ".join(f"x{index}" for index in range(len(self.inputs)))
        body = "\n".join(f"    {line}" for part in self.lines for line in part.split("\n"))
        return f"def program({arguments}):\n{body}\n    return ({', '.join(self.outputs)},)\n"

    @property
    def decides(self) -> bool:
        """True where a value decides what is computed: no error bound holds."""
        return any(word in line for line in self.lines for word in _DECIDES)

    @property
    def names_dtypes(self) -> bool:
        """True where fp64 inputs make another program: ``x.float()`` copies an fp64 ``x``, and is an fp32 one."""
        return any(word in line for line in self.lines for word in _CONVERTS)

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The program, compiled from its source, which tracebacks show."""
        name = f"<program {abs(hash(self.source))}>"
        linecache.cache[name] = len(self.source), None, self.source.splitlines(True), name
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]

    def arguments(self, dtype: torch.dtype | None = None, jitter: float = 0.0, seed: int = 0) -> list[Tensor]:
        """The arguments, the same numbers each time; ``jitter``: relative size of a random error on top."""
        numbers, errors = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        made = []
        for given in self.inputs:
            value = torch.randn(given.shape, generator=numbers, dtype=FP64).to(given.dtype)
            value = value.to(dtype or given.dtype)
            if jitter:
                value = value * (1 + jitter * torch.randn(given.shape, generator=errors, dtype=FP64)).to(
                    value.dtype
                )
            made.append(value.requires_grad_(given.requires_grad))
        return made

    def __str__(self) -> str:
        return f"# autocast: {self.ambient}\n# {self.options}\n# {self.inputs}\n{self.source}"


class DisagreementError(AssertionError):
    """A program on which amp_fx and eager autocast disagree."""


class TorchError(Exception):
    """A program on which torch.compile disagrees with eager execution already without amp_fx."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that run eagerly, each line tried while it is drawn."""
    ambient = draw(st.sampled_from([None, None, BF16, FP16]))
    inputs = []
    for index in range(draw(st.integers(2, 4))):
        # the first two can always be multiplied
        shape = (4, 4) if index < 2 else draw(st.sampled_from(_SHAPES))
        dtype = FP32 if index == 0 else draw(st.sampled_from(_DTYPES))
        inputs.append(Input(shape, dtype, draw(st.booleans())))
    started = Program(tuple(inputs), (), (), ambient)
    scope: dict[str, Any] = {"torch": torch, "F": F}
    names = [f"x{index}" for index in range(len(inputs))]
    scope.update(zip(names, started.arguments(), strict=True))
    lines: list[str] = []
    for index in range(draw(st.integers(3, 10))):
        # something low to begin with
        line, result = _draw_line(draw, names) if index else (f"y{len(names)} = x0 @ x1", f"y{len(names)}")
        if _works(line, result, scope, ambient):
            lines.append(line)
            if result not in names and result:
                names.append(result)
    results = names[len(inputs) :]
    hypothesis.assume(results)
    outputs = [results[-1], *draw(st.lists(st.sampled_from(names), max_size=2))]
    return Program(tuple(inputs), tuple(lines), tuple(outputs), ambient, draw(drawn_options()))


def _draw_line(draw: st.DrawFn, names: Sequence[str]) -> tuple[str, str]:
    """One line, and the name that it binds."""
    # the newest values most: chains find more than bushes
    operands = {key: names[-1 - draw(st.integers(0, len(names) - 1).map(_closer))] for key in "abc"}
    block = draw(st.sampled_from(BLOCKS)) if draw(st.integers(0, 3)) == 0 else ""
    if draw(st.integers(0, 3)) == 0:
        line, result = draw(st.sampled_from(STATEMENTS)).format(**operands), ""
    else:
        result = f"y{len(names)}"
        line = f"{result} = {draw(st.sampled_from(EXPRESSIONS)).format(**operands)}"
    return (f"{block}\n    {line}" if block else line), result


def _closer(back: int) -> int:
    return back // 2


def _works(line: str, result: str, scope: dict[str, Any], ambient: torch.dtype | None) -> bool:
    """Runs a line; True if it works and makes nothing large."""
    before = scope.get(result)
    with _quiet(), _autocast(ambient):
        try:
            exec(line, scope)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            # the line does not fit the values that were drawn for it
            return False
    value = scope.get(result) if result else None
    if isinstance(value, Tensor) and (value.numel() > 256 or value.ndim > 4):
        scope[result] = before
        return False
    return True


# ---- running and comparing ----


@dataclass
class _Run:
    """What is visible after a run, by name; inputs count, too: they may have been written to."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor] | None
    aliases: frozenset[frozenset[str]]
    requires_grad: dict[str, bool]


def compare(program: Program, through: str = "eager") -> None:
    """Runs a program in every way and compares; DisagreementError says how they differ.

    The rewritten graph runs op by op, through ``"eager"``, or after AOTAutograd, through ``"aot_eager"``.
    """
    function = program.function()
    with _quiet():
        eager = _run(function, program.arguments(), program.ambient)
        if eager is None or (through != "eager" and eager.gradients is None):
            # AOTAutograd traces the backward at once, and it does not work
            return
        if through == "aot_eager":
            _check_torch(function, program, eager)
        ours = _rewritten(function, program, through)
        for numerics, got in ours.items():
            _compare_facts(f"numerics={numerics!r}", got, eager)
        if program.ambient is not None and program.options.is_autocast:
            _compare_bits(ours["eager"], eager)
        if not program.decides:
            _compare_values(function, program, ours["compiled"])


def _check_torch(function: Callable[..., Any], program: Program, eager: _Run) -> None:
    """Raises TorchError where torch.compile without amp_fx does not do what the program does eagerly."""
    torch._dynamo.reset()
    stock = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    try:
        got = _run(stock, program.arguments(), program.ambient, raises=True)
        assert got is not None
        _compare_facts("torch.compile", got, eager)
        _compare_bits(got, eager)
    except UNTRACED:
        raise
    except (RuntimeError, DisagreementError, BackendCompilerFailed) as error:
        raise TorchError(str(error)) from error


def _rewritten(function: Callable[..., Any], program: Program, through: str) -> dict[str, _Run]:
    """The rewritten program under both numerics, traced once."""
    torch._dynamo.reset()
    chosen = "compiled"

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        training = torch.is_grad_enabled() and any(v.requires_grad for v in inputs if isinstance(v, Tensor))
        regions = ambient_regions(dict.fromkeys(graph_devices(gm), program.low))
        runs: dict[str, Callable[..., Any]] = {}
        for numerics in ("compiled", "eager"):
            opts = program.options.options(numerics)
            rewritten, plan = amp_fx.rewriting.rewrite(gm, regions, opts, training=training)
            if program.options.replayed:
                opts = replace(opts, plan=(Plan.from_json(plan.to_json()),))
                rewritten, _ = amp_fx.rewriting.rewrite(gm, regions, opts, training=training)
            runs[numerics] = rewritten
            if through == "aot_eager":
                with autocast_shield():
                    runs[numerics] = aot_eager(rewritten, list(inputs))

        def run(*given: Any) -> Any:
            with torch._C._DisableAutocast():
                return runs[chosen](*given)

        return run

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    result = {}
    for chosen in ("compiled", "eager"):
        with torch._dynamo.config.patch(error_on_recompile=chosen == "eager"):
            run = _run(compiled, program.arguments(), program.ambient, raises=True)
        assert run is not None
        result[chosen] = run
    return result


def _run(
    function: Callable[..., Any], inputs: list[Tensor], ambient: torch.dtype | None, raises: bool = False
) -> _Run | None:
    """One run; None where the program itself does not work with these inputs."""
    try:
        with _autocast(ambient):
            outputs = function(*inputs)
        return _look(inputs, outputs)
    except RuntimeError:
        if raises:
            raise
        return None


def _look(inputs: Sequence[Tensor], outputs: Sequence[Any]) -> _Run:
    """Everything that is visible afterwards."""
    named = {f"x{index}": value for index, value in enumerate(inputs)}
    results = {f"output {i}": value for i, value in enumerate(outputs) if isinstance(value, Tensor)}
    values = {**named, **results}
    shared: dict[int, set[str]] = {}
    for name, value in values.items():
        if value.untyped_storage().nbytes():
            shared.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
    return _Run(
        {name: value.detach().clone() for name, value in values.items()},
        _gradients(named, results),
        frozenset(frozenset(names) for names in shared.values() if len(names) > 1),
        {name: value.requires_grad for name, value in results.items()},
    )


def _gradients(named: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Gradients of the inputs, from fixed random gradients of the outputs; None where backward fails."""
    roots = [v for v in results.values() if v.grad_fn is not None and v.is_floating_point()]
    leaves = {name: value for name, value in named.items() if value.requires_grad and value.is_leaf}
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(v.shape, generator=generator, dtype=FP64).to(v.dtype) for v in roots]
    if not roots or not leaves:
        return {}
    try:
        found = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    except RuntimeError:
        # a value that the backward needs was overwritten: the program's own mistake
        return None
    return {f"gradient of {n}": g for n, g in zip(leaves, found, strict=True) if g is not None}


def _compare_facts(label: str, got: _Run, eager: _Run) -> None:
    """Dtypes, shapes, strides, aliases, and who requires a gradient."""
    for part in ("values", "gradients"):
        if getattr(eager, part) is None:
            continue
        ours, theirs = (
            {n: (v.dtype, v.shape) for n, v in (getattr(run, part) or {}).items()} for run in (got, eager)
        )
        if ours != theirs:
            raise DisagreementError(f"{label}: {part} are {ours}, eagerly {theirs}")
    if got.aliases != eager.aliases:
        raise DisagreementError(
            f"{label}: aliases are {_words(got.aliases)}, eagerly {_words(eager.aliases)}"
        )
    if got.requires_grad != eager.requires_grad:
        raise DisagreementError(
            f"{label}: requires_grad is {got.requires_grad}, eagerly {eager.requires_grad}"
        )


def _words(aliases: frozenset[frozenset[str]]) -> list[list[str]]:
    return sorted(sorted(names) for names in aliases)


def _compare_bits(got: _Run, eager: _Run) -> None:
    for name, value in got.values.items():
        if not torch.equal(value.nan_to_num(), eager.values[name].nan_to_num()):
            raise DisagreementError(f"numerics='eager': {name} is {value}, eagerly {eager.values[name]}")


def _compare_values(function: Callable[..., Any], program: Program, got: _Run) -> None:
    """Within a few times the error of autocast, or of the inputs rounded, whichever is larger."""
    low = program.low
    eps = torch.finfo(low).eps
    exact = None if program.names_dtypes else _run(function, program.arguments(FP64), None)
    exact = exact or _run(function, program.arguments(), None)
    if exact is None:
        return
    dtype = FP64 if all(given.dtype is not FP64 for given in program.inputs) else None
    others = [
        _run(function, program.arguments(), low),
        *(_run(function, program.arguments(dtype, eps, seed), None) for seed in range(3)),
    ]
    for part in ("values", "gradients"):
        for name, wanted in (getattr(exact, part) or {}).items():
            value = (getattr(got, part) or {}).get(name)
            if value is None or not wanted.is_floating_point() or not wanted.numel():
                continue
            spread = [
                _distance(values[name], wanted)
                for run in others
                if run is not None and name in (values := getattr(run, part) or {})
            ]
            allowed = 8 * max([eps * wanted.abs().max().item(), *spread])
            distance = _distance(value, wanted)
            if math.isfinite(allowed) and not distance <= allowed:
                raise DisagreementError(
                    f"{name} is off by {distance:.1e}, allowed {allowed:.1e}: {value}, {wanted}"
                )


def _distance(value: Tensor, exact: Tensor) -> float:
    return (value.double() - exact.double()).abs().max().item()


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Random programs do things that torch warns about: broadcasting in a loss, resizing an ``out=``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- searching ----


def search(
    cases: int, seed: int, report: Callable[[Program, Exception], None], through: str = "eager"
) -> Counter[str]:
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
            compare(program, through)
        except UNTRACED:
            # Dynamo does not trace the program: it never reaches a backend
            counts["not traced"] += 1
        except TorchError:
            counts["wrong without amp_fx"] += 1
        except Exception as error:
            counts["findings"] += 1
            report(program, error)
        else:
            counts["agree"] += 1

    each()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code says whether anything was found."""
    parser = argparse.ArgumentParser(description="Compares random programs with eager autocast.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through", choices=["eager", "aot_eager"], default="eager")
    given = parser.parse_args(arguments)

    def report(program: Program, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)
        print(f"{program}{type(cause).__name__}: {str(cause)[:600]}\n", flush=True)

    start = time.perf_counter()
    counts = search(given.cases, given.seed, report, given.through)
    seconds = time.perf_counter() - start
    words = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{counts.total()} programs through {given.through}, seed {given.seed}, {seconds:.0f} s: {words}")
    return bool(counts["findings"])


if __name__ == "__main__":
    sys.exit(main())
