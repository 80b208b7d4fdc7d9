"""The command ``profile``: measures a device and writes its rates to a file."""

from __future__ import annotations

import argparse
import math
import sys

import torch

from amp_fx.cli.command import Command
from amp_fx.placement.devices import builtin
from amp_fx.placement.measuring import measure
from amp_fx.placement.profile import DEVICE_TYPES, DeviceProfile

__all__ = ["PROFILE"]

_PROFILE_TEXT = """
The backend weighs casts against faster arithmetic with these numbers. By default it takes them from a
built-in table, so that all runs and ranks decide alike; give it the written file where the table is wrong
about your machine. Leave the machine idle meanwhile.

examples:
  %(prog)s
  %(prog)s --device cuda --seconds 10 -o h200.json
  %(prog)s --json | jq .peak
"""


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to write (default: amp_fx_DEVICE.json; with --json: nowhere)",
    )
    parser.add_argument(
        "--device", choices=DEVICE_TYPES, help="default: cuda where there is a device, else cpu"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=3.0, metavar="S", help="how long (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _profile(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    measured = measure(device, args.seconds, _progress)
    output = args.output
    if args.json:
        print(measured.to_json())
    else:
        output = output or f"amp_fx_{device}.json"
        print(_table(measured, builtin(device)))
    if output:
        measured.save(output)
        print(
            f'wrote {output}; use it with options={{"profile": "{output}"}}',
            file=sys.stderr if args.json else None,
        )
    return 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(measured: DeviceProfile, table: DeviceProfile) -> str:
    """Both profiles side by side; a low dtype's rate also relative to float32."""
    rows = [
        ("", "measured", "built-in"),
        *((f"matmul {dtype}", _rate(measured, dtype), _rate(table, dtype)) for dtype in measured.peak),
        ("memory", f"{measured.bandwidth / 1e9:.1f} GB/s", f"{table.bandwidth / 1e9:.1f} GB/s"),
        ("kernel launch", f"{measured.launch * 1e6:.1f} us", f"{table.launch * 1e6:.1f} us"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    title = f"{measured.device_type}: {table.name}"
    lines = (f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)
    return "\n".join((title, "", *lines))


def _rate(profile: DeviceProfile, dtype: str) -> str:
    if dtype not in profile.peak:
        return "none"
    ratio = profile.peak[dtype] / profile.peak["float32"]
    return f"{profile.peak[dtype] / 1e9:.1f} GFLOP/s ({ratio:5.2f} x float32)"


PROFILE = Command(
    "measure this machine's matmul rates, memory bandwidth and kernel launch cost",
    _PROFILE_TEXT,
    _profile_arguments,
    _profile,
)
