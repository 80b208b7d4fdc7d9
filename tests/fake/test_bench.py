"""A user's own model is timed in several ways, in turn; one way that fails leaves the others."""

from __future__ import annotations

import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.instruments import benching
from support.tracing.captured_graphs import without_inductor


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def test_each_way_has_its_times_its_error_and_its_bar(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(benching, "package", fails)
    said: list[str] = []
    with without_inductor():
        found = amp_fx.bench(
            model,
            torch.randn(32, 64),
            ways=["package", "amp_fx", "eager"],
            seconds=0.0,
            options={"profile": "off"},
            say=said.append,
        )
    eager, ours, package = found.rows
    assert [row.name for row in found.rows] == ["eager", "amp_fx", "package"]
    assert [line.partition(":")[0] for line in said] == ["eager", "amp_fx", "package"]
    assert eager.error == 0.0
    # bf16 was multiplied
    assert 1e-4 < ours.error < 1e-1
    for row in (eager, ours):
        assert row.calls == 5
        assert 0 < row.median <= row.p90
        assert row.throughput == pytest.approx(32 / row.median)
    assert "OSError: no room" in package.failed
    text = str(found)
    assert text.startswith("Sequential(float32[32, 64])")
    assert all(word in text for word in ("samples/s", "[ms]", "[MB]", "#", "failed: OSError"))
    assert max(map(len, text.splitlines())) <= 113
    assert json.loads(found.save(tmp_path / "bench.json").read_text()) == found.to_dict()
    pytest.importorskip("matplotlib")
    assert found.save(tmp_path / "bench.svg").stat().st_size > 1000


def test_openvino_has_a_dash_for_memory_as_it_keeps_its_buffers(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        outputs = ("logits",)

        def __call__(self, values: list[Any]) -> list[Any]:
            return [model(*map(torch.from_numpy, values)).detach().numpy()]

    openvino: Any = ModuleType("openvino")
    openvino.__spec__ = ModuleSpec("openvino", None)
    openvino.convert_model = lambda program: program
    openvino.compile_model = lambda *_: Compiled()
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    found = amp_fx.bench(model, torch.randn(2, 64), ways=["eager", "openvino"], seconds=0.0)
    eager, other = found.rows
    assert eager.memory is not None
    assert other.memory is None
    assert other.error == pytest.approx(0.0, abs=1e-6)
    assert str(found).splitlines()[6].split()[4] == "-"


def test_openvino_that_is_asked_for_and_not_installed_is_named_before_the_work(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(benching, "called", lambda *_: pytest.fail("run"))
    with pytest.raises(amp_fx.MissingLibraryError, match="openvino"):
        amp_fx.bench(model, torch.randn(2, 64), ways=["eager", "openvino"])


def test_results_that_are_not_finite_or_of_another_size_are_infinitely_far() -> None:
    one, two = [torch.ones(2).double()], [torch.ones(3).double()]
    assert benching.distance(two, one) == math.inf
    assert benching.distance([one[0] * 3], one) == pytest.approx(2.0)
    assert benching.distance([one[0] / 0], one) == math.inf


def test_mistakes_are_told(model: nn.Module) -> None:
    x = torch.randn(2, 64)
    with pytest.raises(amp_fx.OptionsError, match="'package'"):
        amp_fx.bench(model, x, ways=["pakage"])
    with pytest.raises(amp_fx.InputError, match=r"float32\[2, 4\]"):
        amp_fx.bench(model, torch.randn(2, 4))
    with pytest.raises(amp_fx.InputError, match=r"model\.eval\(\)"):
        amp_fx.bench(model.train(), x)
