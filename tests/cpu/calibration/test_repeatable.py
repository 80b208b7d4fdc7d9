"""Plans are checked by steps that are equal: with the same random numbers, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.calibration.verifying import Verifier
from amp_fx.reports.step import Step
from amp_fx.settings import Options
from small_models import Parts


def net(
    hidden: Callable[[Tensor], Tensor] = lambda h: h, given: Callable[[Tensor], Tensor] = lambda x: x
) -> Any:
    torch.manual_seed(0)
    layers = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 8)}
    return Parts(lambda m, x: m.down(hidden(F.gelu(m.up(given(x))))), **layers)


def noisy(h: Tensor) -> Tensor:
    """Draws random numbers in the graph."""
    return F.dropout(h, 0.3) + 0.1 * torch.randn_like(h)


def noisy_loss(out: Tensor) -> Tensor:
    """Draws from every generator of the process."""
    target = torch.randn_like(out) + torch.from_numpy(np.random.randn(*out.shape)).to(out)
    return (out * (1 + random.random()) - target).square().mean()


def square(out: Tensor) -> Tensor:
    return out.square().mean()


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]  # a tuple


def test_dropout_and_random_losses_are_the_same_in_all_steps_that_are_compared() -> None:
    model = net(noisy)
    before = states()
    cal = amp_fx.calibrate(model, [X, X + 1], noisy_loss, profile="off")
    plan = cal.plan()
    assert states() == before
    assert plan.measured is not None
    assert not plan.unverified
    assert plan.point.error == pytest.approx(plan.measured, rel=0.25)
    # what is drawn in between changes nothing
    random.random()
    torch.rand(1)
    assert cal._verifier.error(plan.plans) == pytest.approx(plan.measured, rel=1e-6)


def test_a_loss_that_differs_from_run_to_run_is_told_and_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator()

    def loss(out: Tensor) -> Tensor:
        return (out - torch.randn(out.shape, generator=generator)).square().mean()

    cal = amp_fx.calibrate(net(), X, loss, profile="off")
    monkeypatch.setattr(Verifier, "_error", lambda *_: pytest.fail("something is compiled"))
    plan = cal.plan()
    assert plan.measured is None
    assert "two equal steps" in plan.unverified
    assert plan.unverified in str(plan)
    assert "not checked" in caplog.text
    # what was predicted holds for the step that was measured
    assert 0 < plan.point.error <= cal.autocast_error * (1 + 1e-6)


def test_compiled_code_that_differs_from_the_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cal = amp_fx.calibrate(net(), X, square, profile="off")
    seen: list[Any] = []

    def error(self: object, rows: object, options: dict[str, Any]) -> float:
        seen.append(options["policy" if "policy" in options else "plan"])
        return 0.6

    monkeypatch.setattr(Verifier, "_error", error)
    plan = cal.plan()
    assert plan.measured is None
    assert "compiled in float32" in plan.unverified
    assert not plan.tried
    assert len(seen) == 2


def test_a_program_that_does_not_run_in_fp64_is_judged_in_fp32() -> None:
    def own(x: Tensor) -> Tensor:
        h = torch.zeros(64, 32)
        h[:32] = x[:32]
        return h

    step = Step(net(given=own), ((X,), {}), square)
    with pytest.raises(RuntimeError, match="dtype"):
        step.exact()
    ((judged,),) = Verifier([step], Options(), 1.0)._states
    assert (judged.exact, judged.apart) == (None, 0)
