"""``python -m benchmarks engines_files`` writes rows as other runs do, and its page reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_files, page
from benchmarks.__main__ import main
from benchmarks.results import TimingRow, read_timings, write

WHERE = {"processor": "cpu", "threads": 1, "torch": "2", "onnxruntime": "1", "openvino": "2026"}


def _rows() -> list[TimingRow]:
    files = [("openvino: bf16", 2.0, 100, 1e-3), ("openvino: int8, a plan", 1.0, 50, 5e-3)]
    return [
        TimingRow(
            "vit",
            "engines_files",
            "inference",
            arm,
            {"batch": 2},
            (time, 2 * time),
            error=error,
            measures={"bytes": size, "program_error": 2e-3},
        )
        for arm, time, size, error in files
    ]


def test_a_file_is_compared_with_the_16_bit_file_of_its_engine_and_with_its_program(tmp_path: Path) -> None:
    write(tmp_path / "files_a.jsonl", WHERE, _rows())
    section = page.engine_sections(tmp_path)["files"]
    assert "| vit | openvino | int8, a plan | 1500.0 | 0.50 | 0.50 | 5.0e-03 | 2.50 |" in section
    assert section.endswith("OpenVINO 2026; `python -m benchmarks engines_files`)")


def test_one_command_times_files_that_a_folder_has_and_writes_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def run(engine: str, path: Path, batch: Any) -> Any:
        assert path.parent == tmp_path
        return lambda: calls.append(engine) or torch.ones(1, 8).numpy()

    def files_of(model: Any, batch: Any) -> Any:
        yield "onnxruntime", "fp16", {"dtype": "float16"}
        yield "openvino", "bf16", {"dtype": "bfloat16"}

    def export(model: Any, args: Any, path: Path, batch: Any, **options: Any) -> Any:
        path.write_bytes(bytes(7))
        return torch.export.export(model, args, batch)

    monkeypatch.setattr(engine_files, "runner", run)
    monkeypatch.setattr(engine_files, "files_of", files_of)
    monkeypatch.setattr(engine_files, "model_of", lambda name: (net, {"input": x}, torch.ones(1, 8).double()))
    monkeypatch.setattr("amp_fx.export_onnx", export)
    net, x = torch.nn.Linear(4, 8).eval(), torch.ones(1, 4)
    given = ["engines_files", "--only", "vit", "--rounds", "2", "--files", str(tmp_path)]
    assert main([*given, "--json", str(tmp_path / "rows.jsonl")]) == 0
    head, rows = read_timings(tmp_path / "rows.jsonl")
    assert head["rounds"] == 2
    assert [(row.arm, len(row.times), row.error, row.measures["bytes"]) for row in rows] == [
        ("onnxruntime: fp16", 2, 0.0, 7),
        ("openvino: bf16", 2, 0.0, 7),
    ]
    assert calls == ["onnxruntime", "openvino"] * 3
    # the files are there
    monkeypatch.setattr("amp_fx.export_onnx", None)
    assert main(given) == 0
    assert "| vit | onnxruntime | fp16 |" in capsys.readouterr().out
    assert rows[0].measures["program_error"] > 0
