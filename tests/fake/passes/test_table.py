"""The one table of passes: what runs on which graph, and that every order of it is one the runner takes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from amp_fx import passes
from amp_fx.passes import (
    CAPTURED,
    JOINT,
    OUTLINE,
    PARTITIONED,
    PIPELINE,
    TABLE,
    Case,
    FoldWeights,
    GemmEpilogue,
    KeepWeights,
    MarkMatmuls,
    Pass,
    PlaceBySensitivity,
    PlaceLevels,
    Replay,
    ScaleBackward,
    select,
)
from amp_fx.policy.levels import LEVELS

BELOW = PlaceLevels(LEVELS["rowwise"], "cuda")
EXPORT = KeepWeights(()), FoldWeights((), "tied")
GIVEN: tuple[tuple[Pass, ...], ...] = (
    (),
    (BELOW,),
    EXPORT,
    (*EXPORT, BELOW),
    (Replay({}),),
    (PlaceBySensitivity({}),),
    (MarkMatmuls(),),
    (Replay({}), MarkMatmuls(planned=True)),
)
JOINTLY: tuple[tuple[Pass, ...], ...] = (
    (),
    (ScaleBackward(0),),
    (BELOW,),
    (ScaleBackward(0), BELOW),
)


def names(graph: str, case: Case) -> list[str]:
    return [step.name for step in select(graph, case)]


def test_every_pass_is_in_the_table() -> None:
    listed = {row.step if isinstance(row.step, type) else type(row.step) for row in TABLE}
    found: set[type] = set()
    for folder in passes.__path__:
        for path in Path(folder).glob("*/*.py"):
            module = importlib.import_module(f"amp_fx.passes.{path.parent.name}.{path.stem}")
            found |= {
                value
                for value in vars(module).values()
                if isinstance(value, type) and issubclass(value, Pass) and value.__module__ == module.__name__
            }
    assert listed == found


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("caches", [False, True])
def test_what_a_captured_graph_gets_has_what_it_needs(given: tuple[Pass, ...], caches: bool) -> None:
    check(CAPTURED, Case(given, caches_weights=caches), given)


@pytest.mark.parametrize("given", JOINTLY)
@pytest.mark.parametrize("devices", [{"cpu"}, {"cuda"}, {"cpu", "cuda"}, {"mps"}, set()])
@pytest.mark.parametrize("numerics", ["compiled", "eager"])
def test_what_inductors_graphs_get_has_what_it_needs(
    given: tuple[Pass, ...], devices: set[str], numerics: str
) -> None:
    case = Case(given, devices=frozenset(devices), numerics=numerics)
    check(JOINT, case, given)
    check(PARTITIONED, case, ())


def check(graph: str, case: Case, given: tuple[Pass, ...]) -> None:
    steps = select(graph, case)
    assert all(step in steps for step in given)
    facts = {graph}
    for step in steps:
        assert step.needs <= facts
        facts |= step.ensures


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.graph != CAPTURED], ids=lambda row: str(row.step)
)
def test_a_pass_on_inductors_graphs_says_what_it_needs_or_ensures(row: passes.Row) -> None:
    assert row.step.needs | row.step.ensures


def test_a_plan_or_sensitivity_takes_the_place_of_the_placement() -> None:
    assert "place" in names(CAPTURED, Case())
    for step in (Replay({}), PlaceBySensitivity({})):
        found = names(CAPTURED, Case((step,)))
        assert "place" not in found
        assert found.index(step.name) == names(CAPTURED, Case()).index("place")


def test_exported_weights_below_16_bits_are_folded_after_they_are_quantised() -> None:
    low, below = names(CAPTURED, Case(EXPORT)), names(CAPTURED, Case((*EXPORT, BELOW)))
    assert (
        low.index("insert-casts") < low.index("fold-weights") < low.index("fuse-casts") < low.index("verify")
    )
    first = below.index("quantise-matmuls")
    assert below.index("place-levels") < first < below.index("fold-weights")
    assert "fuse-casts" in below[below.index("fold-weights") :]


def test_a_cpu_has_no_pass_of_cudas_and_the_other_way_round() -> None:
    given = (GemmEpilogue(),)
    both = set(names(JOINT, Case(given, devices=frozenset({"cpu", "cuda"}))))
    assert both - set(names(JOINT, Case(given, devices=frozenset({"cpu"})))) == {"gemm-epilogue"}
    assert both - set(names(JOINT, Case(given, devices=frozenset({"cuda"})))) == {"lay-out-gradients"}
    assert "keep-statistics" not in names(JOINT, Case(devices=frozenset({"cpu"}), numerics="eager"))
    assert not names(JOINT, Case()) + names(PARTITIONED, Case())
    assert names(PARTITIONED, Case(devices=frozenset({"cpu"}))) == ["lay-out-weights"]
    assert names(PARTITIONED, Case(devices=frozenset({"cuda"}))) == ["write-casts"]


def test_the_outline_is_where_the_pipeline_begins() -> None:
    assert PIPELINE[: len(OUTLINE)] == OUTLINE
    assert all(after.needs <= {fact for step in OUTLINE for fact in step.ensures} for after in OUTLINE)
