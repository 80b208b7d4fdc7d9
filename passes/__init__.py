"""The compiler passes, one per file, and the one table that orders them: :data:`TABLE`.

Folders say which graph a pass runs on: ``forward/``, the captured graph, before AOTAutograd makes a backward of it;
``joint/``, Inductor's joint graph, forward and backward together; ``levels/``, either of these; ``partitioned/``,
Inductor's forward, backward and inference graphs, each by itself.

What a pass is, and the runner, are in ``base.py``; what a pass on Inductor's graphs may read of a node, in
``keyed.py``. Not here: op lists (``amp_fx.policy``), costs and the cut
(``amp_fx.placement``). Open ``forward/place.py`` for the heart of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from amp_fx.passes.base import (
    CAPTURED,
    JOINT,
    PARTITIONED,
    Pass,
    PassContext,
    PassResult,
    run_in_order,
    run_keyed,
    run_passes,
)
from amp_fx.passes.forward.cache_weights import CacheWeights
from amp_fx.passes.forward.classify import Classify
from amp_fx.passes.forward.constrain import Constrain
from amp_fx.passes.forward.fold_weights import FoldWeights
from amp_fx.passes.forward.fuse_casts import FuseCasts
from amp_fx.passes.forward.insert_casts import InsertCasts
from amp_fx.passes.forward.keep_weights import KeepWeights
from amp_fx.passes.forward.pin_dtypes import PinDtypes
from amp_fx.passes.forward.place import Place
from amp_fx.passes.forward.place_by_sensitivity import PlaceBySensitivity
from amp_fx.passes.forward.replay import Replay
from amp_fx.passes.forward.verify import Verify
from amp_fx.passes.joint.gemm_epilogue import GemmEpilogue
from amp_fx.passes.joint.keep_statistics import KeepStatistics
from amp_fx.passes.joint.lay_out_gradients import LayOutGradients
from amp_fx.passes.joint.scale_backward import ScaleBackward
from amp_fx.passes.joint.separate_outputs import SeparateOutputs
from amp_fx.passes.levels.mark_matmuls import MarkMatmuls
from amp_fx.passes.levels.place_levels import PlaceLevels
from amp_fx.passes.levels.quantise_matmuls import QuantiseMatmuls
from amp_fx.passes.partitioned.lay_out_weights import LayOutWeights
from amp_fx.passes.partitioned.write_casts import WriteCasts

__all__ = [
    "CAPTURED",
    "JOINT",
    "OUTLINE",
    "PARTITIONED",
    "PIPELINE",
    "TABLE",
    "CacheWeights",
    "Case",
    "Classify",
    "Constrain",
    "FoldWeights",
    "FuseCasts",
    "GemmEpilogue",
    "InsertCasts",
    "KeepStatistics",
    "KeepWeights",
    "LayOutGradients",
    "LayOutWeights",
    "MarkMatmuls",
    "Pass",
    "PassContext",
    "PassResult",
    "PinDtypes",
    "Place",
    "PlaceBySensitivity",
    "PlaceLevels",
    "QuantiseMatmuls",
    "Replay",
    "Row",
    "ScaleBackward",
    "SeparateOutputs",
    "Verify",
    "WriteCasts",
    "run_in_order",
    "run_keyed",
    "run_passes",
    "select",
]


@dataclass(frozen=True)
class Case:
    """What decides which passes run on a graph.

    Attributes:
        given: passes whose fields somebody else has to fill in: by a plan, measured sensitivity, a program's weights,
            a scaler
            or a device. Such a pass runs where one is given.
        outline: only what a plan is matched with, calls and their classes.
        caches_weights: low copies of weights live across calls.
        devices: types of the devices that Inductor compiles for.
        numerics: ``"compiled"`` or ``"eager"``.
    """

    given: tuple[Pass, ...] = ()
    outline: bool = False
    caches_weights: bool = False
    devices: frozenset[str] = frozenset()
    numerics: str = "compiled"

    def giving(self, *more: Pass) -> Case:
        """The same with more passes given."""
        return replace(self, given=(*self.given, *more))

    def of(self, kind: type[Pass]) -> Pass | None:
        """The pass of a class that is given, if any."""
        return next((step for step in self.given if type(step) is kind), None)


@dataclass(frozen=True)
class Row:
    """One pass in the order of one graph. What it needs and ensures stands in its class.

    Attributes:
        graph: which it runs on.
        step: the pass; a class: the pass of it that is given.
        does: in a few words, and in brackets when.
        when: whether it runs; a class besides only where one is given.
        in_outline: also where only calls and their classes are wanted.
    """

    graph: str
    step: Pass | type[Pass]
    does: str
    when: Callable[[Case], bool] = lambda case: True
    in_outline: bool = False


def _beside(*kinds: type[Pass]) -> Callable[[Case], bool]:
    """Where passes of all these classes are given."""
    return lambda case: all(case.of(kind) is not None for kind in kinds)


def _without(*kinds: type[Pass]) -> Callable[[Case], bool]:
    """Where no pass of these classes is given."""
    return lambda case: all(case.of(kind) is None for kind in kinds)


def _on(*devices: str) -> Callable[[Case], bool]:
    """Where Inductor compiles for one of these devices."""
    return lambda case: not case.devices.isdisjoint(devices)


def _keeps_statistics(case: Case) -> bool:
    # eager: bit for bit what the decompositions give, which do not know whether eager PyTorch rounds here
    return case.numerics != "eager" and _on("cpu", "cuda")(case)


#: every pass on every graph, in order
TABLE: tuple[Row, ...] = (
    Row(CAPTURED, PinDtypes(), "write down the dtypes that the program only implies", in_outline=True),
    Row(
        CAPTURED,
        Classify(),
        "op lists and user rules: low, fp32, promote, follow, keep",
        in_outline=True,
    ),
    Row(CAPTURED, Constrain(), "hazards that lists cannot see; storages that must not be re-typed"),
    Row(CAPTURED, KeepWeights, "(export) ops whose weights do not fit into the low dtype"),
    Row(CAPTURED, Place(), "the precision of every value", _without(PlaceBySensitivity, Replay)),
    Row(
        CAPTURED,
        PlaceBySensitivity,
        "(sensitivity) the precision of every value, by time and measured accuracy",
    ),
    Row(CAPTURED, Replay, "(plan) the precision of every value, as the plan has it"),
    Row(CAPTURED, InsertCasts(), "casts, each once per value and dtype", _without(FoldWeights)),
    Row(
        CAPTURED,
        InsertCasts(stored=True),
        "(export) the same, and operands of norms in one dtype",
        _beside(FoldWeights),
    ),
    Row(
        CAPTURED,
        FoldWeights,
        "(export) weights are stored as they are read, and their casts go",
        _without(PlaceLevels),
    ),
    Row(CAPTURED, FuseCasts(), "conversions that do nothing go"),
    Row(CAPTURED, PlaceLevels, "(levels below 16 bits, no gradients) which matmuls run in them"),
    Row(
        CAPTURED,
        QuantiseMatmuls(joint=False),
        "(levels below 16 bits, no gradients) operands are scaled and converted, and matmuls read them",
        _beside(PlaceLevels),
    ),
    Row(
        CAPTURED,
        FoldWeights,
        "(export, levels below 16 bits) weights are stored as they are read, and their casts go",
        _beside(PlaceLevels),
    ),
    Row(
        CAPTURED,
        FuseCasts(),
        "(export, levels below 16 bits) casts that folding has left go",
        _beside(FoldWeights, PlaceLevels),
    ),
    Row(
        CAPTURED,
        CacheWeights(),
        "(inference) low copies of weights are inputs, and their casts go",
        lambda case: case.caches_weights,
    ),
    Row(CAPTURED, Verify(), "it runs, and its dtypes are the planned and the promised ones"),
    Row(CAPTURED, MarkMatmuls, "(levels below 16 bits, training) the matmuls that may run in them"),
    Row(JOINT, ScaleBackward, "(fp16) loss scaling and finite checks inside the backward"),
    Row(JOINT, PlaceLevels, "(levels below 16 bits) which matmuls run in them, forward and backward"),
    Row(
        JOINT,
        QuantiseMatmuls(),
        "(levels below 16 bits) operands are scaled and converted once, and matmuls read them",
        _beside(PlaceLevels),
    ),
    Row(
        JOINT,
        SeparateOutputs(),
        "(CPU, CUDA) what is returned widened is read as it was",
        _on("cpu", "cuda"),
    ),
    Row(JOINT, LayOutGradients(), "(CPU) gradients of convolutions in their weights' layout", _on("cpu")),
    Row(JOINT, GemmEpilogue, "(CUDA) a matmul returns fp32 where the graph does, or a rule", _on("cuda")),
    Row(
        JOINT,
        KeepStatistics(),
        "(not numerics eager) norms keep what their backward needs in fp32",
        _keeps_statistics,
    ),
    Row(PARTITIONED, LayOutWeights(), "(CPU) convolutions' weights are cast channels last", _on("cpu")),
    Row(
        PARTITIONED,
        WriteCasts(),
        "(CUDA) casts are written where they are made, not behind a view",
        _on("cuda"),
    ),
)


def select(graph: str, case: Case) -> tuple[Pass, ...]:
    """The passes that run on a graph, in order.

    Args:
        graph: one of :data:`CAPTURED`, :data:`JOINT`, :data:`PARTITIONED`.
        case: what decides about it.
    """
    steps: list[Pass] = []
    for row in TABLE:
        step = row.step if isinstance(row.step, Pass) else case.of(row.step)
        if row.graph != graph or step is None or (case.outline and not row.in_outline) or not row.when(case):
            continue
        steps.append(step)
    return tuple(steps)


#: forward passes, in order
PIPELINE = select(CAPTURED, Case())

#: what a plan is matched with: calls and their classes
OUTLINE = select(CAPTURED, Case(outline=True))
