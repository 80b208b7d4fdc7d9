"""The report says what the plans say: first screen, table, JSON, HTML and Markdown."""

from __future__ import annotations

import errno
import functools
import json
import operator
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from amp_fx import AmpFxError, Plan, Report
from amp_fx.graphs.keys import LABEL
from amp_fx.instruments.reports.advice import Advice
from amp_fx.instruments.reports.report import SUFFIXES
from amp_fx.precision.plans.plan import Cost, dtype_name
from support.document_blocks import ROOT
from support.models.small import Parts
from support.tracing.captured_graphs import Rewritten, casts_of, rewrite


def net() -> nn.Module:
    parts = {"up": nn.Linear(24, 40), "norm": nn.LayerNorm(40), "down": nn.Linear(40, 24)}
    return Parts(lambda m, x: x + m.down(F.softmax(m.norm(m.up(x)), -1)), **parts)


@pytest.fixture(scope="module")
def rewritten() -> Rewritten:
    torch._dynamo.reset()
    return rewrite(net(), torch.randn(6, 24), device="cuda")


@pytest.fixture
def report(rewritten: Rewritten) -> Report:
    autocast = {"casts": 9, "bytes": 640}
    broken = replace(rewritten.plan, graph="0/0", graph_break="print [train.py:7]", autocast=autocast)
    return Report([broken, replace(broken, graph="1/0", graph_break="")], "net")


def test_the_table_counts_what_is_in_the_graph(rewritten: Rewritten) -> None:
    table = Report([rewritten.plan]).table()
    aten = torch.ops.aten
    for op, target, dtype, count in (
        ("linear", aten.linear.default, "bfloat16", 2),
        ("softmax.int", aten.softmax.int, "float32", 1),
    ):
        nodes = rewritten.gm.graph.find_nodes(op="call_function", target=target)
        assert [dtype_name(node.meta["val"].dtype) for node in nodes] == [dtype] * count
        # right-aligned under the dtype
        end = table.index(dtype) + len(dtype)
        (row,) = re.findall(rf"^{re.escape(op)} .*", table, re.MULTILINE)
        assert row == f"{op:<{end - 1}}{count}"


def test_the_shares_are_those_of_the_arithmetic_and_of_the_results(rewritten: Rewritten) -> None:
    counter = FlopCounterMode(display=False)
    with counter:
        net()(torch.randn(6, 24))
    shares = Report([rewritten.plan]).shares()
    assert counter.get_total_flops() == sum(row.flops for row in rewritten.plan.nodes)
    assert {dtype: share["flops"] for dtype, share in shares.items()} == {"bfloat16": 1.0, "float32": 0.0}
    stored: Counter[str] = Counter()
    for node in rewritten.gm.graph.nodes:
        value = node.meta.get("val")
        if LABEL in node.meta and isinstance(value, Tensor):
            stored[dtype_name(value.dtype)] += value.nbytes
    found = {dtype: share["bytes"] for dtype, share in shares.items()}
    assert found == pytest.approx({dtype: size / stored.total() for dtype, size in stored.items()})


def test_the_first_screen_has_the_casts_of_the_graph(rewritten: Rewritten) -> None:
    count, size = sum(casts_of(rewritten.gm).values()), sum(cast.bytes for cast in rewritten.plan.casts)
    assert re.search(rf"casts in the graphs +{count}, {size / 1e3:.2f} kB", str(Report([rewritten.plan])))
    assert "0 graphs" in str(Report())
    assert "no floating computation" in str(Report([Plan()]))
    assert Report().table().strip() == "op"


def test_casts_stand_beside_those_of_autocast_where_all_graphs_know_them(report: Report) -> None:
    assert report.compared()["torch.autocast"] == Cost(18, 1280)
    report.plans.append(Plan())
    assert list(report.compared()) == ["amp_fx"]


def test_measured_costs_replace_those_of_the_plans(report: Report) -> None:
    report.costs = {"amp_fx": Cost(1, 2, 3, 4, 5_000_000_000), "torch.autocast": Cost(6, 7, 8, 9, 10)}
    assert all(shown in str(report) for shown in ("3, 4 B", "8, 9 B", "5.00 GB"))


def test_the_report_begins_with_what_a_step_moves_beside_autocast(report: Report) -> None:
    for moved, word in ((930, "7.0% less"), (1000, "same"), (1050, "5.0 % more")):
        report.costs = {"amp_fx": Cost(1, 2, 3, 4, moved), "torch.autocast": Cost(6, 7, 8, 9, 1000)}
        assert word in str(report).splitlines()[1].lower()
    report.device = "cpu"
    assert "target='cuda:h100'" in str(report)
    assert Report.from_dict(report.to_dict()).device == "cpu"


def crowded() -> Report:
    """Everything that a first screen may have, and more of it than fits."""
    row = rewrite(nn.Linear(9, 9), torch.randn(2, 9)).plan.nodes[0]
    rows = [
        replace(row, dtype=dtype, low=dtype, module_path=f"some.rather.long.name.of.a.module{number}" * 3)
        for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32) * 8)
    ]
    plans = [Plan(f"{n}/0", nodes=rows, graph_break=f"reason {n} [train.py:{n}]" * 9) for n in range(6)]
    costs: dict[str, Cost] = dict.fromkeys(("amp_fx", "torch.autocast"), Cost(1, 2, 3, 4, 5))
    return Report(plans, "crowded", costs, [Advice("weights", "long " * 40, {"profile": "off"})])


@pytest.mark.parametrize(("terminal", "width"), [(True, 80), (False, 118)])
def test_the_first_screen_is_as_wide_as_the_terminal(terminal: bool, width: int, monkeypatch: Any) -> None:
    if terminal:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = str(crowded()).splitlines()
    assert 20 < len(lines) <= 25
    assert any(line.startswith("advice") for line in lines)
    # what is pasted stays whole
    pasted = [line for line in lines if "options={" in line]
    assert pasted
    assert all(line.endswith("}") for line in pasted)
    assert all(len(line) <= width for line in lines if line not in pasted)


def test_graph_breaks_are_named(report: Report) -> None:
    assert report.graph_breaks == ["print [train.py:7]"]
    assert "  print [train.py:7]" in str(report).splitlines()
    report.plans = [Plan(f"{n}/0", graph_break=f"{'why ' * 50}[train.py:{n // 2}]") for n in range(4)]
    lines = [line for line in str(report).splitlines() if "why" in line]
    assert [line[:9] for line in lines] == ["  2 times"] * 2
    assert [line[-15:] for line in lines] == [".. [train.py:0]", ".. [train.py:1]"]
    # folders go before the line does
    report.plans = [
        Plan("0/0", graph_break=f"print [{'/site-packages' * 9}/modeling_llama.py:1610: x = y.item()]")
    ]
    assert "  print [modeling_llama.py:1610: x = y.item()]" in str(report).splitlines()


def test_a_report_goes_through_json_unchanged(report: Report, tmp_path: Path) -> None:
    report.costs = {"amp_fx": Cost(1, 2)}
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert Report.from_dict(data) == report
    assert Report.load(report.save(tmp_path / "report.json")) == report
    assert data["summary"]["graph_breaks"] == report.graph_breaks
    assert data["summary"]["shares"] == report.shares()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 7, "7.*1"),
        ([], {"version": 1}, r"report\.title"),
        (["plans", 0], {"version": 5}, r"plan\.nodes"),
        (["plans"], 3, "report.plans.*list.*3"),
        (["costs", "amp_fx", "cast_bytes"], "2", r"report.costs.amp_fx.cast_bytes.*int.*'2'"),
        (["notes"], [{"kind": "x"}], r"report.notes\[0\].text"),
        (["plans", 0, "nodes", 0, "dtype"], "bf16", r"plan.nodes\[0\].dtype.*'bf16'"),
        (["plans", 0, "nodes", 0, "shape"], [1, "a"], r"plan.nodes\[0\].shape\[1\].*int.*'a'"),
        (["plans", 0, "casts", 0, "readers"], [], r"plan.casts\[0\].readers.* name, "),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(
    report: Report, tmp_path: Path, path: list[str | int], value: object, message: str
) -> None:
    report.costs = {"amp_fx": Cost(1, 2)}
    data: Any = {"report": json.loads(json.dumps(report.to_dict()))}
    *place, last = "report", *path
    functools.reduce(operator.getitem, place, data)[last] = value
    file = tmp_path / "report.json"
    file.write_text(json.dumps(data["report"]))
    with pytest.raises(AmpFxError, match=rf"report\.json.*{message}"):
        Report.load(file)


@pytest.mark.parametrize(("suffix", "first"), [(".html", "<"), (".dot", "d"), (".json", "{"), (".md", "#")])
def test_a_report_is_saved_by_its_suffix(report: Report, tmp_path: Path, suffix: str, first: str) -> None:
    path = report.save(tmp_path / f"report{suffix.upper()}")
    assert path.read_text(encoding="utf-8").lstrip()[0] == first
    assert os.listdir(tmp_path) == [path.name]


def test_another_suffix_is_refused_and_the_page_has_those_that_there_are(
    report: Report, tmp_path: Path
) -> None:
    valid = ", ".join([*SUFFIXES, ".beside.svg"])
    with pytest.raises(AmpFxError, match=f"{re.escape(valid)}.*'.html'"):
        report.save(tmp_path / "report.htm")
    page = (ROOT / "docs" / "reading-the-report.md").read_text(encoding="utf-8")
    for described in (page, Report.save.__doc__ or ""):
        assert [suffix for suffix in SUFFIXES if suffix not in described] == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_where_there_is_no_room_the_old_file_stays(report: Report, tmp_path: Path, suffix: str) -> None:
    if suffix in (".svg", ".png") and shutil.which("dot") is None:
        pytest.skip("needs Graphviz")
    path = tmp_path / f"report{suffix}"
    path.write_text("old")
    resource = pytest.importorskip("resource")
    limit, (soft, hard) = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file can grow beyond that: as on a full disk, a write fails half-way
    resource.setrlimit(limit, (100, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            report.save(path)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_notebooks_show_escaped_text_that_loads_nothing(report: Report) -> None:
    report.title = "<script>alert(1)</script>&"
    page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    assert {element.tag for element in page.iter()} == {"div", "pre", "details", "summary"}
    assert not [element.attrib for element in page.iter() if element.attrib]
    text = "".join(page.itertext())
    assert report.title in text
    assert report.table() in text


def test_markdown_tables_survive_any_name(report: Report) -> None:
    cast = report.plans[0].casts[0]
    report.plans[0].casts = [replace(cast, value="a|b<c>`\n", source="x | y")]
    report.plans[1].casts = []
    row = report.to_markdown().splitlines()[-1]
    assert row.startswith(r"| a\|b&lt;c>")
    assert len(re.findall(r"(?<!\\)\|", row)) == 7


def test_the_plan_of_a_report_is_that_of_its_only_forward_graph(report: Report) -> None:
    plan = Plan("0/0")
    assert Report([plan, Plan("0/0", phase="backward")]).plan is plan
    for several in (report, Report()):
        with pytest.raises(AmpFxError, match=f"has {len(several.plans)} forward graphs"):
            several.plan  # noqa: B018


def test_a_diff_counts_casts_as_first_screens_do(report: Report) -> None:
    other = Report([report.plans[0]])
    casts = len(report.plans[0].casts)
    assert report.diff(other).casts == (2 * casts, casts)
    report.costs, other.costs = {"amp_fx": Cost(6, 70)}, {"amp_fx": Cost(5, 40)}
    assert (report.diff(other).casts, report.diff(other).cast_bytes) == ((6, 5), (70, 40))


def test_a_report_is_one_line_in_a_console(report: Report) -> None:
    assert repr(report) == "<amp_fx net: 2 graphs, policy autocast>"


def test_bytes_are_told_only_where_they_are_known_of_both() -> None:
    costs = {"amp_fx": Cost(1, 8, 1, 8, 99), "torch.autocast": Cost(2, 16)}
    text = str(Report([Plan()], costs=costs))
    assert "casts in the graphs" in text
    assert not re.search("cast kernels after fusion|bytes moved", text)
