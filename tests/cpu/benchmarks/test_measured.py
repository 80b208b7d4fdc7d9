"""Programs whose numbers the pages have, run whole on less than what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import budgets, held_out, learning


@pytest.mark.slow
def test_a_budget_in_bytes_moves_less_than_autocast_at_no_more_error() -> None:
    row = budgets.measure("digits_vit", 1.0, 30, None)
    assert row.moved < 0.95
    assert row.predicted <= 1
    assert row.measured < 1.3


@pytest.mark.slow
def test_held_out_text_is_read_in_bf16_in_int8_and_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_HELD_OUT_BYTES", 5000)
    monkeypatch.setattr(held_out, "_BUDGETS", (1.2,))
    rows = {row.arm: row for row in held_out.measure(2, 1)}
    assert rows["bf16"].in_int8 == 0 < rows["int8"].in_int8 < rows["all linears"].in_int8
    assert 0 < rows["bf16"].divergence < rows["int8"].divergence
    assert rows["int8"].loss == pytest.approx(rows["bf16"].loss, rel=0.01)
    held_out.draw(list(rows.values()), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
