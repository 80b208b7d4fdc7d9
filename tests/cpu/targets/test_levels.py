"""Policy fp8 for GPUs that are not there: what is chosen, counted, drawn, and the code that is generated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.instruments.reports.report import Report
from amp_fx.instruments.targets.tracing import TracedGraph
from amp_fx.precision.placement.level_cost import copy_traffic
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.policy.levels import FORWARD, LEVELS, WEIGHT
from examples.gpt import Block, GPTConfig
from support.models.small import Parts
from support.programs.target_process import OFF, Facts, facts, needs_a_target, process, quick_ones, traced

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]

FP8 = "float8_e4m3fn"

SLOW = pytest.mark.slow

#: operands and scales, of which the code knows by name or by sizes and strides
_ARGUMENT = r"(\w+|reinterpret_tensor\(\w+, \(.*?\), \(.*?\), \d+\))"
_CALL = re.compile(r"extern_kernels\._scaled_mm\(" + ", ".join([_ARGUMENT] * 4))
_VIEW = re.compile(r"reinterpret_tensor\(\w+, \((.*?)\), \((.*?)\), \d+\)")
_BUFFER = re.compile(r"(\w+) = (?:empty_strided_cuda\(|reinterpret_tensor\(\w+, )\((.*?)\), \((.*?)\), ")
_RENAMED = re.compile(r"(\w+) = (\w+); del")

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def gpt_blocks(width: int = 512, count: int = 2) -> nn.Module:
    """Blocks of a GPT, without a loss of their own."""
    config = GPTConfig(heads=width // 64, width=width)
    layers = nn.Sequential(*(Block(config) for _ in range(count)))
    return Parts(lambda m, x: m.blocks(x).mean(), blocks=layers)


@pytest.fixture(scope="module")
def blocks() -> list[TracedGraph]:
    return traced(gpt_blocks(), torch.empty(16, 512, 512))


def operands(text: str) -> list[list[Layout | None]]:
    """Sizes and strides of both operands and their scales, of every scaled matmul; None for inputs of the graph."""
    found, layouts = [], dict[str, Layout]()
    for line in text.splitlines():
        if match := _BUFFER.search(line):
            layouts[match[1]] = _numbers(match[2]), _numbers(match[3])
        elif (match := _RENAMED.search(line)) and match[2] in layouts:
            layouts[match[1]] = layouts[match[2]]
        elif match := _CALL.search(line):
            given = [(argument, _VIEW.match(argument)) for argument in match.groups()]
            found.append([(_numbers(v[1]), _numbers(v[2])) if v else layouts.get(a) for a, v in given])
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def counted(graphs: list[TracedGraph], target: str = "cuda:h100", **options: Any) -> Facts:
    return facts(graphs, {**OFF, **options}, target)


#: recipe -> what the forward and the step move at most, beside bf16: with scales of rows; with one for each operand;
#: copies by columns are read once more for each block of 32 than Inductor reads them for whole columns
BOUNDS = {"rowwise": (0.95, 1.06), "tensorwise": (1.2, 1.12), "mxfp8": (0.98, 1.28)}
RECIPES = pytest.mark.parametrize("recipe", quick_ones(BOUNDS, "rowwise"))


def target_of(recipe: str) -> str:
    return "cuda:b200" if recipe == "mxfp8" else "cuda:h100"


@pytest.mark.slow
@RECIPES
def test_blocks_keep_less_than_in_bf16_and_weight_gradients_leave_in_fp32(recipe: str, blocks: Any) -> None:
    target, (forward, moved) = target_of(recipe), BOUNDS[recipe]
    low, fp8 = (counted(blocks, target, **given) for given in ({}, {"policy": "fp8", "fp8": recipe}))
    assert fp8.counts.extern_kernels == low.counts.extern_kernels
    assert fp8.counts.saved_bytes < 0.62 * low.counts.saved_bytes
    assert fp8.forward.bytes_moved < forward * low.forward.bytes_moved
    assert fp8.counts.bytes_moved < moved * low.counts.bytes_moved
    if recipe != "rowwise":
        # what is rounded and widened again: none of 8
        assert (low.rounded, fp8.rounded) == (0, 0)
        assert fp8.casts.count("gradient") == low.casts.count("gradient")


@pytest.mark.parametrize("recipe", quick_ones(BOUNDS, "rowwise", "tensorwise"))
@pytest.mark.parametrize("read", ["rows", "columns"])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (4096, 4096, torch.bfloat16),
        (512, 2048, torch.float32),
        pytest.param(8192, 512, torch.bfloat16, marks=SLOW),
        pytest.param(8192, 4096, torch.float32, marks=SLOW),
    ],
)
def test_a_copy_is_the_kernels_and_bytes_that_the_cut_charges(
    recipe: str, read: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    target = process(target_of(recipe))
    kernels, nbytes = target.call(
        "support.programs.target_code:copy_costs", recipe, rows, columns, dtype, read
    )
    in_rows, block = recipe != "tensorwise" and read == "rows", LEVELS[recipe].block
    least, expected = copy_traffic(rows * columns, dtype.itemsize, in_rows=in_rows, block=block)
    assert kernels == expected
    # scales of rows are read and written, too
    assert least <= nbytes < 1.03 * least


def test_a_copy_that_is_read_both_ways_in_one_graph_is_written_twice_by_one_kernel() -> None:
    elements = 2048 * 2048
    kernels, nbytes = process().call(
        "support.programs.target_code:copy_costs", "tensorwise", 2048, 2048, torch.bfloat16, "both"
    )
    least, expected = copy_traffic(elements, 2, in_rows=False)
    assert kernels == expected
    assert nbytes == pytest.approx(least + elements, rel=0.01)


@RECIPES
def test_generated_code_calls_the_library_with_the_layouts_it_wants(recipe: str) -> None:
    target, architecture = target_of(recipe), 100 if recipe == "mxfp8" else 90
    graphs = traced(gpt_blocks(128, count=1), torch.empty(4, 128, 128))
    codes = process(target).call(
        "support.programs.target_code:sources", graphs, {**OFF, "policy": "fp8", "fp8": recipe}
    )
    lines = [line for code in codes for line in code.text.splitlines() if "kernels._scaled_mm(" in line]
    # 4 linears: themselves, the gradients of 3 inputs or all, and of 4 weights
    assert len(lines) >= 11
    assert sum("use_fast_accum=True" in line for line in lines) == 4
    # where it is not an input of the graph: what is contracted lies in one piece
    calls = [call for code in codes for call in operands(code.text)]
    assert len(calls) == len(lines)
    firsts, seconds = ([layout for call in calls if (layout := call[place])] for place in (0, 1))
    assert min(len(firsts), len(seconds)) >= 8
    assert all(strides == (contracted, 1) for (_, contracted), strides in firsts)
    assert all(strides == (1, contracted) for (contracted, _), strides in seconds)
    wide = [line for line in lines if "out_dtype=torch.float32" in line]
    assert len(wide) == (0 if recipe == "rowwise" else 4)
    if recipe == "mxfp8":
        # what the library reads as tiles of 128 rows and 4 blocks lies in one piece
        scales = [layout for call in calls for layout in call[2:] if layout]
        assert len(scales) >= 16
        assert all(len(sizes) == 1 and strides == (1,) for sizes, strides in scales)
        assert all("float8_e8m0fnu" in code.text for code in codes)
    sizes = process(target).call("support.programs.target_code:cubins", codes, (architecture,))
    assert sizes
    assert all(size > 1000 for by_architecture in sizes.values() for size in by_architecture.values())


def served(tokens: int) -> list[TracedGraph]:
    with torch.no_grad():
        return traced(gpt_blocks().eval(), torch.empty(1, tokens, 512))


#: tokens -> recipe -> share of the bytes in 16 bits, and more kernels
SERVED = {
    1: {"rowwise": (0.52, 2), "tensorwise": (0.52, 16)},
    2048: {"rowwise": (0.87, 2), "tensorwise": (1.20, 32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", SERVED)
def test_without_gradients_weights_are_read_in_half_of_their_bytes(tokens: int) -> None:
    graphs = served(tokens)
    low = counted(graphs, weights="cache")
    for recipe, (share, kernels) in SERVED[tokens].items():
        fp8 = counted(graphs, weights="cache", policy="fp8", fp8=recipe)
        assert fp8.counts.extern_kernels == low.counts.extern_kernels
        assert fp8.counts.bytes_moved < share * low.counts.bytes_moved
        assert fp8.counts.kernels <= low.counts.kernels + kernels


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=SLOW)])
@pytest.mark.parametrize("weights", ["cast", "cache"])
def test_code_without_gradients_calls_the_library_as_it_wants(recipe: str, weights: str) -> None:
    options = {**OFF, "policy": "fp8", "fp8": recipe, "weights": weights}
    [code] = process().call("support.programs.target_code:sources", served(1), options)
    calls = operands(code.text)
    assert len(calls) == 8
    for first, second, *_ in calls:
        assert first is None or first[1] == (first[0][1], 1)
        assert second is not None
        assert second[1] == (1, second[0][0])


@pytest.fixture(scope="module")
def report() -> Report:
    with torch.device("meta"):
        model, x = gpt_blocks(4096), torch.empty(4, 2048, 4096)
    return amp_fx.explain(model, x, options={"policy": "fp8"}, target="cuda:h100")


def test_a_report_has_the_share_of_fp8(report: Report) -> None:
    shares = report.shares()
    # all but attention
    assert shares[FP8]["flops"] > 0.85
    assert shares[FP8]["bytes"] == 0
    assert sum(share["flops"] for share in shares.values()) == pytest.approx(1)
    assert "policy fp8 (rowwise)" in str(report)
    assert FP8 in report.table()


def test_a_report_says_which_matmuls_of_forward_and_backward_are_in_fp8(report: Report) -> None:
    forward, backward = (
        [row for plan in report.plans if plan.phase == phase for row in plan.nodes if row.levels_below]
        for phase in ("forward", "backward")
    )
    assert len(forward) == 8
    assert len(backward) >= 15
    assert {row.dtype for row in forward + backward} == {torch.bfloat16}
    for role in (FORWARD, WEIGHT):
        why = Reason.of(ReasonKind.LEVEL, role=role, policy="fp8", level="rowwise")
        assert all(why in row.reasons for row in forward)
    assert sum(row.flops for row in backward) > 1.8 * sum(row.flops for row in forward)


def test_fp8_is_drawn_and_kept_like_other_dtypes(report: Report, tmp_path: Path) -> None:
    again = Report.load(report.save(tmp_path / "report.json"))
    assert again.to_dict() == report.to_dict()
    assert again.shares() == report.shares()
    page = Path(report.save(tmp_path / "picture.html")).read_text(encoding="utf-8")
    assert FP8 in page
    assert "cuda:h100" in page
    report.save(tmp_path / "report.md")
    report.save(tmp_path / "casts.beside.svg")
