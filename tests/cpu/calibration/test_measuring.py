"""Measured sensitivity against ablation, one call low at a time; what flips of a ReLU do, what attention rounds."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import amp_fx
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import in_place_target
from amp_fx.instruments.calibration import measuring
from amp_fx.instruments.calibration.meter import Meter
from amp_fx.instruments.calibration.operands import attend, convolve_first
from amp_fx.instruments.calibration.smoothing import noise, smoothed
from amp_fx.passes import (
    Classify,
    Constrain,
    FuseCasts,
    InsertCasts,
    Pass,
    PassContext,
    PassResult,
    PinDtypes,
)
from amp_fx.passes.base import run_in_order
from amp_fx.precision.plans.label import Takes, label_of
from amp_fx.precision.plans.sensitivity import (
    INSIDE,
    PROBABILITIES,
    RESULT,
    SCORES,
    CallSensitivity,
    ReadSensitivity,
    as_number,
)
from amp_fx.precision.policy import OpClass
from support.checks.below_16_bits import calls, error, exact_gradients
from support.models.small import GPT, Fragile, Parts, tokens, train
from support.tracing.captured_graphs import captured

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OneLow(Pass):
    """Places one call low and all others in fp32."""

    call_name: str

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        for node in gm.graph.nodes:
            label = label_of(node)
            if label is None or label.op_class is OpClass.KEEP or in_place_target(node) is not None:
                continue
            label.dtype = None if label.traced is None else torch.float32
            if label.name == self.call_name:
                label.dtype, label.takes, label.op_class = label.low, Takes.DTYPE, OpClass.PROMOTE
        return PassResult(self.call_name, 1)


class Ablation:
    """A model's one graph with its real inputs."""

    def __init__(self, model: nn.Module, batch: Batch, low: torch.dtype, scale: float) -> None:
        self.low, self.scale = low, scale
        found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

        def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append((gm, list(inputs)))
            return gm.forward

        torch.compile(model, backend=keep, fullgraph=True)(*batch)
        ((self.gm, self.inputs),) = found
        exact = copy.deepcopy(model).double()
        wanted = {id(p): exact.get_parameter(name) for name, p in model.named_parameters()}
        exact(*batch).backward()
        self.parameters = [x for x in self.inputs if isinstance(x, nn.Parameter)]
        self.exact = [wanted[id(p)].grad for p in self.parameters]

    def error(self, call: str) -> float:
        """Relative error of the gradient where one call is low."""
        gm = capture(self.gm, ambient_regions({"cpu": self.low}))
        passes = PinDtypes(), Classify(), Constrain(), OneLow(call), InsertCasts(), FuseCasts()
        run_in_order(gm, passes, PassContext(training=True))
        (loss,) = gm(*self.inputs)
        gradients = torch.autograd.grad(loss * self.scale, self.parameters)
        pairs = list(zip(gradients, self.exact, strict=True))
        far = sum((g.double() / self.scale - e).square().sum().item() for g, e in pairs if e is not None)
        norm = sum(e.square().sum().item() for _, e in pairs if e is not None)
        return math.sqrt(far / norm) if math.isfinite(far) else math.inf


def estimate(row: CallSensitivity) -> float:
    """What one call does alone: its operands, its result and their gradients rounded."""
    parts = [row, *row.reads.values()]
    return math.sqrt(sum(as_number(part.value) + as_number(part.gradient) for part in parts))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; infinities are the largest and equal."""

    def ranks(values: Sequence[float]) -> Tensor:
        tensor = torch.tensor([min(value, 1e30) for value in values], dtype=torch.float64)
        _, places = torch.unique(tensor, return_inverse=True)
        counts = torch.bincount(places).double()
        return (counts.cumsum(0) - (counts + 1) / 2)[places]

    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()


def judged(model: nn.Module, batch: Batch, dtype: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    """Estimates and truths of every call that computes."""
    cal = amp_fx.calibrate(model, batch, dtype=dtype, scale=scale, profile="off")
    (graph,) = cal.sensitivity.graphs
    ablation = Ablation(model, batch, cal.sensitivity.dtype, cal.sensitivity.scale)
    computing = {row.name for row in graph.outline.nodes if row.op_class is not OpClass.FOLLOW and row.traced}
    calls = [row for row in graph.calls if row.name in computing]
    return [estimate(row) for row in calls], [ablation.error(row.name) for row in calls]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sensitivity_of_a_gpts_calls_is_that_of_ablation(dtype: str) -> None:
    model = train(GPT(), tokens, 30)
    estimates, truths = judged(model, tokens(0), dtype, 4096.0)
    assert len(truths) > 20
    assert spearman(estimates, truths) >= 0.95
    ratios = sorted(e / t for e, t in zip(estimates, truths, strict=True) if t > 3e-5)
    assert 0.9 <= ratios[len(ratios) // 2] <= 1.1


@pytest.mark.slow
def test_fragile_calls_are_ranked_as_by_ablation() -> None:
    batch = partial(tokens, rows=1, length=256, vocab=512)
    model = train(Fragile(), batch, 5)
    estimates, truths = judged(model, batch(0), "bfloat16")
    assert spearman(estimates, truths) >= 0.93


def test_calls_that_overflow_in_fp16_are_named() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1e5
        return (m.b(h / 1e5) ** 2).mean()

    model = Parts(program, a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    cal = amp_fx.calibrate(model, torch.randn(4, 8), dtype="float16", scale=1.0, profile="off")
    (graph,) = cal.sensitivity.graphs
    assert [row.name for row in graph.calls if row.value is None] == ["mul"]
    assert [row.name for row in graph.calls if any(r.value is None for r in row.reads.values())] == ["div"]


# --- ReLU under BatchNorm: flips of its derivative ---


def net(in_place: bool) -> nn.Module:
    """Convolutions, BatchNorm and ReLU, with the choice of the one in place."""

    def program(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(m.head(m.body(x).mean((2, 3))), labels)

    parts = ((nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(in_place)) for c in (3, 16, 16))
    return Parts(program, body=nn.Sequential(*itertools.chain(*parts)), head=nn.Linear(16, 4))


def labelled(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 3, 16, 16, generator=generator), torch.randint(4, (32,), generator=generator)


def true_error(model: nn.Module) -> float:
    """Of eager torch.autocast, against fp64."""
    squares: list[float] = []
    for seed in range(2):
        low = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = low(*labelled(seed))
        loss.backward()
        gradients = [p.grad for p in low.parameters() if p.grad is not None]
        squares.append(error(gradients, exact_gradients(model, labelled(seed))) ** 2)
    return math.sqrt(sum(squares) / 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_flips_of_a_relu_are_predicted_in_magnitude(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(in_place)
    before = copy.deepcopy(model.state_dict())
    batches = [labelled(seed) for seed in range(2)]
    with_flips = amp_fx.calibrate(model, batches, profile="off").autocast_error
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(measuring, "noise", lambda *_: {})
    without = amp_fx.calibrate(model, batches, profile="off").autocast_error
    true = true_error(model)

    assert without < true / 3
    assert true / 2 < with_flips < 2 * true


def test_a_smoothed_relu_has_the_values_of_a_relu_and_the_slope_of_a_ramp() -> None:
    (node,) = calls(captured(torch.relu, torch.randn(4)), torch.ops.aten.relu.default)
    x = torch.linspace(-4, 4, 81).requires_grad_()
    y = smoothed(node, x, math.sqrt(8))
    torch.testing.assert_close(y, x.relu())
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.special.ndtr(x.detach()))


def classified(program: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    gm = captured(program, *args)
    run_in_order(gm, (PinDtypes(), Classify()), PassContext(training=True))
    return gm


def test_noise_is_what_autocast_adds_and_leaves_inputs_and_generator_alone() -> None:
    def program(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        h = F.dropout(torch.matmul(x, w), 0.5)
        return torch.relu(F.batch_norm(h, mean, var, training=True) * 3 + h)

    args = torch.randn(256, 32), torch.randn(32, 8), torch.zeros(8), torch.ones(8)
    gm = classified(program, *args)
    state, given = torch.get_rng_state(), [arg.clone() for arg in args]
    (sigma,) = noise(gm, torch.bfloat16, args).values()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(arg, before) for arg, before in zip(args, given, strict=True))
    # both runs dropped the same elements: what is left is rounding, of a matmul's result and of its operands
    scale = torch.matmul(*args[:2]).std().item()
    assert 2**-11 * scale < sigma < 2**-5 * scale
    assert noise(captured(torch.matmul, *args[:2]), torch.bfloat16, args[:2]) == {}
    # only what is on a low list is rounded
    gm = classified(lambda x: torch.relu(x.sin() * 3), args[0])
    assert [*noise(gm, torch.bfloat16, args[:1]).values()] == [0]


# --- what attention rounds inside: beside gradients computed by hand with those roundings, in fp64 ---

ROWS, HEADS, LENGTH, SIZE = 4, 2, 16, 8
WIDTH = HEADS * SIZE


def low(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class FusedAttention(torch.autograd.Function):
    """Causal attention as fused kernels compute it, with one kind of rounding."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rounded: str) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        p = (q @ k.mT / math.sqrt(SIZE)).masked_fill(hidden, -math.inf).softmax(-1)
        read = low(p) if rounded == PROBABILITIES else p
        result = read @ v
        ctx.rounded = rounded
        ctx.save_for_backward(q, k, v, p, read, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        q, k, v, p, read, result = ctx.saved_tensors
        stored = low(result) if ctx.rounded == RESULT else result
        scores = p * (gradient @ v.mT - (gradient * stored).sum(-1, keepdim=True))
        if ctx.rounded == SCORES:
            scores = low(scores)
        scores = scores / math.sqrt(SIZE)
        return scores @ k, scores.mT @ q, read.mT @ gradient, None


def attention(m: Any, x: Tensor) -> Tensor:
    """Attention between linears; ``m.rounded`` names what is rounded in it."""
    q, k, v = m.qkv(x).view(ROWS, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
    if m.rounded is None:
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        a: Any = FusedAttention.apply(q, k, v, m.rounded)
    return m.out(a.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)).tanh().square().mean()


def error_of_rounding(model: nn.Module, x: Tensor, rounded: str) -> float:
    """Relative error of the gradient of all parameters."""
    found: list[Tensor] = []
    for kind in ("", rounded):
        wide: Any = copy.deepcopy(model).double()
        wide.rounded = kind
        wide(x.double()).backward()
        found.append(torch.cat([p.grad.flatten() for p in wide.parameters() if p.grad is not None]))
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def reads_of_attention(model: nn.Module, batches: Any, **settings: Any) -> dict[str, ReadSensitivity]:
    (graph,) = amp_fx.calibrate(model, batches, profile="off", **settings).sensitivity.graphs
    return next(row for row in graph.calls if "scaled_dot_product" in row.name).reads


@pytest.mark.parametrize("slot", [PROBABILITIES, SCORES, RESULT])
def test_the_sensitivity_of_roundings_inside_attention_is_that_of_a_kernel_that_does_them(slot: str) -> None:
    model: Any = Parts(attention, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, 1))
    nn.init.normal_(model.qkv.weight, std=0.5)
    model.rounded, batches = None, [torch.randn(ROWS, LENGTH, WIDTH) for _ in range(4)]
    read = reads_of_attention(model, batches, probes=4)[slot]
    sensitivity = as_number(read.value) + as_number(read.gradient)
    true = math.sqrt(sum(error_of_rounding(model, x, slot) ** 2 for x in batches) / len(batches))
    assert true > 1e-5
    assert 0.75 <= math.sqrt(sensitivity) / true <= 1.33


KEEP = torch.ones(5, 7, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"is_causal": True}, id="causal"),
        pytest.param({"attn_mask": KEEP}, id="boolean mask"),
        pytest.param({"attn_mask": KEEP & (torch.arange(5)[:, None] > 0)}, id="a row without anything"),
        pytest.param({"attn_mask": torch.randn(2, 1, 5, 7)}, id="additive mask"),
        pytest.param({"scale": 0.3}, id="scale"),
    ],
)
@pytest.mark.parametrize("heads", [4, 2])
def test_values_and_gradients_are_those_of_the_op(settings: dict[str, Any], heads: int) -> None:
    q, k, v = (torch.randn(2, h, n, 4, requires_grad=True) for h, n in ((4, 5), (heads, 7), (heads, 7)))
    shared = {**settings, "enable_gqa": heads < 4}
    ours = attend(Meter(torch.bfloat16, 1.0), (0, "a"), q, k, v, **shared)
    theirs = F.scaled_dot_product_attention(q, k, v, **shared)
    torch.testing.assert_close(ours, theirs)
    found, true = (torch.autograd.grad(each.sin().sum(), [q, k, v]) for each in (ours, theirs))
    torch.testing.assert_close(found, true)


def test_with_dropout_on_a_cpu_scores_and_the_gradient_of_probabilities_are_rounded_instead() -> None:
    def slots(dropout: float) -> dict[str, tuple[bool, bool]]:
        def program(m: Any, x: Tensor) -> Tensor:
            q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).tanh().square().mean()

        reads = reads_of_attention(Parts(program, qkv=nn.Linear(8, 24)), torch.randn(2, 5, 8))
        return {slot: (bool(r.value), bool(r.gradient)) for slot, r in reads.items() if slot in INSIDE}

    assert slots(0.0) == {PROBABILITIES: (True, False), SCORES: (False, True), RESULT: (True, False)}
    assert slots(0.2) == {PROBABILITIES: (True, True), SCORES: (True, True)}


@pytest.mark.parametrize(
    ("sizes", "window", "stride", "padding", "dilation"),
    [
        ((2, 3, 17, 12), (5, 3), (5, 4), (2, 1), (1, 1)),
        ((2, 1, 90, 1), (16, 1), (4, 1), (3, 0), (1, 1)),
        ((1, 4, 20, 21), (3, 3), (3,), (1,), (2,)),
    ],
)
def test_a_first_convolution_as_a_product_has_its_results_and_gradients(
    sizes: tuple[int, ...], window: tuple[int, ...], stride: Any, padding: Any, dilation: Any
) -> None:
    x = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, sizes[1], *window, dtype=torch.float64, requires_grad=True)
    given = x, weight, torch.randn(6, dtype=torch.float64), stride, padding, dilation
    with mock.patch.object(F, "unfold", wraps=F.unfold) as unfold:
        found, expected = convolve_first(*given), torch.ops.aten.conv2d.default(*given)
        assert unfold.call_count == 1
        convolve_first(x, weight)
        convolve_first(x, torch.randn(6, sizes[1], 3, 3, dtype=torch.float64), padding=(1, 1), stride=(2, 2))
        assert unfold.call_count == 1
    torch.testing.assert_close(found, expected)
    signs = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((each * signs).sum(), (x, weight)) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_a_first_convolution_in_channels_last_is_measured_as_it_is_laid_out() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3, stride=3), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).permute(0, 2, 3, 1).view(-1, 8))

    model = Rows().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    assert model(x).shape == (32, 4)
    predicted = amp_fx.calibrate(model, x, of="outputs", profile="off").autocast_error
    exact = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert predicted == pytest.approx(((found - exact).norm() / exact.norm()).item(), rel=0.5)
