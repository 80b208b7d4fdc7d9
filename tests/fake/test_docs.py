"""The README and the docs: links lead somewhere, Python blocks parse, the README stays short, the menu is whole.

That the blocks run is in ``tests/cpu/test_documents.py``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from griffe import load_extensions, temporary_visited_package

from support.document_blocks import FENCE, ROOT, blocks, pages

PAGES = pages()

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link may name behind ``#``, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_python_blocks_parse(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    for _, code in blocks(page):
        ast.parse(code)


def test_every_page_of_the_docs_is_in_the_menu_every_entry_is_a_page_and_the_readme_is_short() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named, docs = re.findall(r"[\w/-]+\.md", menu), ROOT / "docs"
    assert sorted(named) == sorted(page.relative_to(docs).as_posix() for page in docs.rglob("*.md"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/index.md" in readme
    lines = readme.splitlines()
    assert len(lines) <= 110, "read in a few minutes"
    assert [way for way in ("pip install .", "uv pip install .") if f"    {way}" not in lines[:25]] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").iterdir()), ids=lambda path: path.name)
def test_pictures_are_shown_and_drawings_fetch_nothing_and_have_dark_colours(picture: Path) -> None:
    assert any(picture.name in page.read_text(encoding="utf-8") for page in PAGES)
    if picture.suffix == ".svg":
        text = picture.read_text(encoding="utf-8")
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in text
        assert not re.search(r"href=|@import|<script|url\((?!#)", text)


def test_the_site_shows_no_roles_of_sphinx() -> None:
    roles = load_extensions(str(ROOT / "docs" / "roles.py"))
    code = 'def f():\n    """As :func:`amp_fx.explain` and :class:`~amp_fx.Plan` say."""'
    with temporary_visited_package("said", {"__init__.py": code}, extensions=roles) as package:
        docstring = package["f"].docstring
    assert docstring is not None
    assert docstring.value == "As `amp_fx.explain` and `amp_fx.Plan` say."
