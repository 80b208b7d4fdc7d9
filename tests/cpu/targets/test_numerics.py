"""The numbers that generated CUDA code gives, without a GPU: Triton kernels interpreted, library kernels emulated.

Judged against fp64, beside what stock Inductor generates under autocast.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx._torch import find_nonfinite_
from amp_fx.instruments.targets.tracing import Tracer
from amp_fx.precision.plans.label import ReasonKind
from examples.gpt import GPT, GPTConfig
from support.checks.held_memory import run_python
from support.models.small import Parts
from support.programs.target_code import Code
from support.programs.target_process import OFF, needs_a_target, process, quick_ones
from support.programs.triton_interpreted import Step

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "triton_interpreted.py"
SCALE = 2.0**12


def conv_net(m: Any, x: Tensor, labels: Tensor) -> Tensor:
    """A convolution, BatchNorm, a residual add and a biased head."""
    x = x + F.relu(m.norm(m.conv(x)))
    return F.cross_entropy(m.head(x.mean((2, 3))), labels)


def mlp(m: Any, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Two biased linears, a GELU and a norm between them."""
    y = m.down(m.norm(F.gelu(m.up(x))))
    return y if labels is None else F.cross_entropy(y, labels)


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "gpt":
            tokens = torch.randint(32, (2, 17))
            config = GPTConfig(vocab=32, context=16, layers=1, heads=2, width=32)
            return GPT(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        if name == "conv_net":
            layers = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}
            net = Parts(conv_net, **layers, head=nn.Linear(4, 8))
            return net, (torch.randn(4, 4, 8, 8), torch.randint(8, (4,)))
        layers = {"up": nn.Linear(16, 48), "norm": nn.LayerNorm(48), "down": nn.Linear(48, 8)}
        return Parts(mlp, **layers), (torch.randn(24, 16), torch.randint(8, (24,)))


class Keeper(Tracer):
    """Keeps the values that a graph came with as well."""

    def __call__(self, gm: Any, example_inputs: Sequence[Any]) -> Any:
        self.values = list(example_inputs)
        return super().__call__(gm, example_inputs)


class Arm(NamedTuple):
    """A way to compile; no options: stock Inductor under autocast."""

    options: dict[str, Any] | None
    dtype: torch.dtype = torch.bfloat16


#: the result of the last linear, which has a bias, is not rounded
EXACT = {**OFF, "policy": {"rules": [{"module": "down", "precision": "low", "result": "fp32"}]}}
FP16 = {**OFF, "dtype": "float16", "scaler": "default"}
ARMS = {
    "autocast": Arm(None),
    "amp_fx": Arm(OFF),
    "fast": Arm({**OFF, "policy": "fast"}),
    "exact": Arm(EXACT),
    "autocast fp16": Arm(None, torch.float16),
    "amp_fx fp16": Arm(FP16, torch.float16),
    "fast fp16": Arm({**FP16, "policy": "fast"}, torch.float16),
}
#: what is run of each model
TRAINED = {
    "mlp": ("autocast", "amp_fx", "exact", "autocast fp16", "amp_fx fp16"),
    "conv_net": ("autocast", "amp_fx"),
    "gpt": tuple(arm for arm in ARMS if arm != "exact"),
}


def generated(keeper: Keeper, arm: Arm) -> list[Code]:
    return process().call("support.programs.target_code:sources", keeper.graphs, arm.options, arm.dtype)


def traced(model: nn.Module, *args: Tensor) -> Keeper:
    torch._dynamo.reset()
    keeper = Keeper()
    torch.compile(model, backend=keeper)(*args)
    return keeper


def trained(name: str, arm: Arm, *scales: float) -> list[Step]:
    """A training step, in fp16 with each of the loss scales."""
    model, args = make(name)
    keeper = traced(model, *args)
    forward, backward = generated(keeper, arm)
    values, steps = [value.detach() for value in keeper.values], []
    for scale in scales:
        inside = [torch.tensor(scale)] if len(forward.inputs) > len(values) else []
        outside = [torch.tensor(scale if arm is ARMS["autocast fp16"] else 1.0)]
        steps.append(Step(forward, backward, [*values, *inside], outside))
    return steps


@functools.cache
def planned() -> amp_fx.CalibratedPlan:
    """Of the GPT, with half of autocast's error."""
    model, args = make("gpt")
    cal = amp_fx.calibrate(model, [args], target="cuda:h100")
    return cal.plan(0.5, minimise="bytes", verify=False)


def inferred(weights: str, options: dict[str, Any] = OFF) -> Step:
    model, (x, _) = make("mlp")
    with torch.no_grad():
        keeper = traced(model, x)
        (code,) = generated(keeper, Arm({**options, "weights": weights}))
    # a graph is not given the weights that it reads low copies of alone; no two of these have the same shape
    given = {id(x), *(id(p) for name, p in model.named_parameters() if name.startswith("norm"))}
    values = [v.detach() for v in keeper.values if weights == "cast" or id(v) in given]
    for shape, dtype in code.kinds[len(values) :]:
        values.append(next(v.detach().to(dtype) for v in keeper.values if tuple(v.shape) == shape))
    return Step(code, None, values)


def steps(name: str) -> dict[str, Step]:
    found = {arm: step for arm in TRAINED[name] for step in trained(name, ARMS[arm], SCALE)}
    if name == "gpt":
        (found["half the error"],) = trained(name, Arm({**OFF, "plan": planned()}), SCALE)
    if name == "mlp":
        # at the second scale, gradients leave fp16
        found["amp_fx fp16"], found["overflow"] = trained(name, ARMS["amp_fx fp16"], SCALE, 2.0**24)
        found |= {weights: inferred(weights) for weights in ("cast", "cache")}
        found["called exact"] = inferred("cast", EXACT)
    return found


@functools.cache
def interpreted(name: str) -> dict[str, tuple[list[Tensor], list[Tensor | None]]]:
    """The results of a model's steps, and gradients of its graph's inputs.

    Run in a process of their own: whether Triton interprets is decided when it is imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / file) for file in ("steps.pt", "results.pt")]
        torch.save(steps(name), files[0])
        run_python(str(PROGRAM), *files, TRITON_INTERPRET="1")
        return torch.load(files[1], weights_only=False)


def reference(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model, args = make(name)
    loss = model.double()(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def by_name(name: str, gradients: Sequence[Tensor | None], scale: float = 1.0) -> dict[str, Tensor]:
    """Gradients of the parameters, in the order in which the graph has its inputs."""
    model, args = make(name)
    names = {id(value): key for key, value in model.named_parameters()}
    values = traced(model, *args).values
    return {
        names[id(value)]: grad / scale
        for value, grad in zip(values, gradients, strict=False)
        if id(value) in names and grad is not None
    }


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    assert found.keys() == true.keys()
    assert all(value.dtype is torch.float32 for value in found.values())
    distance = sum((found[key].double() - value).square().sum() for key, value in true.items())
    return float((distance / sum(value.square().sum() for value in true.values())) ** 0.5)


def step_errors(name: str, arm: str) -> tuple[float, float]:
    """Relative errors of the loss and of all gradients."""
    (loss,), gradients = interpreted(name)[arm]
    true_loss, true = reference(name)
    found = by_name(name, gradients, SCALE if arm == "autocast fp16" else 1.0)
    return float((loss - true_loss).abs() / true_loss), error(found, true)


#: what a rounding to the low dtype may cost, and what no rounding explains
BOUND = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_ones(TRAINED, "mlp"))
def test_a_step_is_as_exact_as_autocasts(name: str) -> None:
    for arm in filter(lambda arm: "amp_fx" in arm, TRAINED[name]):
        ours, bound = step_errors(name, arm), BOUND[ARMS[arm].dtype]
        theirs = step_errors(name, arm.replace("amp_fx", "autocast"))
        assert ours[1] <= 1.02 * theirs[1], arm
        assert ours[0] <= theirs[0] + 0.1 * bound, arm
        assert theirs[1] < bound, arm


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["fast", "fast fp16"])
def test_policy_fast_rounds_more_and_nothing_else(arm: str) -> None:
    loss, gradients = step_errors("gpt", arm)
    assert loss < BOUND[ARMS[arm].dtype]
    assert gradients < 1.5 * BOUND[ARMS[arm].dtype]


def is_rounded(value: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value.to(dtype).float(), value)


def test_gradients_of_weights_leave_their_matmul_in_fp32_and_autocasts_are_rounded() -> None:
    for arm, rounded in (("amp_fx", False), ("autocast", True)):
        found = by_name("mlp", interpreted("mlp")[arm][1])
        names = ("up.weight", "down.weight")
        assert [is_rounded(found[name], torch.bfloat16) for name in names] == [rounded, rounded]


def test_scaled_gradients_leave_the_backward_true_to_scale() -> None:
    # the scale is a power of two: what torch's scaler divides outside has the same bits
    ours = by_name("mlp", interpreted("mlp")["amp_fx fp16"][1])
    theirs = by_name("mlp", interpreted("mlp")["autocast fp16"][1], SCALE)
    for name in ("up.weight", "down.weight"):
        assert is_rounded(ours[name] * SCALE, torch.float16)
        distance = (ours[name] - theirs[name]).norm() / theirs[name].norm()
        assert distance < BOUND[torch.float16]


def test_gradients_beyond_fp16_are_found_and_others_are_not() -> None:
    for step, is_bad in (("overflow", 1.0), ("amp_fx fp16", 0.0)):
        found = torch.zeros(())
        find_nonfinite_([g for g in interpreted("mlp")[step][1] if g is not None], found)
        assert found.item() == is_bad


def test_calls_have_the_same_bits_with_low_copies_and_are_nearer_to_fp64_with_a_result_in_fp32() -> None:
    cast, cached, exact = (interpreted("mlp")[name][0][0] for name in ("cast", "cache", "called exact"))
    assert torch.equal(cast, cached)
    model, (x, _) = make("mlp")
    true = model.double()(x.double())
    assert 1e-4 < (cast - true).norm() / true.norm() < BOUND[torch.bfloat16]
    assert [is_rounded(result, torch.bfloat16) for result in (cast, exact)] == [True, False]
    assert (exact - true).norm() < 0.9 * (cast - true).norm()


def test_a_step_with_a_result_in_fp32_is_as_exact_as_autocasts() -> None:
    ours, theirs = step_errors("mlp", "exact"), step_errors("mlp", "autocast")
    assert ours[1] <= 1.02 * theirs[1]
    assert ours[0] < BOUND[torch.bfloat16]


@pytest.mark.slow
def test_a_plan_whose_products_return_fp32_has_the_error_that_was_predicted() -> None:
    (plan,) = planned().plans
    assert any(row.is_because(ReasonKind.WIDE_RESULT) for row in plan.nodes)
    found, autocast = (step_errors("gpt", arm)[1] for arm in ("half the error", "autocast"))
    assert 0.9 < found / planned().point.error < 1.15
    assert found < 0.6 * autocast
