"""Every Python block of the README and of the docs runs, page by page, and the notebook, in one process.

No code is generated: what is compiled runs op by op, and a package is the exported program.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import amp_fx
from amp_fx.errors import FallbackWarning
from support.document_blocks import APART, BEFORE, ELSEWHERE, NOT_RUN, ROOT, SETUPS, blocks, pages
from support.tracing.captured_graphs import op_by_op

PAGES = [page for page in pages() if page.name not in ELSEWHERE and any(blocks(page))]
MARKS = {name: [pytest.mark.int8_rate] for name in ("quantised.md", "engines.md")}

pytestmark = pytest.mark.xdist_group("documents")


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DDP and FSDP2 want a process group, Accelerate and Lightning take the one that is there."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    # real packages are those of tests/cpu/exporting
    with (
        mock.patch.object(amp_fx, "package", shutil.copyfile),
        mock.patch.object(
            torch._inductor, "aoti_load_package", lambda path: torch.export.load(path).module()
        ),
    ):
        yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks write files, and libraries set variables."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.quick_rows("README.md", "index.md")
@pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=MARKS.get(p.name, [])) for p in PAGES])
def test_every_python_block_runs(page: Path) -> None:
    namespace = SETUPS[page.name]()
    with warnings.catch_warnings():
        # what other libraries say of small models on a CPU is no fault of the page
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        for line, code in blocks(page):
            if any(page.name == where and words in code for where, words in NOT_RUN):
                continue
            if page.name in APART:
                namespace = SETUPS[page.name]()
            for (where, words), given in BEFORE.items():
                if page.name == where and words in code:
                    namespace |= given()
            with op_by_op():
                # so many empty lines that an error names the line of the page
                exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def test_what_is_not_run_is_there_and_counted() -> None:
    code = [(page.name, code) for page in pages() for _, code in blocks(page)]
    assert all(any(name == where and words in text for name, text in code) for where, words in NOT_RUN)
    assert len(NOT_RUN) <= 0.1 * len(code)


@pytest.mark.slow
def test_the_model_of_the_page_about_calibration_recovers_its_loss(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "calibrate.md").read_text()
    names: dict[str, Any] = {"__name__": "station"}
    program = "\n".join(re.findall(r"```python\n(.*?)```", document, re.DOTALL))
    # a file, so that Dynamo and the report find its lines
    (tmp_path / "station.py").write_text(program)
    exec(compile(program, str(tmp_path / "station.py"), "exec"), names)
    assert names["spoiled"] > 10 * names["exact"]
    assert names["recovered"] < 1.3 * names["exact"]
    (printed,) = re.findall(r"^  autocast +(\S+)", document, re.MULTILINE)
    assert float(printed) == pytest.approx(names["cal"].autocast_error, rel=0.15)
    worst = next(line for line in str(names["cal"]).splitlines() if "%" in line)
    assert all(word in worst for word in ("linear", "read"))
    assert names["plan"].measured < 0.1 * names["cal"].autocast_error
    low = {row.name for row in names["plan"].plans[0].nodes if row.dtype is row.low}
    assert "linear" not in low
    assert {"linear_1", "linear_2"} <= low
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


# ---- examples/tour.ipynb: ten cells, committed with their outputs ----


def cells() -> list[dict[str, Any]]:
    found = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_has_ten_cells_with_outputs() -> None:
    assert [cell["execution_count"] for cell in cells()] == list(range(1, 11))
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert any("<svg" in "".join(output.get("data", {}).get("text/html", "")) for output in outputs)


@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
def test_the_code_of_the_notebook_runs_and_calibration_brings_the_loss_back(tmp_path: Path) -> None:
    # a file, so that Dynamo and the report find its lines
    file = tmp_path / "tour.py"
    file.write_text("\n\n".join("".join(cell["source"]) for cell in cells()), encoding="utf-8")
    names = runpy.run_path(str(file), run_name="tour")
    assert names["loss_low"] > 5 * names["loss_fp32"]
    assert names["loss_healed"] < 1.5 * names["loss_fp32"]
    assert names["difference"] < 0.05
    assert (tmp_path / "tour.html").stat().st_size > 50_000
