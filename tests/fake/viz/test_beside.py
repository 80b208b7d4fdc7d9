"""torch.autocast and amp_fx side by side: what is gone is struck through, what is left has its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from amp_fx import AmpFxError
from amp_fx.plans.label import Kind, Reason
from amp_fx.plans.plan import Cost
from amp_fx.reports.report import Report
from amp_fx.viz import beside, dot
from amp_fx.viz.model import drawing
from pictures import NASTY, compared

SVG = "{http://www.w3.org/2000/svg}"


def svg_of(report: Report) -> str:
    return beside.render(drawing(report))


def texts(svg: str, name: str = "") -> list[str]:
    """Texts of the picture, or of one of its classes, as a reader sees them."""
    rows = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [row.text or "" for row in rows if not name or row.get("class") == name]


def bars(svg: str, name: str) -> list[float]:
    """Widths of the bars of a class."""
    rows = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [float(row.get("width") or 0) for row in rows if row.get("class") == name]


def test_what_is_saved_is_said_struck_through_and_as_long_as_its_bytes() -> None:
    svg = svg_of(compared())
    assert texts(svg, "headline") == ["3 of 9 cast kernels gone: casts move 600 kB, torch.autocast's 900 kB"]
    said = texts(svg)
    assert any("all kernels of a step move 9.7 MB, torch.autocast's 10 MB (-3.0 %)" in text for text in said)
    assert any("Both return the same dtypes" in text for text in said)
    # beside what it was
    gone = "3 \N{MULTIPLICATION SIGN} weight gradient bf16 \N{RIGHTWARDS ARROW} fp32, 300 kB"
    assert texts(svg, "gone") == [gone]
    assert said.count(gone) == 2
    assert "text-decoration: line-through" in svg
    assert bars(svg, "lower") == pytest.approx([96.0, 96.0])
    assert bars(svg, "widen") == bars(svg, "ghost") == pytest.approx([48.0])
    # what is fused has no bar
    fused = [text for text in texts(svg, "sub") if "fused" in text]
    assert fused == ["2 casts fused into other kernels: free"] * 2
    # colours follow the window, and nothing is fetched
    assert "prefers-color-scheme: dark" in svg
    assert "href" not in svg
    assert "@import" not in svg


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.int8])
def test_casts_below_16_bits_are_narrowing_in_every_picture(narrow: torch.dtype) -> None:
    report = compared()
    (row,) = report.modules
    report.modules = [replace(row, casts=[replace(cast, after=narrow) for cast in row.casts])]
    assert bars(svg_of(report), "widen") == []


def test_where_nothing_is_saved_the_headline_does_not_say_so() -> None:
    report = compared()
    more = {"kernels": 9, "kernel_bytes": 900_000, "moved": 10_100_000}
    report.costs["amp_fx"] = replace(report.costs["amp_fx"], **more)
    svg = svg_of(report)
    assert texts(svg, "headline") == ["9 cast kernels, as many as torch.autocast has: casts move 900 kB"]
    assert any("(+1.0 %)" in text for text in texts(svg))


def test_more_bytes_than_under_autocast_have_their_cause_in_every_picture(tmp_path: Path) -> None:
    report = compared()
    report.costs["amp_fx"] = replace(report.costs["amp_fx"], moved=10_500_000)
    nodes = report.plans[0].nodes
    for at, row in enumerate(nodes[:5]):
        if row.flops:
            why = Reason.of(Kind.CASTS_COST_MORE, low=row.low)
            nodes[at] = replace(row, dtype=torch.float32, reasons=(why,))
    words = "5.0 % more bytes than torch.autocast moves, because 1 of 3 matmuls"
    assert words in " ".join(texts(svg_of(report)))
    assert words in str(report)
    assert words in dot.source(drawing(report)).source
    page = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert f'<div id="more">{words}' in page
    assert drawing(compared()).more == ""


def test_casts_of_weights_in_the_backward_say_so() -> None:
    report = compared()
    (row, *_) = report.modules
    casts = [replace(cast, phase="backward") for cast in row.casts if cast.what == "weight"]
    said = texts(svg_of(compared()))
    assert not any("in the backward" in text for text in said)
    report.modules = [replace(row, casts=casts)]
    assert sum("in the backward" in text for text in texts(svg_of(report))) == 2


def test_many_modules_are_summed_up_and_long_names_lose_their_first_levels() -> None:
    report = compared()
    (row,) = report.modules
    small = [replace(cast, kernel_bytes=10, kernels=1) for cast in row.casts]
    report.modules = [replace(row, module="model.decoder.layers.*.attention.query")]
    report.modules += [replace(row, module=f"tail.{n}", casts=small) for n in range(30)]
    said = texts(svg_of(report))
    assert sum("more modules: casts move" in text for text in said) == 2
    assert "attention.query \N{MULTIPLICATION SIGN}3" in said
    assert len(said) < 200


def test_labels_are_text_whatever_they_look_like() -> None:
    report = compared()
    report.modules = [replace(report.modules[0], module=text.replace(".", "")) for text in NASTY]
    report.title = NASTY[4]
    svg = svg_of(report)
    tags = {element.tag for element in ElementTree.fromstring(svg).iter()}
    assert tags == {f"{SVG}{name}" for name in ("svg", "style", "g", "text", "rect", "path")}
    assert any(NASTY[4] in text for text in texts(svg))


def test_a_report_writes_it_and_shows_it_in_a_notebook(tmp_path: Path) -> None:
    report = compared()
    path = report.save(tmp_path / "x.beside.svg")
    assert path.read_text(encoding="utf-8") in report._repr_html_()
    again = Report.load(report.save(tmp_path / "x.json"))
    assert again.modules == report.modules
    assert svg_of(again) == path.read_text(encoding="utf-8")


def test_a_report_that_compares_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(AmpFxError, match=r"amp_fx\.explain"):
        Report(costs={"amp_fx": Cost(1, 2)}).save(tmp_path / "x.beside.svg")
    assert beside.drawn(drawing(Report())) == ""
