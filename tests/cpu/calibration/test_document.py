"""docs/calibrate.md: its code runs, and what it says of the losses is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import amp_fx

DOCUMENT = Path(__file__).parents[3] / "docs" / "calibrate.md"


@pytest.mark.slow
def test_the_documents_model_recovers_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "station"}
    program = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    # a file, so that Dynamo and the report find its lines
    (tmp_path / "station.py").write_text(program)
    exec(compile(program, str(tmp_path / "station.py"), "exec"), names)
    assert names["spoiled"] > 10 * names["exact"]
    assert names["recovered"] < 1.3 * names["exact"]
    cal: amp_fx.Calibration = names["cal"]
    (printed,) = re.findall(r"^  autocast +(\S+)", DOCUMENT.read_text(), re.MULTILINE)
    assert float(printed) == pytest.approx(cal.autocast_error, rel=0.15)
    worst = next(line for line in str(cal).splitlines() if "%" in line)
    assert "linear" in worst
    assert "read" in worst
    assert names["plan"].measured < 0.1 * cal.autocast_error
    low = {row.name for row in names["plan"].plans[0].nodes if row.dtype is row.low}
    assert "linear" not in low
    assert {"linear_1", "linear_2"} <= low
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
