"""The compiler passes, and their order on each graph, by plain ``if``s.

Folders say which graph a pass runs on: ``forward/``, the captured graph, before AOTAutograd makes a backward of it;
``inductor/``, Inductor's joint graph, forward and backward together, or what it is partitioned into; ``levels/``,
captured and joint graphs. A pass changes what its own pattern finds: no order says more of devices.

What a pass is, the runner, and what a pass on Inductor's graphs may read of a node are in ``base.py``. Not here: op
lists (``amp_fx.precision.policy``), costs and the cut (``amp_fx.precision.placement``). Open ``forward/place.py`` for
the heart of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from amp_fx.errors import OptionsError, one_of
from amp_fx.passes.base import Note, Notes, Pass, PassContext, PassResult, run_in_order, run_passes
from amp_fx.passes.forward.after_casts import FuseCasts, Verify
from amp_fx.passes.forward.choose_attention import ChooseAttention
from amp_fx.passes.forward.classify import Classify, PinDtypes
from amp_fx.passes.forward.constrain import Constrain
from amp_fx.passes.forward.insert_casts import InsertCasts
from amp_fx.passes.forward.lower_transforms import LowerTransforms
from amp_fx.passes.forward.place import Place, Replay
from amp_fx.passes.forward.place_by_sensitivity import PlaceBySensitivity
from amp_fx.passes.forward.weights import KeepWeights, MarkCopies, MarkStored
from amp_fx.passes.inductor.attend import Attend
from amp_fx.passes.inductor.casts import (
    KeepStatistics,
    LayOutGradients,
    LayOutWeights,
    SeparateOutputs,
    WriteCasts,
)
from amp_fx.passes.inductor.gemm_epilogue import GemmEpilogue
from amp_fx.passes.inductor.keep_less import KeepLess
from amp_fx.passes.inductor.packed import CallPacked, HoldPacked, ReadScales
from amp_fx.passes.inductor.scale_backward import ScaleBackward
from amp_fx.passes.levels.mark_matmuls import MarkMatmuls
from amp_fx.passes.levels.place_levels import PlaceLevels
from amp_fx.passes.levels.quantise_matmuls import QuantiseMatmuls
from amp_fx.precision.policy import Policy
from amp_fx.precision.policy.table import device_row

__all__ = [
    "OPTIONAL",
    "OUTLINE",
    "PARTITIONED",
    "PASSES",
    "PLANNED",
    "Attend",
    "CallPacked",
    "ChooseAttention",
    "Classify",
    "Constrain",
    "FuseCasts",
    "GemmEpilogue",
    "HoldPacked",
    "InsertCasts",
    "KeepLess",
    "KeepStatistics",
    "KeepWeights",
    "LayOutGradients",
    "LayOutWeights",
    "LowerTransforms",
    "MarkCopies",
    "MarkMatmuls",
    "MarkStored",
    "Note",
    "Notes",
    "Pass",
    "PassContext",
    "PassResult",
    "PassSelection",
    "PinDtypes",
    "Place",
    "PlaceBySensitivity",
    "PlaceLevels",
    "QuantiseMatmuls",
    "ReadScales",
    "Replay",
    "ScaleBackward",
    "SeparateOutputs",
    "Verify",
    "WriteCasts",
    "captured_passes",
    "check_disabled",
    "joint_passes",
    "package_passes",
    "parse_disabled",
    "run_in_order",
    "run_passes",
]  # fmt: skip

#: name -> pass
PASSES: Mapping[str, type[Pass]] = {kind.name: kind for kind in Pass.__subclasses__()}

#: without these a graph is wrong, or not what its plan says
_NEEDED = (
    Attend, CallPacked, Classify, Constrain, HoldPacked, InsertCasts, KeepWeights, MarkMatmuls, MarkStored, PinDtypes,
    Place, PlaceBySensitivity, QuantiseMatmuls, Replay, ScaleBackward, Verify,
)  # fmt: skip
#: names of the passes that may be disabled, and of those in whose place a plan decides
OPTIONAL = tuple(sorted(name for name, kind in PASSES.items() if kind not in _NEEDED))
PLANNED = (ChooseAttention.name, LowerTransforms.name, PlaceLevels.name)

#: what a plan is matched with: calls and their classes
OUTLINE: tuple[Pass, ...] = (PinDtypes(), Classify())


@dataclass(frozen=True, kw_only=True)
class PassSelection:
    """Passes on a captured graph whose fields the caller fills in. None: the pass does not run."""

    #: in export, ops whose weights do not fit into the low dtype stay in fp32
    keep: KeepWeights | None = None
    #: in export, weights are stored as they are read
    store: MarkStored | None = None
    #: by a plan or by measured sensitivity, instead of by the policy alone
    place: PlaceBySensitivity | Replay | None = None
    #: without gradients, which matmuls run below 16 bits
    levels: PlaceLevels | None = None
    #: in training, which matmuls may run below 16 bits
    mark: MarkMatmuls | None = None
    #: low copies of weights live across calls
    caches_weights: bool = False


def parse_disabled(value: object) -> frozenset[str]:
    """The option ``disable_passes``; OptionsError for what is no list of names of passes that may be disabled."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise OptionsError(f"disable_passes must be a list of names of passes; got {value!r}.")
    for name in value:
        if name in PASSES and name not in OPTIONAL:
            raise OptionsError(
                f"disable_passes cannot have {name!r}: without that pass a graph is wrong, or not what its plan says; "
                f"valid: {', '.join(map(repr, OPTIONAL))}."
            )
        one_of("pass", OPTIONAL, name, "disable_passes")
    return frozenset(value)


def check_disabled(names: Collection[str], policy: Policy, *, is_planned: bool) -> None:
    """Raises OptionsError where a plan that is followed, or a rule, asks for what a disabled pass would do."""
    for name in sorted(names):
        asked = "a plan" if is_planned and name in PLANNED else ""
        if name == GemmEpilogue.name and any(rule.result is not None for rule in policy.rules):
            asked = "a rule with 'result'"
        if asked:
            raise OptionsError(f"disable_passes has {name!r}, and {asked} asks for it; drop one of the two.")


def captured_passes(selection: PassSelection) -> tuple[Pass, ...]:
    """The passes on a captured graph, in order."""
    passes: list[Pass] = [*OUTLINE, Constrain()]
    if selection.keep is not None:
        passes.append(selection.keep)
    passes.append(selection.place or Place(stored=selection.store is not None))
    if selection.store is None and not isinstance(selection.place, Replay):
        # a program is stored with the call as it is; a plan has the choice
        passes.append(ChooseAttention())
    passes += [InsertCasts(stored=selection.store is not None)]
    if selection.store is not None and selection.levels is None:
        passes.append(selection.store)
    passes.append(FuseCasts())
    if selection.levels is not None:
        results = selection.levels.results
        passes += [
            selection.levels,
            QuantiseMatmuls(joint=False, stored=selection.store is not None, results=results),
        ]
        if selection.store is not None:
            # after the copies that are stored were made; rows of tables that were widened may be cast again
            passes += [selection.store, FuseCasts()]
    if selection.caches_weights:
        passes.append(MarkCopies())
    if selection.store is None:
        passes.append(LowerTransforms(replays=isinstance(selection.place, Replay)))
    passes.append(Verify())
    if selection.mark is not None:
        passes.append(selection.mark)
    return tuple(passes)


def joint_passes(
    devices: Collection[str],
    numerics: str = "compiled",
    *,
    scale: ScaleBackward | None = None,
    levels: PlaceLevels | None = None,
    wide_results: tuple[str, ...] = (),
    attention: tuple[tuple[str, str], ...] = (),
    scores_at_once: int | None = None,
) -> tuple[Pass, ...]:
    """The passes on Inductor's joint graph, in order.

    ``wide_results`` are marked calls whose results a rule has in fp32, ``attention`` others with their implementation.
    Two products around a softmax are taken in blocks of heads in inference, with so many ``scores_at_once``.
    """
    passes: list[Pass] = [] if scale is None else [scale]
    if levels is not None:
        passes += [levels, QuantiseMatmuls()]
    is_measured = any(device_row(device).has_rates for device in devices)
    if is_measured:
        passes.append(SeparateOutputs())
    passes += [
        Attend(attention, scores_at_once),
        LayOutGradients(),
        GemmEpilogue(wide_results),
    ]
    if is_measured and numerics != "eager":
        # eager: bit for bit what the decompositions give, which do not know whether eager PyTorch rounds here
        passes.append(KeepStatistics())
    return tuple(passes)


#: the passes on each of Inductor's forward, backward and inference graphs, in order
PARTITIONED: tuple[Pass, ...] = (LayOutWeights(), CallPacked(), WriteCasts())


def package_passes(hold: HoldPacked) -> tuple[Pass, ...]:
    """The passes on Inductor's graphs of a package, in order. None leaves an op of amp_fx, which a package has not."""
    return hold, CallPacked(), WriteCasts()
