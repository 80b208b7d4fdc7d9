"""The compiler passes, one per file, and the one table that orders them.

================= =====================================================================
pin_dtypes        write down the dtypes that the program only implies
classify          op lists and user rules: low, fp32, promote, follow, keep
constrain         hazards that lists cannot see; storages that must not be re-typed
keep_weights      (export) ops whose weights do not fit into the low dtype
place             the precision of every value
replay            (with a plan) the precision of every value, as the plan has it
insert_casts      casts, each once per value and dtype
cache_weights     (inference) low copies of weights are inputs, and their casts go
fold_weights      (export) weights are stored as they are read, and their casts go
fuse_casts        conversions that do nothing go
verify            it runs, and its dtypes are the planned and the promised ones
scale_backward    (joint graph, fp16) loss scaling and finite checks inside the backward
gemm_epilogue     (joint graph, CUDA) a matmul whose result is only widened returns fp32
lay_out_gradients (joint graph, CPU) gradients of convolutions in their weights' layout
lay_out_weights   (after partitioning, CPU) convolutions' weights are cast channels last
================= =====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_fx.passes.base import Pass, PassContext, PassResult, run_in_order, run_passes
from amp_fx.passes.cache_weights import CacheWeights
from amp_fx.passes.classify import Classify
from amp_fx.passes.constrain import Constrain
from amp_fx.passes.fold_weights import FoldWeights
from amp_fx.passes.fuse_casts import FuseCasts
from amp_fx.passes.gemm_epilogue import GemmEpilogue
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.keep_weights import KeepWeights
from amp_fx.passes.lay_out_gradients import LayOutGradients
from amp_fx.passes.lay_out_weights import LayOutWeights
from amp_fx.passes.pin_dtypes import PinDtypes
from amp_fx.passes.place import Place
from amp_fx.passes.replay import Replay
from amp_fx.passes.scale_backward import ScaleBackward
from amp_fx.passes.verify import Verify

__all__ = [
    "JOINT_PIPELINES",
    "OUTLINE",
    "PIPELINE",
    "POST_GRAD_PIPELINES",
    "CacheWeights",
    "Classify",
    "Constrain",
    "FoldWeights",
    "FuseCasts",
    "GemmEpilogue",
    "InsertCasts",
    "KeepWeights",
    "LayOutGradients",
    "LayOutWeights",
    "Pass",
    "PassContext",
    "PassResult",
    "PinDtypes",
    "Place",
    "Replay",
    "ScaleBackward",
    "Verify",
    "cached_pipeline",
    "export_pipeline",
    "replay_pipeline",
    "run_in_order",
    "run_passes",
]

#: forward passes, in order
PIPELINE: tuple[Pass, ...] = (
    PinDtypes(),
    Classify(),
    Constrain(),
    Place(),
    InsertCasts(),
    FuseCasts(),
    Verify(),
)

#: what a plan is matched with: calls and their classes
OUTLINE: tuple[Pass, ...] = (PinDtypes(), Classify())

#: device type -> passes on Inductor's joint graphs, in order
JOINT_PIPELINES: dict[str, tuple[Pass, ...]] = {"cuda": (GemmEpilogue(),), "cpu": (LayOutGradients(),)}

#: device type -> passes on Inductor's graphs after partitioning, in order
POST_GRAD_PIPELINES: dict[str, tuple[Pass, ...]] = {"cpu": (LayOutWeights(),)}


def cached_pipeline(pipeline: Sequence[Pass]) -> tuple[Pass, ...]:
    """Forward passes for a graph whose low weights live across calls."""
    return tuple(
        step
        for base in pipeline
        for step in ((CacheWeights(), base) if isinstance(base, Verify) else (base,))
    )


def export_pipeline(keep: KeepWeights, fold: FoldWeights) -> tuple[Pass, ...]:
    """The forward passes for a program that is stored together with its weights."""
    after: dict[type[Pass], Pass] = {Constrain: keep, InsertCasts: fold}
    return tuple(step for base in PIPELINE for step in (base, after.get(type(base))) if step is not None)


def replay_pipeline(replay: Replay, pipeline: Sequence[Pass] = PIPELINE) -> tuple[Pass, ...]:
    """The forward passes where a plan says what :class:`Place` would choose."""
    return tuple(replay if isinstance(step, Place) else step for step in pipeline)
