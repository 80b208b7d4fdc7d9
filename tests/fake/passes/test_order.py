"""The order of the passes on each graph, and that every order is one that the runner takes."""

from __future__ import annotations

import importlib
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import expecttest
import pytest

from amp_fx import passes
from amp_fx.passes import (
    CAPTURED,
    JOINT,
    OUTLINE,
    PARTITIONED,
    PIPELINE,
    FoldWeights,
    Given,
    KeepWeights,
    MarkMatmuls,
    Pass,
    PlaceBySensitivity,
    PlaceLevels,
    Replay,
    ScaleBackward,
    captured_passes,
    joint_passes,
    partitioned_passes,
)
from amp_fx.policy.levels import LEVELS

BELOW = PlaceLevels(LEVELS["rowwise"], "cuda")
EXPORT: dict[str, Any] = {"keep": KeepWeights(()), "fold": FoldWeights((), "tied")}
ORDERS = {
    "default": captured_passes(Given()),
    "inference": captured_passes(Given(caches_weights=True)),
    "inference below 16 bits": captured_passes(Given(levels=BELOW, caches_weights=True)),
    "export": captured_passes(Given(**EXPORT)),
    "export below 16 bits": captured_passes(Given(**EXPORT, levels=BELOW)),
    "plan, training below 16 bits": captured_passes(Given(place=Replay({}), mark=MarkMatmuls(planned=True))),
    "sensitivity": captured_passes(Given(place=PlaceBySensitivity({}))),
    "joint, cpu": joint_passes({"cpu"}),
    "joint, cuda": joint_passes({"cuda"}),
    "joint, cpu and cuda": joint_passes({"cpu", "cuda"}),
    "joint, fp16 below 16 bits": joint_passes({"cuda"}, scale=ScaleBackward(0), levels=BELOW),
    "joint, attention": joint_passes({"cpu"}, products=("attention",)),
    "joint, eager": joint_passes({"cpu"}, "eager"),
    "joint, mps": joint_passes({"mps"}),
    "partitioned, cpu": partitioned_passes({"cpu"}),
    "partitioned, cuda": partitioned_passes({"cuda"}),
}


def test_the_order_of_the_passes() -> None:
    lines = [f"{case}: {', '.join(step.name for step in steps) or 'none'}" for case, steps in ORDERS.items()]
    text = [textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    expecttest.assert_expected_inline(
        "\n".join(text),
        """\
default: pin-dtypes, classify, constrain, place, choose-attention, insert-casts, fuse-casts, verify
inference: pin-dtypes, classify, constrain, place, choose-attention, insert-casts, fuse-casts,
  cache-weights, verify
inference below 16 bits: pin-dtypes, classify, constrain, place, choose-attention, insert-casts,
  fuse-casts, place-levels, quantise-matmuls, cache-weights, verify
export: pin-dtypes, classify, constrain, keep-weights, place, insert-casts, fold-weights,
  fuse-casts, verify
export below 16 bits: pin-dtypes, classify, constrain, keep-weights, place, insert-casts,
  fuse-casts, place-levels, quantise-matmuls, fold-weights, fuse-casts, verify
plan, training below 16 bits: pin-dtypes, classify, constrain, replay, insert-casts, fuse-casts,
  verify, mark-matmuls
sensitivity: pin-dtypes, classify, constrain, place-by-sensitivity, choose-attention, insert-casts,
  fuse-casts, verify
joint, cpu: separate-outputs, lay-out-gradients, keep-statistics
joint, cuda: separate-outputs, gemm-epilogue, keep-statistics
joint, cpu and cuda: separate-outputs, lay-out-gradients, gemm-epilogue, keep-statistics
joint, fp16 below 16 bits: scale-backward, place-levels, quantise-matmuls, separate-outputs,
  gemm-epilogue, keep-statistics
joint, attention: separate-outputs, attend, lay-out-gradients, keep-statistics
joint, eager: separate-outputs, lay-out-gradients
joint, mps: none
partitioned, cpu: lay-out-weights
partitioned, cuda: write-casts""",
    )


def test_every_pass_stands_in_an_order() -> None:
    found: set[type] = set()
    for folder in passes.__path__:
        for path in Path(folder).glob("*/*.py"):
            module = importlib.import_module(f"amp_fx.passes.{path.parent.name}.{path.stem}")
            found |= {
                value
                for value in vars(module).values()
                if isinstance(value, type) and issubclass(value, Pass) and value.__module__ == module.__name__
            }
    assert found == {type(step) for steps in ORDERS.values() for step in steps}


PLACED = None, PlaceBySensitivity({}), Replay({})


@pytest.mark.parametrize("place", PLACED, ids=str)
@pytest.mark.parametrize("export", [{}, EXPORT], ids=["", "export"])
def test_passes_on_a_captured_graph_have_what_they_need(place: Any, export: dict[str, Any]) -> None:
    for levels, mark, caches in itertools.product((None, BELOW), (None, MarkMatmuls()), (False, True)):
        given = Given(place=place, levels=levels, mark=mark, caches_weights=caches, **export)
        check(CAPTURED, captured_passes(given))


@pytest.mark.parametrize("devices", [{"cpu"}, {"cuda"}, {"cpu", "cuda"}, {"mps"}])
def test_passes_on_inductors_graphs_have_what_they_need(devices: set[str]) -> None:
    for scale, levels in itertools.product((None, ScaleBackward(0)), (None, BELOW)):
        check(JOINT, joint_passes(devices, scale=scale, levels=levels))
    check(PARTITIONED, partitioned_passes(devices))


def check(graph: str, steps: Sequence[Pass]) -> None:
    facts = {graph}
    for step in steps:
        assert step.needs <= facts
        assert graph == CAPTURED or step.needs & {graph, "levels-placed"} or step.ensures
        facts |= step.ensures


def test_the_outline_is_where_the_pipeline_begins() -> None:
    assert PIPELINE[: len(OUTLINE)] == OUTLINE
