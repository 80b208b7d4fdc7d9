"""Random programs: a few lines of Python that each run eagerly, with their inputs and the options of a compilation."""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from support.ops.custom_ops import Twice
from support.ops.random_options import DEFAULTS, DrawnOptions, drawn_options
from support.tracing.captured_graphs import autocast_in

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT64, BOOL, COMPLEX = torch.int64, torch.bool, torch.complex64

#: expressions; a name in braces is a value made before. Dropout that drops nothing gives its input eagerly and a
#: copy under every backend; ``as_strided`` of a loss reads memory that its terms have left
EXPRESSIONS = (
    # listed low
    "torch.matmul({a}, {b})", "torch.matmul({a}, {b})", "F.linear({a}, {b})", "F.linear({a}, {b}, {c})",
    "torch.addmm({a}, {b}, {c})", "torch.bmm({a}, {b})", "torch.baddbmm({a}, {b}, {c})", "torch.mv({a}, {b})",
    "torch.dot({a}, {b})", "torch.outer({a}, {b})", "torch.einsum('...ij,...jk->...ik', {a}, {b})",
    "F.grouped_mm({a}, {b}, offs=torch.tensor([2, 4], dtype=torch.int32))",
    "F.grouped_mm({a}.repeat(1, 2), torch.stack([{b}.repeat(2, 2)] * 2), offs=torch.tensor([2, 4], dtype=torch.int32))",
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
    "F.pad({a}, (1, 1))", "-F.dropout({a}, 0.5, training=False)", "{a}.repeat(2, *[1] * ({a}.ndim - 1))",
    "{a}.index_select(0, torch.tensor([1, 0]))",
    # views
    "{a}.mT", "{a}.view(-1)", "{a}.reshape(4, -1)", "{a}[0]", "{a}[..., :2]", "{a}[1:]", "{a}.chunk(2)[0]",
    "{a}.split(2, -1)[-1]", "{a}.unbind(0)[1]", "{a}.unsqueeze(0)", "{a}.squeeze()",
    "{a}.expand(2, *{a}.shape)", "{a}.diagonal()", "{a}.detach()", "{a}.view_as({b})",
    "{a}[:].as_strided((2, 2), (2, 1))", "{a}.contiguous()", "{a}.clone()",
    # dtypes named, read and copied
    "{a}.to(torch.bfloat16)", "{a}.half()", "{a}.float()", "{a}.double()", "{a}.to({b}.dtype)",
    "{a}.type_as({b})", "{a}.to({b})", "torch.zeros_like({a})", "{a}.new_ones({b}.shape)",
    "torch.empty_like({a}).copy_({b})", "torch.full_like({a}, 0.25)", "{a}.sum(-1, dtype=torch.float32)",
    "({a} > {b})", "{a}.argmax(-1)", "{a}.long()",
    # indices, masks, several results, of which some are read
    "F.embedding({b}, {a})", "{a}[{b}]", "torch.var_mean({a}, -1)[1]", "{a}.topk(2)[0]", "torch.aminmax({a})[1]",
    "torch.native_layer_norm({a}, {a}.shape[-1:], None, None, 1e-5)[1]", "torch.where({a}, {b}, {c})",
    # complex numbers
    "torch.view_as_complex({a}.float().reshape(-1, 2))", "torch.view_as_real({a})", "torch.polar({a}.abs(), {a})",
    "{a}.real", "{a}.conj()", "torch.fft.rfft({a})", "torch.complex({a}, {b})", "1j * {a}", "(1j * {a}).imag",
    "torch.exp(1j * {a}).real", "{a} + (1 + 2j)", "{a} / 2j", "torch.view_as_complex({a}.reshape(-1, 2))",
    "torch.tensor(1j) * {a}", "torch.where({a} > 0, 1j * {b}, {b})",
    # bits, and what asks for a dtype
    "{a}.view(torch.int32)", "{a}.view(torch.uint8)", "{a}.view(torch.int16)", "{a}.view({b}.dtype)",
    "({a}.float().view(torch.int32) & -65536).view(torch.float32)", "{a}.view(torch.complex64)",
    "torch.quantize_per_tensor({a}, 0.1, 0, torch.qint8).dequantize()", "torch.nextafter({a}, {b})",
    "torch.fake_quantize_per_tensor_affine({a}, 0.1, 0, -128, 127)", "torch.ops.amp_fx_fuzz.bits({a}, torch.int32)",
    "torch.ops.quantized_decomposed.quantize_per_tensor({a}, 0.1, 0, -128, 127, torch.int8)",
    "torch.bucketize({a}, torch.tensor([-1.0, 0.0, 1.0]), out_int32=True)", "torch.linalg.matrix_norm({a}, 2)",
    # counts and sums into few places
    "torch.histc({a}, 4, -2, 2)", "torch.segment_reduce({a}.view(-1), 'sum', lengths=torch.tensor([{a}.numel()]))",
    "{a}[:1].index_add(0, torch.zeros({b}.shape[0], dtype=torch.int64), {b})", "torch.matrix_exp({a})",
    "{a}.scatter_reduce(0, torch.zeros_like({a}, dtype=torch.int64), {a}, 'mean')",
    # random numbers
    "F.dropout({a}, 0.5)",
    # what has a body, and what a library or the user has written
    "checkpoint(lambda t: t.tanh() @ t, {a}, use_reentrant=False)",
    "checkpoint(lambda s, t: (s @ t, s.add_(1)), {a}, {b}, use_reentrant=False)[0]",
    "torch.cond({a}.sum() > 0, lambda t: (t @ t).sin(), lambda t: t.cos(), ({a},))",
    "while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, (t @ t).sin()), (torch.tensor(0), {a}))[1]",
    "torch.vmap(lambda t: t @ {b} + t.sum())({a})", "torch.func.grad(lambda t: (t @ t).sum())({a})",
    "torch.ops.amp_fx_fuzz.twice({a})", "Twice.apply({a}, {b})",
    "F.batch_norm({a}, {b}[0], {c}[0], training=True)",
)  # fmt: skip

#: statements that write
STATEMENTS = (
    "{a}.add_({b})", "{a} += {b}", "{a}.mul_(0.5)", "{a}.relu_()", "{a}.copy_({b})", "{a}.sub_({b}, alpha=0.5)",
    "{a}.div_(2)", "{a}.zero_()", "{a}.fill_(0.25)", "{a}.clamp_(-1, 1)", "{a}.masked_fill_({a} > 0, 0.5)",
    "{a}.index_copy_(0, torch.tensor([1]), {b}[:1])", "{a}.index_add_(0, torch.tensor([1]), {b}[:1])",
    "{a}.addcmul_({b}, {c})", "{a}.lerp_({b}, 0.3)", "{a}.transpose_(0, -1)", "{a}[0] = {b}",
    "{a}[..., :2] = {b}", "{a}[1:] += {b}", "{a}[{a} > 0] = 0.5", "{a}.view(-1)[:2] = 0.25", "{a}.mT.add_({b})",
    "torch.add({b}, {c}, out={a})", "torch.matmul({b}, {c}, out={a})", "torch.cat([{b}, {c}], out={a})",
    "torch.ops.amp_fx_fuzz.bump({a})", "checkpoint(lambda t: t.add_(1).sum(), {a}, use_reentrant=False)",
    "{a}.unsqueeze_(0)", "{a}.detach().mul_(2)", "{a}.expand(2, *{a}.shape)[0].add_({b})",
)  # fmt: skip

#: what may stand around a line
BLOCKS = (
    "with torch.autocast('cpu', enabled=False):",
    "with torch.autocast('cpu', torch.bfloat16):",
    "with torch.autocast('cpu', torch.float16):",
    "with torch.no_grad():",
    "with torch.enable_grad():",
)

#: words of lines that decide on a value: an error below may flip them, so no bound holds for what follows
_DECIDES = (
    ">",
    "max",
    "sort",
    "long",
    "relu",
    "clamp",
    "view(torch",
    "bits",
    "quantize",
    "bucketize",
    "histc",
)

#: words of lines that name a dtype
_CONVERTS = ("dtype", ".to(", "float()", "half()", "double()", "type_as", "long()", "view(torch")

_SHAPES = ((4, 4), (4, 4), (4, 4), (4,), (2, 4, 4), (), (0, 4), (1, 4))
_DTYPES = (FP32, FP32, FP32, FP32, FP32, FP32, FP32, BF16, BF16, FP16, FP16, FP64, INT64, BOOL, COMPLEX)

#: how an input lies in memory
_FORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda value: value,
    "turned": lambda value: value.mT.contiguous().mT if value.ndim > 1 else value,
    "sparse": lambda value: torch.stack([value, value], -1)[..., 0],
    "repeated": lambda value: value[:1].expand(value.shape) if value.ndim else value,
}
#: an input that is a part of the first
OVERLAPS = "overlaps"


@dataclass(frozen=True)
class Input:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    form: str = "plain"  # a key of _FORMS, or OVERLAPS


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]  # named x0, x1, ...
    lines: tuple[str, ...]
    outputs: tuple[str, ...]  # names that it returns, repeats allowed
    ambient: torch.dtype | None  # of the user's autocast around the call
    options: DrawnOptions = DEFAULTS
    dynamic: bool = False  # sizes are unknown to the compiler

    @property
    def low(self) -> torch.dtype:
        return self.ambient or self.options.low

    @property
    def source(self) -> str:
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

    @property
    def is_wider(self) -> bool:
        """True where fp32 is taken on purpose for what autocast leaves in 16 bits: fp16's kernel computes NaN there."""
        return any("matrix_exp" in line for line in self.lines)

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The program, compiled from its source, which tracebacks show."""
        name = f"<program {abs(hash(self.source))}>"
        linecache.cache[name] = len(self.source), None, self.source.splitlines(True), name
        scope = dict(_SCOPE)
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]

    def arguments(self, dtype: torch.dtype | None = None, jitter: float = 0.0, seed: int = 0) -> list[Tensor]:
        """The arguments, the same numbers each time; ``jitter``: relative size of a random error on top."""
        numbers, errors = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        made = []
        for given in self.inputs:
            if given.form == OVERLAPS:
                made.append(made[0].detach()[1:])
                continue
            value = torch.randn(given.shape, generator=numbers, dtype=FP64)
            if given.dtype in (INT64, BOOL):
                made.append((value > 0).to(given.dtype))
                continue
            value = _FORMS[given.form](value.to(given.dtype))
            if dtype is not None:
                value = value.to(torch.complex128 if given.dtype is COMPLEX else dtype)
            if jitter:
                error = _FORMS[given.form](jitter * torch.randn(given.shape, generator=errors, dtype=FP64))
                value = value * (1 + error).to(value.dtype)
            made.append(value.requires_grad_(given.requires_grad))
        return made

    def __str__(self) -> str:
        return f"# autocast: {self.ambient}, dynamic: {self.dynamic}\n# {self.options}\n# {self.inputs}\n{self.source}"


_SCOPE: Mapping[str, Any] = {
    "torch": torch, "F": F, "checkpoint": checkpoint, "while_loop": while_loop, "Twice": Twice,
}  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that run eagerly, each line tried while it is drawn."""
    ambient = draw(st.sampled_from([None, None, BF16, FP16]))
    inputs = []
    for index in range(draw(st.integers(2, 4))):
        # the first two can always be multiplied
        shape = (4, 4) if index < 2 else draw(st.sampled_from(_SHAPES))
        dtype = FP32 if index == 0 else draw(st.sampled_from(_DTYPES))
        form = draw(st.sampled_from(["plain"] * 5 + [*_FORMS] + [OVERLAPS] * (index > 1)))
        if form == OVERLAPS:
            dtype, shape = FP32, (3, 4)
        is_leaf = dtype not in (INT64, BOOL) and form != OVERLAPS
        inputs.append(Input(shape, dtype, draw(st.booleans()) and is_leaf, form))
    started = Program(tuple(inputs), (), (), ambient)
    scope = dict(_SCOPE)
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
    dynamic = draw(st.integers(0, 3)) == 0
    return Program(tuple(inputs), tuple(lines), tuple(outputs), ambient, draw(drawn_options()), dynamic)


def _draw_line(draw: st.DrawFn, names: Sequence[str]) -> tuple[str, str]:
    """One line, and the name that it binds."""
    # the newest values most: chains find more than bushes
    back = st.integers(0, len(names) - 1).map(lambda back: back // 2)
    operands = {key: names[-1 - draw(back)] for key in "abc"}
    block = draw(st.sampled_from(BLOCKS)) if draw(st.integers(0, 3)) == 0 else ""
    if draw(st.integers(0, 3)) == 0:
        line, result = draw(st.sampled_from(STATEMENTS)).format(**operands), ""
    else:
        result = f"y{len(names)}"
        line = f"{result} = {draw(st.sampled_from(EXPRESSIONS)).format(**operands)}"
    return (f"{block}\n    {line}" if block else line), result


def _works(line: str, result: str, scope: dict[str, Any], ambient: torch.dtype | None) -> bool:
    """Runs a line; True if it works and makes nothing large."""
    before = scope.get(result)
    with quiet(), autocast_in(ambient):
        try:
            exec(line, scope)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            # the line does not fit the values that were drawn for it
            return False
    value = scope.get(result) if result else None
    if isinstance(value, Tensor) and (value.numel() > 256 or value.ndim > 4):
        scope[result] = before
        return False
    return True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Random programs do things that torch warns about: broadcasting in a loss, resizing an ``out=``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
