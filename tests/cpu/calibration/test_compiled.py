"""Calibrated plans in Inductor's own code: what was predicted, what autocast has, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.compiler.settings import Options
from amp_fx.instruments.batches import call_of
from amp_fx.instruments.calibration.verifying import Verifier
from amp_fx.instruments.step import Step
from amp_fx.precision.placement.profile import DeviceProfile
from support.models import zoo
from support.models.small import SpreadNorm, train
from support.tracing.captured_graphs import known

AUTOCAST = {"policy": "autocast", "profile": "off"}

pytestmark = pytest.mark.slow


def ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(128, shape, generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> dict[str, Tensor]:
    tokens = ids(seed, 8, 32)
    return {"input_ids": tokens, "labels": tokens}


def labelled_text(seed: int) -> dict[str, Tensor]:
    tokens = ids(seed, 64, 16)
    return {"input_ids": tokens, "labels": tokens[:, 0] % 4}


def labelled_images(seed: int) -> dict[str, Tensor]:
    labels = torch.randint(4, (64,), generator=torch.Generator().manual_seed(seed))
    noise = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": noise + 0.3 * labels[:, None, None, None], "labels": labels}


#: batches of models of the zoo
BATCHES = {"gpt2": text, "llama": text, "bert": labelled_text, "vit": labelled_images}


def trained(name: str, steps: int) -> nn.Module:
    model, batch = zoo.make(name).model, BATCHES[name]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(**batch(100 + step)).loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model


#: predictions of outputs that are known to miss
MISSED = {
    "gpt2 autocast fp16": "values that a plan stores low are charged where only fp32 copies are written: 1.77",
    "bert autocast bf16": "64 sequences with 4 numbers each: few decide: 0.67",
}
#: those that are nearer or farther by the model that a CPU happens to train: on a Sapphire Rapids, over six lengths of
#: training, 0.59 to 0.70 and 1.05 to 1.78
UNSTEADY = {"bert autocast fp16", "vit autocast fp16"}


def logits(returned: Any) -> Tensor:
    return returned.logits  # type: ignore[no-any-return]  # a class of transformers


@pytest.mark.parametrize(
    ("policy", "dtype", "budget"),
    [("autocast", "bf16", 0.5), ("autocast", "fp16", 1.0), ("int8", "bf16", 2.0)],
)
@pytest.mark.parametrize("name", BATCHES)
def test_the_error_of_a_call_on_other_batches_is_the_predicted_one(
    name: str, policy: str, dtype: str, budget: float, request: pytest.FixtureRequest
) -> None:
    if why := MISSED.get(f"{name} {policy} {dtype}"):
        request.applymarker(pytest.mark.xfail(reason=why, strict=True, raises=AssertionError))
    model, batch = trained(name, 30).eval(), BATCHES[name]
    # one of the 64 pictures of the first batch has 0.6 of the squared error of that batch: two tell of themselves
    many, judged, probes = (8, 4, 2) if name == "vit" else (2, 2, 1)
    batches = [batch(seed) for seed in range(many)]
    cal = amp_fx.calibrate(
        model, batches, of=logits, policy=policy, dtype=dtype, profile="off", probes=probes
    )
    plan = cal.plan(budget=budget, verify=False)
    others = range(50, 50 + judged)
    steps = [Step(model, call_of(model, batch(seed)), logits, of_outputs=True) for seed in others]
    error = Verifier(steps, Options.parse(None, {"dtype": dtype}), 1.0).error(plan.plans)
    print(f"{name} {policy} {dtype}: predicted / measured {plan.point.error / error:.2f}")
    low, high = (0.5, 2.0) if f"{name} {policy} {dtype}" in UNSTEADY else (0.75, 1.33)
    assert low < plan.point.error / error < high


@pytest.mark.parametrize("name", BATCHES)
def test_the_error_of_a_compiled_plan_is_the_predicted_one(name: str) -> None:
    model, batch = trained(name, 30), BATCHES[name]
    cal = amp_fx.calibrate(model, [batch(seed) for seed in range(4)], profile="off")
    for budget in (1.0, 0.4):
        plan = cal.plan(budget)
        assert plan.measured is not None
        print(f"{name} at {budget}: predicted {plan.point.error:.2e}, compiled {plan.measured:.2e}")
        assert 0.8 <= plan.point.error / plan.measured <= 1.25, budget


def test_the_error_of_policy_fast_is_the_predicted_one_where_norms_stand_behind_the_residual_adds() -> None:
    model, batches = trained("bert", 30), [labelled_text(seed) for seed in range(4)]
    cal = amp_fx.calibrate(model, batches, profile="off")
    fast = known(cal, "fast")
    found = unseen(model, batches).compiled({"policy": "fast", "profile": "off"})
    print(f"predicted {fast.error:.2e}, compiled {found:.2e}")
    assert 0.8 <= fast.error / found <= 1.25


def bytes_moved(model: nn.Module, batch: dict[str, Tensor], options: dict[str, Any]) -> int:
    """What Inductor's kernels read and write in a step."""
    moved = amp_fx.explain(model, options=options, **batch).costs["amp_fx"].moved
    assert moved is not None
    return moved


def unseen(model: nn.Module, batches: list[Any]) -> Verifier:
    """Measures errors on batches that were not calibrated on."""
    return Verifier([Step(model, call_of(model, batch)) for batch in batches], Options.parse(None, {}), 1.0)


def test_a_trained_gpt_moves_less_than_autocast_with_no_more_error_on_data_it_has_not_seen() -> None:
    model = trained("gpt2", 100)
    cal = amp_fx.calibrate(model, [text(seed) for seed in range(4)], profile="off")
    plan = cal.plan(verify=False)
    others = [text(50 + seed) for seed in range(3)]
    verifier = unseen(model, others)
    ours, theirs = verifier.error(plan.plans), verifier.compiled(AUTOCAST)
    moved = [bytes_moved(model, others[0], options) for options in ({"plan": plan.plans}, AUTOCAST)]
    print(f"error {ours:.2e} of {theirs:.2e}, bytes {moved[0] / moved[1]:.3f}")
    assert ours <= theirs
    assert moved[0] <= 0.93 * moved[1]


def test_a_variance_by_squares_has_a_third_of_autocasts_error_for_little_time() -> None:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(seed))
        return x, x[:, :16].argmax(-1)

    model = train(SpreadNorm(wide=1280), batch, 20)
    # fp32 matmuls take seven times as long
    rates = DeviceProfile("test", "cpu", {"float32": 1e11, "bfloat16": 7e11}, 5e10, 1e-8)
    cal = amp_fx.calibrate(model, batch(0), profile=rates)
    plan = cal.plan(1 / 3.5)
    autocast = known(cal, "autocast")
    assert plan.point.time is not None
    assert autocast.time is not None
    assert plan.point.time <= 1.02 * autocast.time
    verifier = unseen(model, [batch(1), batch(2)])
    ours, theirs = verifier.error(plan.plans), verifier.compiled(AUTOCAST)
    print(f"error {ours:.2e} of {theirs:.2e}, time {plan.point.time / autocast.time:.3f}")
    assert any(row.dtype is torch.bfloat16 for row in plan.plans[0].nodes)
    assert ours <= theirs / 3
