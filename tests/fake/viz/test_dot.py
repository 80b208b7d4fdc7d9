"""dot files that Graphviz draws whatever the labels are."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from amp_fx import AmpFxError
from amp_fx.precision.policy.levels import LEVELS
from amp_fx.viz import dot
from amp_fx.viz.graph import Drawing
from amp_fx.viz.model import drawing
from amp_fx.viz.style import CLASSES, COLOURS, DTYPES, Face
from amp_fx.viz.words import short_dtype
from support.tracing.handwritten_reports import NASTY, blocks, nasty

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="needs Graphviz's dot (Debian, Ubuntu: apt install graphviz)"
)


def drawn(model: Drawing, folder: Path) -> tuple[set[str], str]:
    """The kinds of elements of the SVG, and its text, in which dot draws spaces as no-break spaces."""
    dot.write(model, folder / "x.svg")
    elements = [*ElementTree.parse(folder / "x.svg").iter()]
    found = "\n".join(each.text or "" for each in elements if each.tag.endswith("}text"))
    return {each.tag.rpartition("}")[2] for each in elements}, found.replace("\N{NO-BREAK SPACE}", " ")


@needs_dot
def test_labels_are_drawn_as_they_are_and_become_no_elements(tmp_path: Path) -> None:
    tags, text = drawn(drawing(nasty(), depth="all"), tmp_path)
    assert all(label in text for label in NASTY)
    assert tags <= {"svg", "g", "a", "title", "polygon", "polyline", "path", "ellipse", "text"}


@needs_dot
def test_the_picture_says_policy_totals_legend_casts_and_folds(tmp_path: Path) -> None:
    _, text = drawn(drawing(blocks(12), depth=2), tmp_path)
    for expected in (
        "policy autocast", "amp_fx: 50 casts", "legend", "computes in bf16", "low: on the low-precision list",
        "layers.0 \N{HORIZONTAL ELLIPSIS} layers.11 \N{MULTIPLICATION SIGN}12", "2 casts inside, 192 B", "each: ",
        "fp32 \N{RIGHTWARDS ARROW} bf16\n96 B", "bf16 \N{RIGHTWARDS ARROW} fp32\n96 B", "forward", "backward",
    ):  # fmt: skip
        assert expected in text, expected


@needs_dot
def test_what_changed_is_written_and_not_only_coloured(tmp_path: Path) -> None:
    model = drawing(blocks(3, odd=[1]), blocks(3), "all")
    _, text = drawn(model, tmp_path)
    assert "bf16 \N{RIGHTWARDS DOUBLE ARROW} fp32" in text
    assert "changed: earlier \N{RIGHTWARDS DOUBLE ARROW} now" in text
    assert "against the earlier report: casts 14 -> 12" in text
    assert "cast removed since the earlier report" in text
    lines = dot.source(model).source.splitlines()
    removed = [line for line in lines if ", removed" in line]
    changed = [line for line in lines if COLOURS["changed"][0] in line and "fillcolor" in line]
    assert removed
    assert changed
    assert all("style=dotted" in line for line in removed)
    assert all("penwidth=3.0" in line for line in changed)


@needs_dot
def test_a_png_is_a_png_of_some_size(tmp_path: Path) -> None:
    dot.write(drawing(blocks()), tmp_path / "x.PNG")
    data = (tmp_path / "x.PNG").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") > 400


def test_dot_files_need_no_program_pictures_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    dot.write(drawing(blocks()), tmp_path / "x.dot")
    assert "digraph" in (tmp_path / "x.dot").read_text(encoding="utf-8")
    with pytest.raises(AmpFxError, match=r"apt install\s+graphviz.*\.html or \.dot"):
        dot.write(drawing(blocks()), tmp_path / "x.svg")


def test_borders_tell_classes_apart_and_every_box_names_its_dtype() -> None:
    assert len({(border.dot, border.width) for border in CLASSES.values()}) == len(CLASSES)
    assert len({(border.dashes, border.width) for border in CLASSES.values()}) == len(CLASSES)
    levels = {str(level.dtype).removeprefix("torch.") for level in LEVELS.values()}
    assert levels == {*DTYPES}
    assert max(map(len, map(short_dtype, levels))) < 5
    source = dot.source(drawing(blocks(), depth="all")).source
    boxes = re.findall(r"_n\d+\"? \[label=(.*?) color=.*?fillcolor=\"(#\w+)\"", source)
    assert len(boxes) > 10
    fills = (COLOURS[name][0] for name in DTYPES)
    short = dict(zip(fills, ("int8", "fp8", "bf16", "fp16", "fp32"), strict=True))
    assert all(short[fill] in label for label, fill in boxes)


def test_casts_that_inductor_fuses_are_dashed_and_say_so() -> None:
    report = blocks()
    report.plans[0].casts = [replace(row, kernel=row.name == "cast_head") for row in report.plans[0].casts]
    lines = dot.source(drawing(report, depth=2)).source.splitlines()
    lines = [line for line in lines if "\N{RIGHTWARDS ARROW}" in line]
    assert sum("style=dashed" in line and ", fused" in line for line in lines) == 1
    assert any("style=solid" in line and "fused" not in line for line in lines)


def test_a_closed_module_is_the_redder_the_more_bytes_its_casts_move() -> None:
    fills = [dot.look_of(Face([], "", "ink", "keep", False, share))["fillcolor"] for share in (0, 0.25, 1, 2)]
    assert fills == ["#ffffff", "#eebbc2", "#dc7684", "#dc7684"]
