"""examples/tour.ipynb: ten cells, committed with their outputs, whose code runs and says what the text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_has_ten_cells_with_outputs() -> None:
    found = cells()
    assert len(found) == 10
    assert [cell["execution_count"] for cell in found] == list(range(1, 11))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    assert any("<svg" in text for text in shown)


@pytest.mark.usefixtures("op_by_op")
def test_its_code_runs_and_calibration_brings_the_loss_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    program = "\n\n".join("".join(cell["source"]) for cell in cells())
    # a file, so that Dynamo and the report find its lines
    (tmp_path / "tour.py").write_text(program, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "tour"}
    exec(compile(program, str(tmp_path / "tour.py"), "exec"), names)
    assert names["loss_low"] > 5 * names["loss_fp32"]
    assert names["loss_healed"] < 1.5 * names["loss_fp32"]
    assert names["difference"] < 0.05
    assert (tmp_path / "tour.html").stat().st_size > 50_000
