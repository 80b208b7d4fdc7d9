"""Options together: every pair of values of every two options, in as few rows as a greedy search finds.

A new option, or a new value of one, joins by its entry in :data:`AXES`; what contradicts another value has a line in
:data:`EXCLUDED`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import enable_grad, inference_mode, no_grad

from amp_fx.compiler.settings import OptionNames
from amp_fx.passes import OPTIONAL, PLANNED
from support.models.for_options import MODELS

#: the name of a value for every axis
Row = dict[str, str]
Pair = frozenset[tuple[str, str]]

_RULES = [{"module": "first", "precision": "fp32"}, {"op": "softmax", "precision": "low"}]

#: what an option leaves out where it is not given
LEFT_OUT = None

#: axis -> name of a value -> the value. The first is the default.
AXES: Mapping[str, Mapping[str, Any]] = {
    "model": MODELS,
    "gradients": {"train": enable_grad, "no_grad": no_grad, "inference_mode": inference_mode},
    "weights": {"auto": LEFT_OUT, "cast": "cast", "cache": "cache", "freeze": "freeze"},
    # files of a CPU that multiplies in fp8, which is emulated, and of one that gains by int8 and not by 16 bits
    "profile": {"auto": LEFT_OUT, "off": "off", "with fp8": "a file", "int8 alone": "a file"},
    "policy": {
        "autocast": LEFT_OUT,
        "autocast, rules": {"base": "autocast", "rules": _RULES},
        "fast": "fast",
        "fast, rules": {"base": "fast", "rules": _RULES},
        "fp8": "fp8",
        "fp8, rules": {"base": "fp8", "rules": _RULES},
        "int8": "int8",
        "int8, rules": {"base": "int8", "rules": _RULES},
    },
    "fp8": {"auto": LEFT_OUT, "rowwise": "rowwise"},
    "activation_memory": {"keep": LEFT_OUT, "int8": "int8"},
    "numerics": {"compiled": LEFT_OUT, "eager": "eager"},
    "dtype": {"auto": LEFT_OUT, "bfloat16": "bfloat16", "float16": "float16"},
    "scaler": {"none": LEFT_OUT, "default": "default"},
    # of a report, or of a calibration with the scales of values in int8
    "plan": {"none": LEFT_OUT, "replayed": "a file", "measured": "a file"},
    "disable_passes": {
        "none": LEFT_OUT,
        "deciding": PLANNED,
        "others": [name for name in OPTIONAL if name not in PLANNED],
    },
    # torch takes a mode or options, not both: a mode among options is what it stands for
    "mode": {"none": LEFT_OUT, "reduce-overhead": torch._inductor.list_mode_options("reduce-overhead")},
    "dynamic": {"None": None, "True": True, "False": False},
    "autocast": {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16},
}

DEFAULTS: Row = {axis: next(iter(values)) for axis, values in AXES.items()}

#: axes that are keys of ``options``
_OPTIONS = OptionNames.__annotations__.keys() & AXES.keys()


@dataclass(frozen=True)
class Excluded:
    """Values that do not go together."""

    values: Mapping[str, Sequence[str]]  # axis -> names; a row that has one of each is left out
    reason: str
    is_error: bool = False  # they are refused with an OptionsError, which a test asks for


_FP8 = ("fp8", "fp8, rules")

EXCLUDED = (
    Excluded(
        {"numerics": ["eager"], "policy": [*_FP8, "int8", "int8, rules"]},
        "eager torch.autocast has nothing below 16 bits",
        is_error=True,
    ),
    Excluded(
        {"numerics": ["eager"], "activation_memory": ["int8"]},
        "the backward reads what eager torch.autocast does not round",
        is_error=True,
    ),
    Excluded({"numerics": ["eager"], "weights": ["freeze"]}, "folded values round otherwise", is_error=True),
    Excluded(
        {"plan": ["measured"], "gradients": ["train"]}, "scales are measured for int8, without gradients"
    ),
    Excluded({"plan": ["measured"], "profile": ["with fp8"]}, "that CPU has no rate for int8"),
    Excluded(
        {"plan": ["measured"], "policy": [name for name in AXES["policy"] if not name.startswith("int8")]},
        "scales are measured for int8",
    ),
    Excluded({"plan": ["replayed", "measured"], "disable_passes": ["deciding"]}, "a plan decides"),
    Excluded({"scaler": ["default"], "autocast": ["float16"]}, "the scaler is ignored there"),
    Excluded({"scaler": ["default"], "dtype": ["bfloat16"]}, "bf16 needs no loss scaling", is_error=True),
    Excluded(
        {"fp8": ["rowwise"], "policy": [name for name in AXES["policy"] if name not in _FP8]},
        "fp8= is about policy fp8",
        is_error=True,
    ),
)


def options_of(row: Row) -> dict[str, Any]:
    """The row's ``options``; files are still to be put in."""
    chosen = {axis: AXES[axis][row[axis]] for axis in AXES if axis in _OPTIONS}
    given = {axis: value for axis, value in chosen.items() if value is not LEFT_OUT}
    return {**given, **(AXES["mode"][row["mode"]] or {})}


def words(row: Row) -> str:
    """What the row has that is no default, for people."""
    chosen = [f"{axis} {name}" for axis, name in row.items() if name != DEFAULTS[axis]]
    return ", ".join(chosen) or "defaults"


def is_allowed(row: Mapping[str, str]) -> bool:
    """Whether a row, or a part of one, holds nothing that is excluded."""
    return not any(all(row.get(axis) in names for axis, names in each.values.items()) for each in EXCLUDED)


def allowed_pairs() -> set[Pair]:
    """Every two values of two axes that can stand in one row."""
    return {pair for pair in all_pairs() if _completed(dict(pair), set(), random.Random(0)) is not None}


def covering_rows(seed: int = 0) -> list[Row]:
    """Rows in which every allowed pair occurs; the first ones cover most, and other seeds give others."""
    left, rows, chance = allowed_pairs(), [], random.Random(seed)
    # in the order of the table: sets have none
    order = [pair for pair in all_pairs() if pair in left]
    while left:
        first = next(pair for pair in order if pair in left)
        row = _completed(dict(first), left, chance)
        assert row is not None, first
        left -= pairs_of(row)
        rows.append({axis: row[axis] for axis in AXES})
    return rows


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def sample(rows: Sequence[Row], size: int) -> list[Row]:
    """As many rows, each the one with the most pairs that those before it do not have."""
    left, chosen = set[Pair]().union(*map(pairs_of, rows)), []
    for _ in range(size):
        best = max(rows, key=lambda row: len(pairs_of(row) & left))
        left -= pairs_of(best)
        chosen.append(best)
    return chosen


def _completed(part: Row, left: set[Pair], chance: random.Random) -> Row | None:
    """A whole row that holds a part; each value is the one that covers most of what is left. None: there is none."""
    if not is_allowed(part):
        return None
    axis = next((axis for axis in AXES if axis not in part), None)
    if axis is None:
        return part

    def gain(name: str) -> int:
        return sum(frozenset([(axis, name), other]) in left for other in part.items())

    names = chance.sample([*AXES[axis]], len(AXES[axis]))
    for name in sorted(names, key=gain, reverse=True):
        row = _completed({**part, axis: name}, left, chance)
        if row is not None:
            return row
    return None


def all_pairs() -> Iterator[Pair]:
    """Every two values of two axes."""
    for one, other in itertools.combinations(AXES, 2):
        for names in itertools.product(AXES[one], AXES[other]):
            yield frozenset(zip((one, other), names, strict=True))
