"""The report lists what a step keeps between forward and backward: bytes, bits, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.instruments.reports.report import Report
from amp_fx.precision.plans.saved import SavedValue, largest
from amp_fx.viz.dot import source
from amp_fx.viz.html import data
from amp_fx.viz.model import drawing
from amp_fx.viz.style import group_face
from benchmarks.counts import counting

ROWS, WIDTH = 2048, 64
BF16, FP32 = 2, 4


class Block(nn.Module):
    """A norm, and two maps with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two equal blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def explained(model: nn.Module, memory: str | float = "keep", rows: int = ROWS) -> Report:
    torch._dynamo.reset()
    options = {"strict": True, "profile": "off", "activation_memory": memory}
    return amp_fx.explain(model, torch.randn(rows, WIDTH), options=options)


@pytest.fixture(scope="module")
def rounded() -> Report:
    return explained(Blocks(), "int8")


def found(report: Report, module: str, op: str) -> list[SavedValue]:
    return [row for row in report.plan.saved_values if (row.module_path, row.op) == (module, op)]


def test_every_value_that_is_kept_is_there_with_what_reads_it() -> None:
    report = explained(Blocks())
    (given,) = found(report, "layers.0.up", "linear")
    assert (given.dtype, given.bits, given.bytes) == (torch.bfloat16, 16, ROWS * 2 * WIDTH * BF16)
    assert given.reason == "read by the gradient of layers.0"
    (weight,) = found(report, "layers.1.down", "weight")
    assert (weight.bits, weight.bytes) == (16, 2 * WIDTH * WIDTH * BF16)
    assert weight.reason == "read by its input gradient"
    reasons = {row.reason for row in found(report, "layers.1.norm", "layer_norm")}
    assert {"read by its gradient", "read by the weight gradient of layers.1.up"} <= reasons
    sizes = [row.bytes for row in report.plan.saved_values]
    assert sizes == sorted(sizes, reverse=True)
    # the count of the benchmarks reads names in both graphs
    torch._dynamo.reset()
    with counting() as counter:
        torch.compile(Blocks(), backend="amp_fx", options={"profile": "off"})(
            torch.randn(ROWS, WIDTH)
        ).backward()
    assert sum(sizes) == counter.total.saved_bytes == report.costs["amp_fx"].saved


def test_in_fewer_bits_each_value_says_its_form_or_why_it_is_as_it_is(rounded: Report) -> None:
    report, rows = rounded, rounded.plan.saved_values
    assert sum(row.bytes for row in rows) == report.plan.saved["after"] == report.costs["amp_fx"].saved
    assert sum(row.bits == 8 for row in rows) == report.plan.saved["8 bits"]
    (given,) = found(report, "layers.0.up", "linear")
    elements = ROWS * 2 * WIDTH
    assert (given.dtype, given.bits, given.bytes) == (torch.bfloat16, 8, elements + elements // 64 * BF16)
    assert given.reason == "groups of 64; read by the gradient of layers.0"
    statistics = [row for row in rows if row.bytes == ROWS * FP32]
    assert statistics
    assert all("as statistics of norms are" in row.reason and row.bits == 32 for row in statistics)
    assert not [row for row in rows if row.op == "weight"]


def test_a_budget_leaves_values_as_they_are_that_it_does_not_need() -> None:
    whole = sum(row.bytes for row in explained(Blocks()).plan.saved_values)
    rows = explained(Blocks(), 0.9).plan.saved_values
    assert sum(row.bytes for row in rows) <= 0.9 * whole
    reasons = [row.reason for row in rows if row.bits == 16]
    assert any(reason.startswith("as it is: the budget holds without; read by") for reason in reasons)


def test_what_the_program_returns_is_said_to_be_returned() -> None:
    report = explained(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), "int8")
    (result,) = [row for row in report.plan.saved_values if row.op == "tanh"]
    assert result.reason.startswith("the program returns it; read by its gradient")


def test_the_screen_the_page_and_the_file_have_the_largest(tmp_path: Path, rounded: Report) -> None:
    report = rounded
    (first, *_) = report.largest_saved
    assert (first.times, first.module_path, first.bytes) == (
        2,
        "layers.*.up",
        2 * report.plan.saved_values[0].bytes,
    )
    line = f"2 x {first.module_path}: {first.op}, "
    page = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (str(report), page, report.to_markdown()):
        assert "argest values kept for the backward" in text
        assert line.rstrip(", ") in text
    assert "bf16 in 8 bits, groups of 64; read by" in str(report)
    again = amp_fx.Report.load(report.save(tmp_path / "report.json"))
    assert again.largest_saved == report.largest_saved
    assert report.to_dict()["summary"]["largest_saved"][0]["bits"] == 8


def test_a_picture_says_the_bits_that_are_kept_and_equal_blocks_stay_folded(rounded: Report) -> None:
    graph, *_ = drawing(rounded).graphs
    kept = {node.module: (node.kept, node.kept_in) for node in graph.nodes}
    assert kept["layers.0.up"] == (8, (2, 2))
    # the loss needs no result of the last block's
    assert kept["layers.0.down"] == (8, (1, 2))
    (block,) = [group for group in graph.groups if group.label == "layers.0"]
    assert block.times == 2
    assert "values kept in 8 bits inside" in group_face(graph, block, hot=False).lines
    assert "kept in 8 bits in 1 of 2 blocks" in source(drawing(rounded)).source
    page = data(drawing(rounded))["graphs"][0]
    assert any("kept for the backward: 270 kB, bf16 in 8 bits" in node["details"] for node in page["nodes"])


def test_without_the_option_a_box_has_no_bits_and_its_details_have_them() -> None:
    graph, *_ = drawing(explained(Block())).graphs
    assert not any(node.kept for node in graph.nodes)
    lines = [line for node in graph.nodes for line in node.saved]
    assert "524 kB, bf16, read by the gradient of gelu" in lines


@pytest.mark.parametrize(("size", "times"), [(10, 2), (11, 1)])
def test_equal_values_of_repeated_blocks_are_one_row(size: int, times: int) -> None:
    def value(block: int, nbytes: int) -> SavedValue:
        where = f"blocks.{block}.norm"
        reason = f"read by the gradient of blocks.{block}"
        return SavedValue("mul", "", "mul", where, torch.float32, 32, nbytes, reason)

    row = largest([value(0, 10), value(1, size)])[0]
    assert row.times == times
    assert row.bytes == (20 if times == 2 else 11)
    if times == 2:
        assert (row.module_path, row.reason) == ("blocks.*.norm", "read by the gradient of blocks.*")


def test_without_gradients_nothing_is_kept() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        report = amp_fx.explain(Block(), torch.randn(8, WIDTH), options={"profile": "off"})
    assert not report.plan.saved_values
    assert "kept for the backward" not in str(report)
