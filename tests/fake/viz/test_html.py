"""The page is one file that fetches nothing, and nothing in a model can become part of its code."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from amp_fx.reports.report import Report
from amp_fx.viz import html, style
from amp_fx.viz.model import drawing
from pictures import NASTY, blocks, compared, nasty


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


def test_the_data_come_out_of_the_page_as_they_went_in(page: Page) -> None:
    data = json.loads(page.scripts[1])
    assert data == json.loads(json.dumps(html.data(drawing(nasty()))))
    assert {node["reason"] for node in data["graphs"][0]["nodes"]} >= set(NASTY)


def test_the_data_hold_nothing_that_ends_a_script(page: Page) -> None:
    assert not set(page.scripts[1]) & set("<>&\N{LINE SEPARATOR}")


def test_the_code_of_the_page_is_the_same_whatever_the_model(page: Page) -> None:
    other = Page(html.render(drawing(blocks())))
    assert (page.scripts[0], page.scripts[2]) == (other.scripts[0], other.scripts[2])


def test_the_page_fetches_nothing(page: Page) -> None:
    links = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert links == ["data:,"]
    policy = next(value or "" for name, value in page.attributes if name == "content")
    assert "default-src 'none'" in policy
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", page.scripts[2])


def test_the_licence_of_the_layout_library_is_in_the_page() -> None:
    text = html.render(drawing(Report()))
    assert "Chris Pettitt" in text
    assert "Permission is hereby granted" in text


def test_the_page_says_policy_totals_bars_and_legend() -> None:
    text = html.render(drawing(blocks(12, policy="fast")))
    for said in (
        "policy: fast", "50 casts, 4.8 kB", "computes in bf16", "low: on the low-precision list",
        "cast to a wider dtype",
    ):  # fmt: skip
        assert said in text
    text = html.render(drawing(compared()))
    # what casts move of all that kernels move
    widths = re.findall(r'class="(casts|rest)" style="width:([\d.]+)%"', text)
    assert widths == [("casts", "6"), ("rest", "91"), ("casts", "9"), ("rest", "91")]


@pytest.mark.parametrize("dark", [0, 1])
def test_text_on_boxes_can_be_read(dark: int) -> None:
    pairs = [
        *((name, f"on-{name}") for name in style.DTYPES),
        *((name, "ink") for name in ("plain", "paper", "tinted")),
    ]
    colours = [(style.COLOURS[fill][dark], style.COLOURS[ink][dark]) for fill, ink in pairs]
    colours += [(fill, style._INK_ON_HEAT) for _, fill in style.HEAT]
    assert all(contrast(fill, ink) > 4.5 for fill, ink in colours)


def contrast(*colours: str) -> float:
    """The ratio of the Web Content Accessibility Guidelines, 1 to 21."""
    found = []
    for colour in colours:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        found.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(found) + 0.05) / (min(found) + 0.05)


def test_the_title_is_escaped() -> None:
    text = html.render(drawing(Report(title="</title><script>")))
    assert "<title>&lt;/title&gt;&lt;script&gt;" in text
