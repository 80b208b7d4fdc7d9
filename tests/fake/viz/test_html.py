"""The page is one file that fetches nothing, and nothing in a model can become part of its code."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from amp_fx.reports.report import Report
from amp_fx.viz import html
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


def test_bars_are_what_casts_move_of_all_that_kernels_move() -> None:
    text = html.render(drawing(compared()))
    widths = re.findall(r'class="(casts|rest)" style="width:([\d.]+)%"', text)
    assert widths == [("casts", "6"), ("rest", "91"), ("casts", "9"), ("rest", "91")]


def test_the_title_is_escaped() -> None:
    text = html.render(drawing(Report(title="</title><script>")))
    assert "<title>&lt;/title&gt;&lt;script&gt;" in text
