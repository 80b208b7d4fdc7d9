"""What tests of levels below 16 bits share: a CPU that claims fp8, a step without code, and error against fp64."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.precision.placement import level_cost
from amp_fx.precision.placement.profile import FLOAT8, DeviceProfile
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.policy.scaled import TILE
from benchmarks.workloads import llama_512
from support.models.small import GPT
from support.tracing.captured_graphs import Rewritten, op_by_op, rewrite

aten = torch.ops.aten

_RATES = {"float32": 1e9, "bfloat16": 1e12, "float16": 1e12, FLOAT8: 1e18}
#: fp8 always gains on it; matmuls in fp8 are emulated there
FP8_CPU = DeviceProfile("a CPU with fp8", "cpu", _RATES, bandwidth=1e15, launch=1e-12)
#: int8 always gains on it, and 16 bits never
INT8_CPU = replace(FP8_CPU, peak={"float32": 1e9, "bfloat16": 1e8, "float16": 1e8, "int8": 1e18})


def options(
    folder: Path, level: str = "auto", profile: DeviceProfile = FP8_CPU, **others: Any
) -> dict[str, Any]:
    """Options of policy fp8 on a device of this profile."""
    path = folder / "profile.json"
    profile.save(path)
    return {"policy": "fp8", "fp8": level, "profile": str(path), "strict": True, **others}


class MLP(nn.Module):
    """Linears of the given sizes, and a residual add around all but the first and the last."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            y = layer(x)
            x = x + F.gelu(y) if x.shape == y.shape and 0 < place < len(self.layers) - 1 else y
        return x.float().square().mean()


class Attention(nn.Module):
    """Three linears that read one value, and one that ends in the residual stream."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).view(*y.shape[:-1], 2, -1).mT
        z = (q.mT.reshape(y.shape) * self.k(y)).sigmoid() * self.v(y)
        return x + F.dropout(self.o(z), 0.1, self.training)


@dataclass(frozen=True)
class Step:
    """One compiled training step, of which no code was generated."""

    plan: Plan
    graphs: list[fx.GraphModule]

    @property
    def forward(self) -> fx.GraphModule:
        return self.graphs[0]

    @property
    def backward(self) -> fx.GraphModule:
        return self.graphs[1]

    def scaled(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Matmuls in fp8 of forward and backward."""
        return calls(self.forward, aten._scaled_mm.default), calls(self.backward, aten._scaled_mm.default)

    def counts(self) -> tuple[int, ...]:
        """How many they are."""
        return tuple(map(len, self.scaled()))

    def reasons(self) -> dict[str, list[tuple[ReasonKind, str]]]:
        """Module path -> why its matmuls run as they do: the kind and the role."""
        return {
            row.module_path: [(reason.kind, reason.values.get("role", "")) for reason in row.reasons]
            for row in self.plan.nodes
            if row.flops
        }


def lowered(
    program: Callable[..., Tensor],
    args: Sequence[Any],
    options: dict[str, Any],
    running: Callable[[], contextlib.AbstractContextManager[list[fx.GraphModule]]] = op_by_op,
    **settings: Any,
) -> Step:
    """Compiles forward and backward up to code, and runs them op by op."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="amp_fx", options=options, **settings)
    with amp_fx.record() as recording, running() as graphs:
        result = compiled(*args)
        if result.requires_grad:
            result.backward()
    (plan,) = recording.plans
    return Step(plan, graphs)


def evaluated(model: nn.Module, x: Tensor, options: dict[str, Any], dynamic: bool | None = None) -> Rewritten:
    """The graph of a call without gradients, and what it gives."""
    torch._dynamo.reset()
    with torch.no_grad():
        return rewrite(model.eval(), x, options={"weights": "cast", **options}, dynamic=dynamic)


def scaled(found: Rewritten) -> list[fx.Node]:
    """Its matmuls with scales."""
    return calls(found.gm, aten._scaled_mm.default)


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """The result of such a call in fp64."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def lies_right(node: fx.Node, by_row: bool) -> bool:
    """Whether a matmul with scales reads what library kernels want: rows of the first, columns of the second."""
    first, second, *scales = (arg.meta["val"] for arg in node.args[:4])  # type: ignore[union-attr]  # a node
    shapes = [(first.shape[0], 1), (1, second.shape[1])] if by_row else [(), ()]
    strides = first.stride() == (first.shape[1], 1) and second.stride() == (1, second.shape[0])
    return strides and [scale.shape for scale in scales] == shapes


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def gradients(
    model: nn.Module, args: Sequence[Any], options: dict[str, Any], *, generate: bool = False
) -> list[Tensor]:
    """Gradients of the model's parameters after one compiled step; without generated code the graphs run op by op."""
    torch._dynamo.reset()
    trained = copy.deepcopy(model)
    compiled = torch.compile(trained, backend="amp_fx", options=options)
    by_op = emulating_blocks() if options.get("fp8") == "mxfp8" else op_by_op()
    with contextlib.nullcontext() if generate else by_op:
        compiled(*args).backward()
    return [p.grad for p in trained.parameters() if p.grad is not None]


@contextlib.contextmanager
def emulating_blocks() -> Iterator[list[fx.GraphModule]]:
    """As :func:`captured_graphs.op_by_op`; matmuls with a scale for each 32 elements by their definition."""

    def prepare(gm: fx.GraphModule) -> None:
        for node in calls(gm, aten._scaled_mm.default):
            if node.args[2].meta["val"].dtype is torch.float8_e8m0fnu:  # type: ignore[union-attr]  # a node
                node.target = _multiplied

    with op_by_op(prepare) as graphs, mock.patch.object(level_cost, "capability_of", return_value=(10, 0)):
        yield graphs


def widened(data: Tensor, scales: Tensor) -> Tensor:
    """What fp8 values ``[rows, columns]`` and the scales of their blocks stand for, in fp32."""
    rows, blocks = data.shape[0], data.shape[1] // 32
    high, wide = (-(-size // tile) for size, tile in zip((rows, blocks), TILE, strict=True))
    tiles = scales.view(torch.uint8).view(high, wide, 32, 4, 4)
    exponents = tiles.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)[:rows, :blocks].float()
    factors = torch.where(exponents == 255, torch.nan, torch.exp2(exponents - 127))
    return (data.reshape(rows, blocks, 32).float() * factors[:, :, None]).reshape(rows, -1)


def _multiplied(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any, _: Any, dtype: torch.dtype, __: bool
) -> Tensor:
    product = widened(a, scale_a) @ widened(b.t(), scale_b).t()
    return (product if bias is None else product + bias.float()).to(dtype)


def exact_gradients(model: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """The same in fp64."""
    wide = [value.double() if value.is_floating_point() else value for value in args]
    exact = copy.deepcopy(model).double()
    exact(*wide).backward()
    return [p.grad for p in exact.parameters() if p.grad is not None]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative error of all tensors together."""
    wrong = sum((p.double() - q).square().sum() for p, q in zip(found, exact, strict=True))
    return math.sqrt(wrong / sum(q.square().sum() for q in exact))


def error_of(found: Tensor, exact: Tensor) -> float:
    """The same of one value."""
    return error([found.detach()], [exact.detach().double()])


def gpt(layers: int = 4) -> tuple[nn.Module, list[Tensor]]:
    """Layers of width 256, and its batch."""
    model = _drawn(GPT(layers=layers, width=256, heads=4, vocab=320, length=128))
    tokens = torch.randint(320, (4, 129))
    return model, [tokens[:, :-1], tokens[:, 1:]]


def llama() -> tuple[nn.Module, list[Tensor]]:
    """The same with rotary angles, grouped heads and gates."""
    model, batch = llama_512(batch=4, length=128, layers=4, width=256, hidden=640, vocab=320)
    return _drawn(model), list(batch.values())


def _drawn(model: nn.Module) -> nn.Module:
    """With weights that give every layer a share in the gradient."""
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.04)
    return model
