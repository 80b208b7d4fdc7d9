"""The page is one file that fetches nothing and runs nothing of a model; torch.autocast and amp_fx side by side."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from amp_fx import AmpFxError
from amp_fx.instruments.reports.report import Report
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.plans.plan import Cost
from amp_fx.viz import beside, dot, html, style
from amp_fx.viz.model import drawing
from amp_fx.viz.words import more_bytes
from support.tracing.handwritten_reports import NASTY, blocks, compared, nasty


class Page(HTMLParser):
    """Elements, attributes and the text of script elements, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.comments = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments += 1


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html.render(drawing(nasty())))


def test_no_label_adds_an_element_a_comment_or_an_attribute(page: Page) -> None:
    plain = Page(html.render(drawing(nasty([str(index) for index in range(len(NASTY))]))))
    assert page.tags == plain.tags
    assert page.comments == plain.comments == 1
    assert [name for name, _ in page.attributes] == [name for name, _ in plain.attributes]
    assert {value for name, value in page.attributes if name == "title"} == {NASTY[4]}
    assert len(page.scripts) == 3
    assert page.scripts[::2] == plain.scripts[::2]


def test_the_data_come_out_of_the_page_as_they_went_in_and_end_no_script(page: Page) -> None:
    data = json.loads(page.scripts[1])
    assert data == json.loads(json.dumps(html.data(drawing(nasty()))))
    assert {node["reason"] for node in data["graphs"][0]["nodes"]} >= set(NASTY)
    assert not set(page.scripts[1]) & set("<>&\N{LINE SEPARATOR}")


def test_the_page_fetches_nothing(page: Page) -> None:
    links = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert links == ["data:,"]
    policy = next(value or "" for name, value in page.attributes if name == "content")
    assert "default-src 'none'" in policy
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", page.scripts[2])


def test_the_page_says_policy_totals_bars_legend_and_licence() -> None:
    text = html.render(drawing(blocks(12, policy="fast")))
    said = ["policy: fast", "50 casts, 4.8 kB", "computes in bf16", "low: on the low-precision list"]
    assert [each for each in (*said, "cast to a wider dtype") if each not in text] == []
    # and the licence of the layout library
    assert re.search("Chris Pettitt.*Permission is hereby granted", text, re.DOTALL)
    text = html.render(drawing(compared()))
    # what casts move of all that kernels move
    widths = re.findall(r'class="(casts|rest)" style="width:([\d.]+)%"', text)
    assert widths == [("casts", "6"), ("rest", "91"), ("casts", "9"), ("rest", "91")]


@pytest.mark.parametrize("dark", [0, 1])
def test_text_on_boxes_can_be_read(dark: int) -> None:
    pairs = [*((name, f"on-{name}") for name in style.DTYPES)]
    pairs += [(name, "ink") for name in ("plain", "paper", "tinted")]
    colours = [(style.COLOURS[fill][dark], style.COLOURS[ink][dark]) for fill, ink in pairs]
    colours += [(fill, style.INK_ON_HEAT) for _, fill in style.HEAT]
    assert all(contrast(fill, ink) > 4.5 for fill, ink in colours)


def contrast(*colours: str) -> float:
    """The ratio of the Web Content Accessibility Guidelines, 1 to 21."""
    found = []
    for colour in colours:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        found.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(found) + 0.05) / (min(found) + 0.05)


# --- beside torch.autocast ---

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
def test_casts_below_16_bits_narrow_and_those_in_the_backward_say_so(narrow: torch.dtype) -> None:
    report = compared()
    (row,) = report.modules
    report.modules = [replace(row, casts=[replace(cast, after=narrow) for cast in row.casts])]
    assert bars(svg_of(report), "widen") == []
    for phase, times in (("forward", 0), ("backward", 2)):
        casts = [replace(cast, phase=phase) for cast in row.casts if cast.what == "weight"]
        report.modules = [replace(row, casts=casts)]
        assert sum("in the backward" in text for text in texts(svg_of(report))) == times


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
            why = Reason.of(ReasonKind.CASTS_COST_MORE, low=row.low)
            nodes[at] = replace(row, dtype=torch.float32, reasons=(why,))
    words = drawing(report).more
    assert re.match(r"5\.0.*\b1 of 3\b", words)
    assert words in " ".join(texts(svg_of(report)))
    assert words in " ".join(str(report).split())
    assert words in dot.source(drawing(report)).source
    page = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert f'<div id="more">{words}' in page
    assert drawing(compared()).more == ""
    row = next(row for row in nodes if row.flops)
    row.computed_by, row.dtype = "products", torch.bfloat16
    assert "1 of 3" in more_bytes(report.plans, 105, 100)


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


def test_a_report_writes_it_shows_it_in_a_notebook_and_says_so_where_there_is_none(tmp_path: Path) -> None:
    report = compared()
    path = report.save(tmp_path / "x.beside.svg")
    assert path.read_text(encoding="utf-8") in report._repr_html_()
    again = Report.load(report.save(tmp_path / "x.json"))
    assert again.modules == report.modules
    assert svg_of(again) == path.read_text(encoding="utf-8")
    with pytest.raises(AmpFxError, match=r"amp_fx\.explain"):
        Report(costs={"amp_fx": Cost(1, 2)}).save(tmp_path / "x.beside.svg")
    assert beside.drawn(drawing(Report())) == ""
