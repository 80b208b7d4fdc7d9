"""The command ``targets``: GPUs to explain and count for."""

from __future__ import annotations

import argparse
import json
import sys

from amp_fx.cli.command import Command, paint
from amp_fx.targets import TARGETS, Target

__all__ = ["TARGETS_COMMAND"]

_TEXT = """
Published numbers of GPUs that need not be in this machine, as the cost model has them before it takes off what is not
reached. Attention, padding and tuning are assumed; see docs/targets.md.

examples:
  %(prog)s
  %(prog)s --json | jq '.[].name'
"""

_COLUMNS = {
    "target": lambda target: target.name,
    "architecture": lambda target: target.architecture,
    "SMs": lambda target: str(target.gpu.sms),
    "memory": lambda target: f"{target.gpu.memory} GB",
    "bandwidth": lambda target: f"{target.gpu.bandwidth:.0f} GB/s",
    "float32": lambda target: f"{target.gpu.float32:.0f} TFLOP/s",
    "bfloat16": lambda target: f"{target.gpu.bfloat16:.0f} TFLOP/s",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace) -> int:
    targets = list(TARGETS.values())
    if args.json:
        print(json.dumps([_facts(target) for target in targets]))
        return 0
    rows = [list(_COLUMNS), *([cell(target) for cell in _COLUMNS.values()] for target in targets)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    head, *body = (
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
    )
    print(paint(head, sys.stdout))
    print("\n".join(line.rstrip() for line in body))
    return 0


def _facts(target: Target) -> dict[str, object]:
    return {"name": target.name, "architecture": target.architecture, "profile": target.profile.to_dict()}


TARGETS_COMMAND = Command("list the GPUs that need not be in this machine", _TEXT, _arguments, _run)
