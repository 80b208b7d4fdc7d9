"""The compiler passes, one per file, and the one table that orders them.

Folders say which graph a pass runs on:

``forward/``, the captured graph, before AOTAutograd makes a backward of it:

================= =====================================================================
pin_dtypes        write down the dtypes that the program only implies
classify          op lists and user rules: low, fp32, promote, follow, keep
constrain         hazards that lists cannot see; storages that must not be re-typed
keep_weights      (export) ops whose weights do not fit into the low dtype
place             the precision of every value
place_by_harm     (with harm) the precision of every value, by time and measured accuracy
replay            (with a plan) the precision of every value, as the plan has it
insert_casts      casts, each once per value and dtype
cache_weights     (inference) low copies of weights are inputs, and their casts go
fold_weights      (export) weights are stored as they are read, and their casts go
fuse_casts        conversions that do nothing go
verify            it runs, and its dtypes are the planned and the promised ones
place_fp8_linears (policy fp8, no gradients) which matmuls run in fp8
quantise_linears  (policy fp8, no gradients) operands are scaled and converted, and matmuls read them
mark_fp8          (policy fp8, training) the matmuls that may run in fp8
================= =====================================================================

``joint/``, Inductor's joint graph, forward and backward together:

================= =====================================================================
scale_backward    (fp16) loss scaling and finite checks inside the backward
place_fp8         (policy fp8) which matmuls run in fp8, forward and backward
quantise_matmuls  (policy fp8) operands are scaled and converted once, and matmuls read them
gemm_epilogue     (CUDA) a matmul returns fp32 where the graph does
keep_statistics   norms keep what their backward needs in fp32
lay_out_gradients (CPU) gradients of convolutions in their weights' layout
================= =====================================================================

``partitioned/``, Inductor's forward, backward and inference graphs, each by itself:

==================== ==================================================================
lay_out_weights      (CPU) convolutions' weights are cast channels last
==================== ==================================================================

What a pass is, and the runner, are in ``base.py``; what a pass on Inductor's graphs may read of a node, in
``keyed.py``. Not here: op lists (``amp_fx.policy``), costs and the cut
(``amp_fx.placement``). Open ``forward/place.py`` for the heart of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amp_fx.passes.base import Pass, PassContext, PassResult, run_in_order, run_keyed, run_passes
from amp_fx.passes.forward.cache_weights import CacheWeights
from amp_fx.passes.forward.classify import Classify
from amp_fx.passes.forward.constrain import Constrain
from amp_fx.passes.forward.fold_weights import FoldWeights
from amp_fx.passes.forward.fuse_casts import FuseCasts
from amp_fx.passes.forward.insert_casts import InsertCasts
from amp_fx.passes.forward.keep_weights import KeepWeights
from amp_fx.passes.forward.mark_fp8 import MarkFp8
from amp_fx.passes.forward.pin_dtypes import PinDtypes
from amp_fx.passes.forward.place import Place
from amp_fx.passes.forward.place_by_harm import PlaceByHarm
from amp_fx.passes.forward.place_fp8_linears import PlaceFp8Linears
from amp_fx.passes.forward.quantise_linears import QuantiseLinears
from amp_fx.passes.forward.replay import Replay
from amp_fx.passes.forward.verify import Verify
from amp_fx.passes.joint.gemm_epilogue import GemmEpilogue
from amp_fx.passes.joint.keep_statistics import KeepStatistics
from amp_fx.passes.joint.lay_out_gradients import LayOutGradients
from amp_fx.passes.joint.place_fp8 import PlaceFp8
from amp_fx.passes.joint.quantise_matmuls import QuantiseMatmuls
from amp_fx.passes.joint.scale_backward import ScaleBackward
from amp_fx.passes.joint.separate_outputs import SeparateOutputs
from amp_fx.passes.partitioned.lay_out_weights import LayOutWeights
from amp_fx.placement.fp8_device import Fp8Device

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
    "KeepStatistics",
    "KeepWeights",
    "LayOutGradients",
    "LayOutWeights",
    "MarkFp8",
    "Pass",
    "PassContext",
    "PassResult",
    "PinDtypes",
    "Place",
    "PlaceByHarm",
    "PlaceFp8",
    "PlaceFp8Linears",
    "QuantiseLinears",
    "QuantiseMatmuls",
    "Replay",
    "ScaleBackward",
    "SeparateOutputs",
    "Verify",
    "cached_pipeline",
    "export_pipeline",
    "fp8_pipeline",
    "replay_pipeline",
    "run_in_order",
    "run_keyed",
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
JOINT_PIPELINES: dict[str, tuple[Pass, ...]] = {
    "cuda": (SeparateOutputs(), GemmEpilogue(), KeepStatistics()),
    "cpu": (SeparateOutputs(), LayOutGradients(), KeepStatistics()),
}

#: device type -> passes on Inductor's graphs after partitioning, in order
POST_GRAD_PIPELINES: dict[str, tuple[Pass, ...]] = {"cpu": (LayOutWeights(),)}


def cached_pipeline(pipeline: Sequence[Pass]) -> tuple[Pass, ...]:
    """Forward passes for a graph whose low weights live across calls."""
    return tuple(
        step
        for base in pipeline
        for step in ((CacheWeights(), base) if isinstance(base, Verify) else (base,))
    )


def fp8_pipeline(
    pipeline: Sequence[Pass], here: Fp8Device | None = None, *, planned: bool = False
) -> tuple[Pass, ...]:
    """Forward passes for a graph whose low matmuls may run in fp8.

    Args:
        pipeline: without fp8.
        here: the device, for a graph without gradients; None: the joint graph is where matmuls are chosen.
        planned: a plan that is followed says what runs in fp8.
    """
    if here is None:
        return (*pipeline, MarkFp8(planned))
    return _with(pipeline, {FuseCasts: (PlaceFp8Linears(here), QuantiseLinears())})


def export_pipeline(keep: KeepWeights, fold: FoldWeights, here: Fp8Device | None = None) -> tuple[Pass, ...]:
    """The forward passes for a program that is stored together with its weights.

    Args:
        keep: weights that stay fp32.
        fold: weights that are stored low.
        here: a device, for a program whose low matmuls may run in fp8.
    """
    if here is None:
        return _with(PIPELINE, {Constrain: (keep,), InsertCasts: (fold,)})
    # what is folded leaves casts
    return _with(fp8_pipeline(PIPELINE, here), {Constrain: (keep,), QuantiseLinears: (fold, FuseCasts())})


def _with(pipeline: Sequence[Pass], after: Mapping[type[Pass], Sequence[Pass]]) -> tuple[Pass, ...]:
    """A pipeline with more passes, each after one of a class."""
    return tuple(step for base in pipeline for step in (base, *after.get(type(base), ())))


def replay_pipeline(step_in: Replay | PlaceByHarm, pipeline: Sequence[Pass] = PIPELINE) -> tuple[Pass, ...]:
    """The forward passes where a plan, or measured harm, says what :class:`Place` would choose."""
    return tuple(step_in if isinstance(step, Place) else step for step in pipeline)
