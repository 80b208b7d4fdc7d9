"""The order of the passes on each graph."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from typing import Any

import expecttest

from amp_fx import passes
from amp_fx.passes import PassSelection, captured_passes, joint_passes, package_passes
from amp_fx.precision.policy.levels import LEVELS

BELOW = passes.PlaceLevels(LEVELS["rowwise"], "cuda")
EXPORT: dict[str, Any] = {"keep": passes.KeepWeights(()), "store": passes.MarkStored((), "tied")}
REPLAYED = PassSelection(place=passes.Replay({}), mark=passes.MarkMatmuls(planned=True))
ORDERS = {
    "default": captured_passes(PassSelection()),
    "inference": captured_passes(PassSelection(caches_weights=True)),
    "inference below 16 bits": captured_passes(PassSelection(levels=BELOW, caches_weights=True)),
    "export": captured_passes(PassSelection(**EXPORT)),
    "export below 16 bits": captured_passes(PassSelection(**EXPORT, levels=BELOW)),
    "plan, training below 16 bits": captured_passes(REPLAYED),
    "sensitivity": captured_passes(PassSelection(place=passes.PlaceBySensitivity({}))),
    "joint": joint_passes({"cpu", "cuda"}),
    "joint, fp16 below 16 bits": joint_passes({"cuda"}, scale=passes.ScaleBackward(0), levels=BELOW),
    "joint, eager": joint_passes({"cpu"}, "eager"),
    "joint, mps": joint_passes({"mps"}),
    "kept in fewer bits": (passes.KeepLess(),),
    "partitioned": passes.PARTITIONED,
    "fused": (passes.ReadScales(),),
    "package": package_passes(passes.HoldPacked()),
}


def test_the_order_of_the_passes() -> None:
    lines = [f"{case}: {', '.join(step.name for step in steps) or 'none'}" for case, steps in ORDERS.items()]
    text = [textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    expecttest.assert_expected_inline(
        "\n".join(text),
        """\
default: pin-dtypes, classify, constrain, place, choose-attention, insert-casts, fuse-casts,
  lower-transforms, verify
inference: pin-dtypes, classify, constrain, place, choose-attention, insert-casts, fuse-casts,
  mark-copies, lower-transforms, verify
inference below 16 bits: pin-dtypes, classify, constrain, place, choose-attention, insert-casts,
  fuse-casts, place-levels, quantise-matmuls, mark-copies, lower-transforms, verify
export: pin-dtypes, classify, constrain, keep-weights, place, insert-casts, mark-stored, fuse-casts,
  verify
export below 16 bits: pin-dtypes, classify, constrain, keep-weights, place, insert-casts,
  fuse-casts, place-levels, quantise-matmuls, mark-stored, fuse-casts, verify
plan, training below 16 bits: pin-dtypes, classify, constrain, replay, insert-casts, fuse-casts,
  lower-transforms, verify, mark-matmuls
sensitivity: pin-dtypes, classify, constrain, place-by-sensitivity, choose-attention, insert-casts,
  fuse-casts, lower-transforms, verify
joint: separate-outputs, attend, lay-out-gradients, gemm-epilogue, keep-statistics
joint, fp16 below 16 bits: scale-backward, place-levels, quantise-matmuls, separate-outputs, attend,
  lay-out-gradients, gemm-epilogue, keep-statistics
joint, eager: separate-outputs, attend, lay-out-gradients, gemm-epilogue
joint, mps: attend, lay-out-gradients, gemm-epilogue
kept in fewer bits: keep-less
partitioned: lay-out-weights, call-packed, write-casts
fused: read-scales
package: hold-packed, call-packed, write-casts""",
    )


def test_every_pass_stands_in_an_order() -> None:
    found: set[type] = set()
    for folder in passes.__path__:
        for path in Path(folder).glob("*/*.py"):
            module = importlib.import_module(f"amp_fx.passes.{path.parent.name}.{path.stem}")
            kinds = [value for value in vars(module).values() if isinstance(value, type)]
            own = [kind for kind in kinds if kind.__module__ == module.__name__]
            found |= {kind for kind in own if issubclass(kind, passes.Pass)}
    assert found == {type(step) for steps in ORDERS.values() for step in steps}


def test_the_outline_is_where_the_pipeline_begins() -> None:
    assert ORDERS["default"][: len(passes.OUTLINE)] == passes.OUTLINE
