"""What integrations share: missing libraries, claims of the page about conformance, a scaler's numbers in logs."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import amp_fx
from amp_fx.integrations.metrics import ScalerMetrics
from support import other_libraries

ROOT = Path(__file__).parents[3]
LIBRARIES = ("accelerate", "transformers", "lightning")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_says_how_to_install_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    name = f"amp_fx.integrations.{library}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(amp_fx.MissingLibraryError, match=rf"pip install '\.\[{library}\]'"):
        importlib.import_module(name)
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S))
    wanted = re.findall(r'"([^"]+)"', extras[library])
    assert any(line.startswith(library) for line in wanted)
    assert set(wanted) <= set(re.findall(r'"([^"]+)"', extras["test"]))


@pytest.mark.parametrize("library", other_libraries.CLAIMS)
def test_the_document_has_every_claim_and_what_a_claim_names_is_a_test(library: str) -> None:
    rows = [line.split(" | ") for line in other_libraries.DOCUMENT.read_text(encoding="utf-8").splitlines()]
    written = {row[0].removeprefix("| "): row[2].split("; ") for row in rows if len(row) == 4}
    file, claims = other_libraries.CLAIMS[library]
    assert claims.keys() <= {cell.removesuffix(" (not tested here)") for cell in written[library]}
    tests = re.findall(r"^def (\w+)\(", (other_libraries.FOLDER / file).read_text(encoding="utf-8"), re.M)
    assert set(claims.values()) <= set(tests)


# --- metrics: no graph is needed to have them ---


class Scaler(amp_fx.GradScaler):
    """Knows the names that compiled graphs would tell it."""

    def first_nonfinite(self) -> list[str]:
        return ["weight", "bias"]


def train(scaler: amp_fx.GradScaler, metrics: ScalerMetrics, bad: set[int]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for step in range(1, 5):
        x = torch.ones(1, 2) * (float("inf") if step in bad else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        metrics(step)
        optimizer.zero_grad()


def test_an_object_with_log_gets_scale_skipped_steps_and_the_first_bad_parameter() -> None:
    scaler, rows = Scaler("cpu", init_scale=8.0), []
    train(scaler, ScalerMetrics(scaler, SimpleNamespace(log=rows.append)), bad={2})
    skipped = {"amp_fx/loss_scale": 4.0, "amp_fx/skipped_steps": 1}
    first = {"amp_fx/loss_scale": 8.0, "amp_fx/skipped_steps": 0}
    assert rows == [first, {**skipped, "amp_fx/first_nonfinite": "weight"}, skipped, skipped]


def test_a_function_gets_every_second_step_under_another_prefix_and_no_names_without_a_graph() -> None:
    scaler, rows = amp_fx.GradScaler("cpu", init_scale=8.0), []
    train(scaler, ScalerMetrics(scaler, rows.append, every=2, prefix="train/"), bad={4})
    good, bad = ({"train/loss_scale": scale, "train/skipped_steps": scale == 4.0} for scale in (8.0, 4.0))
    assert rows == [good, bad]


def test_tensorboard_has_curves_and_names(tmp_path: Path) -> None:
    scaler = Scaler("cpu", init_scale=8.0)
    with SummaryWriter(str(tmp_path)) as writer:
        train(scaler, ScalerMetrics(scaler, writer), bad={2})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scale = events.Scalars("amp_fx/loss_scale")
    assert [(event.step, event.value) for event in scale] == [(1, 8.0), (2, 4.0), (3, 4.0), (4, 4.0)]
    assert [event.value for event in events.Scalars("amp_fx/skipped_steps")] == [0, 1, 1, 1]
    (name,) = events.Tensors("amp_fx/first_nonfinite/text_summary")
    assert name.step == 2
    assert name.tensor_proto.string_val == [b"weight"]


def test_bad_arguments_are_errors() -> None:
    scaler = amp_fx.GradScaler("cpu")
    with pytest.raises(amp_fx.OptionsError, match=r"every .*1.*0"):
        ScalerMetrics(scaler, print, every=0)
    nothing: Any = 3
    with pytest.raises(amp_fx.OptionsError, match=r"log\(dict\)"):
        ScalerMetrics(scaler, nothing)
