"""Histograms by exponent: the shares are those that casting gives, and the loss scale is the best one."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matplotlib.patches import StepPatch
from torch import Tensor, nn

import amp_fx
from amp_fx import AmpFxError, OptionsError
from amp_fx.instruments.reports.histograms import Counts, Histogram
from support.models.small import Parts

DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip


def counted(*values: Tensor) -> Counts:
    found = Counts()
    for each in values:
        found.add(each)
    return found


def every_magnitude() -> Tensor:
    """Powers of two with their neighbours, and random values of all sizes, both signs; zeros at the end."""
    powers = 2.0 ** torch.arange(-149.0, 15.0, dtype=torch.float64)
    near = torch.cat([powers, powers * (1 - 2**-20), powers * (1 + 2**-20), powers * 1.5]).float()
    random = torch.randn(4000) * 2.0 ** torch.randint(-60, 8, (4000,))
    values = torch.cat([near, -near, random])
    return torch.cat([values[values != 0], torch.zeros(7)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0, 5, 24])
def test_what_becomes_zero_is_what_casting_makes_zero(dtype: str, scale: int) -> None:
    values = every_magnitude()
    counts = counted(values)
    assert (counts.zeros, counts.total) == (7, values.numel())
    nonzero = values[values != 0].double()
    cast = (nonzero * 2.0**scale).float().to(DTYPES[dtype]).double()
    assert counts.lost(dtype, scale) == pytest.approx(float((cast == 0).double().mean()), abs=0)


def test_values_are_counted_by_exponent() -> None:
    infinite, nan = float("inf"), float("nan")
    counts = counted(torch.tensor([[0.75, -0.6, 1.0], [3.0, 0.0, infinite]]), torch.tensor([nan, 3.5]))
    # the upper end belongs to the exponent below
    assert counts == Counts(Counter({-1: 3, 1: 2}), zeros=1, nonfinite=2, largest=3.5)
    assert counts + Counts(Counter({1: 1}), largest=4.0) == Counts(Counter({-1: 3, 1: 3}), 1, 2, 4.0)
    assert Counts().lost() == 0.0


@pytest.mark.parametrize(
    "values", [torch.randn(500) * 2.0**-27, torch.randn(500), torch.ones(3) * 60000, torch.zeros(2)]
)
def test_the_loss_scale_is_the_smallest_that_loses_least_and_does_not_overflow(values: Tensor) -> None:
    counts, lost = counted(values), {}
    for scale in range(65):
        cast = (values.double() * 2.0**scale).half()
        if float((values.double() * 2.0**scale).abs().max()) <= 65504:
            lost[scale] = int(((cast == 0) & (values != 0)).sum())
    best = min(lost.values())
    assert counts.loss_scale() == min(scale for scale, n in lost.items() if n == best)
    # none helps a gradient that overflows
    assert counted(torch.tensor([70000.0, 1e-9])).loss_scale() is None


def net() -> nn.Module:
    """With dropout, a buffer that is written to, a layer that is used twice, and one that is not."""
    parts = {"up": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "drop": nn.Dropout(0.5)}
    others = {"spare": nn.Identity(), "frozen": nn.Linear(8, 8).requires_grad_(False)}
    return Parts(lambda m, x: m.frozen(m.up(m.drop(m.norm(F.relu(m.up(x)))))), **parts, **others)


def loss(outputs: Tensor) -> Tensor:
    return outputs.square().mean() * 1e-6


def test_the_numbers_are_those_of_the_gradients() -> None:
    model, x, state = net(), torch.randn(16, 8), torch.get_rng_state()
    found = amp_fx.histogram(model, x, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.modules.keys() == {"up", "norm", "drop", "frozen"}
    totals = {what: counts.total for what, counts in found.modules["up"].items()}
    twice = dict.fromkeys(("activations", "activation_gradients"), 2 * 16 * 8)
    assert totals == {**twice, "weight_gradients": 8 * 8 + 8}
    assert "weight_gradients" not in found.modules["frozen"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dict(model.named_buffers())["norm.num_batches_tracked"] == 0


def test_weight_gradients_are_counted_exactly() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    found = amp_fx.histogram(model, (x,), loss)
    loss(model(x)).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    nonzero = gradients[gradients != 0]
    assert 0 < found.total("weight_gradients").lost() < 1
    assert found.total("weight_gradients").lost() == float((nonzero.half() == 0).double().mean())
    total, scale = found.total(), found.total().loss_scale()
    assert scale is not None
    assert found.loss_scale == 2**scale
    for said in (f"{total.lost():.2%}", f"= {2**scale}: {total.lost('float16', scale):.2%}"):
        assert f"{said} underflow to zero" in str(found)


def test_batches_and_losses_come_in_several_forms() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:  # type: ignore[override]
            return SimpleNamespace(loss=F.mse_loss(super().forward(x), y))

    x, y, model = torch.randn(3, 4), torch.randn(3, 1), Named(4, 1)
    with torch.inference_mode():
        found = amp_fx.histogram(model, [x.clone(), y])
    assert str(amp_fx.histogram(model, {"x": x, "y": y})) == str(found)
    assert amp_fx.histogram(torch.compile(model), (x, y)).modules.keys() == {""}


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (nn.Linear(4, 4), None, r"\(3, 4\).*loss,"),
        (nn.Linear(4, 4), lambda _: {}, "dict"),
        (nn.Linear(4, 4), lambda outputs: outputs.sum().detach(), "parameter"),
        (loss, None, r"torch\.nn\.Module.*function"),
    ],
)
def test_what_is_no_loss_is_refused(model: Any, given: Any, message: str) -> None:
    with pytest.raises(AmpFxError, match=message):
        amp_fx.histogram(model, torch.randn(3, 4), given)


def test_a_second_argument_of_the_model_is_not_taken_for_a_loss() -> None:
    model, x, y = (
        Parts(lambda m, x, y=None: m.up(x).sum(), up=nn.Linear(4, 4)),
        torch.randn(3, 4),
        torch.ones(5),
    )
    ways: list[Any] = [amp_fx.histogram, amp_fx.calibrate, lambda m, x, y: amp_fx.compare(m, x, loss=y)]
    for measure in ways:
        with pytest.raises(OptionsError, match=r"loss .*Tensor of shape \(5,\).*\(x, y\)"):
            measure(model, x, y)


def test_numbers_are_json_and_the_figure_is_drawn(tmp_path: Path) -> None:
    found = amp_fx.histogram(nn.Linear(4, 4), torch.randn(3, 4), loss)
    path = found.save(tmp_path / "numbers.json")
    assert json.loads(path.read_text()) == found.to_dict()
    assert found.to_dict()["total"]["gradients"]["lost"]["float16"] == found.total().lost()
    assert found.save(tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in found.save(tmp_path / "figure.svg").read_text()
    title = f"{found.total().lost():.2%} of the gradients underflow to zero in fp16"
    assert found.figure().axes[0].get_title().startswith(title)
    with pytest.raises(AmpFxError, match=r"'figure.doc'.*\.json, .*\.png"):
        found.save(tmp_path / "figure.doc")


def counts(*powers: int) -> Counts:
    """Values of these magnitudes, a thousand of each."""
    return counted(*(torch.full((1000,), 1.5 * 2.0**power) for power in powers))


def test_the_text_names_the_modules_that_lose_most() -> None:
    rows = {"up": counts(-30, 0, 0), "down": counts(-30), "norm": counts(0)}
    lines = str(Histogram({name: {"weight_gradients": found} for name, found in rows.items()})).splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["down", "100.00%"], ["up", "33.33%"]]


def test_gradients_that_are_infinite_or_not_a_number_are_told() -> None:
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    text = str(amp_fx.histogram(model, x, torch.sum)).splitlines()[0]
    assert text == "Linear: 16 gradients that are not zero"
    x[0, 0] = math.nan
    text = str(amp_fx.histogram(model, x, torch.sum)).splitlines()[0]
    # of the weights of one column
    assert text == "Linear: 14 gradients that are not zero, and 2 that are infinite or not a number"


def test_the_figure_shows_where_the_suggested_scale_moves_the_gradients() -> None:
    found = Histogram({"up": {"weight_gradients": counts(-30, -20), "activations": counts(0)}}, "Net")
    scale = found.total().loss_scale()
    assert scale is not None
    gradients, activations = found.figure().axes
    (ghost,) = [patch for patch in gradients.patches if "loss scale" in str(patch.get_label())]
    assert ghost.get_label() == f"all gradients at a loss scale of 2^{scale}"
    assert isinstance(ghost, StepPatch)
    values, edges, _ = ghost.get_data()
    shares = {int(edge): value for value, edge in zip(values, edges, strict=False) if value}
    assert shares == {scale - 30: 50.0, scale - 20: 50.0}
    assert not [patch for patch in activations.patches if "loss scale" in str(patch.get_label())]


def test_the_axis_leaves_out_the_rarest_values_and_no_part_of_fp16() -> None:
    rare = counts(-5)
    rare.add(torch.full((1,), 2.0**-100))
    for found in (rare, counts(-5)):
        for axes in Histogram({"": {"weight_gradients": found}}, "Net").figure().axes:
            first, last = axes.get_xlim()
            assert -35 < first <= -25
            assert last >= 16
            legend = axes.get_legend()
            labels = [] if legend is None else [text.get_text() for text in legend.get_texts()]
            # what nothing was counted of has no entry, and a faint area says itself what it is
            assert not [label for label in labels if "outputs" in label or label == "zero in fp16"]


def test_a_missing_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = amp_fx.histogram(nn.Linear(4, 4), torch.randn(3, 4), loss)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AmpFxError, match=r"pip install '\.\[plot\]'"):
        found.save(tmp_path / "figure.png")
    assert "underflow to zero" in str(found)
