"""Commands about machines: env, profile, targets."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

import torch

from amp_fx.cli.inputs import paint, say, writable
from amp_fx.cli.making_commands import number
from amp_fx.cli.report_commands import add_command
from amp_fx.instruments.environment import environment
from amp_fx.instruments.targets import TARGETS
from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.measuring import measure
from amp_fx.precision.placement.profile import DEVICE_TYPES, DeviceProfile


def add_to(commands: Any) -> None:
    """Adds the commands of this file."""
    add_command(commands, env, "--json")
    add_command(commands, targets, "--json")

    add = add_command(commands, profile, "--json")
    add("-o", "--output", metavar="FILE", help="default: amp_fx_DEVICE.json; with --json: nowhere")
    add("--device", choices=DEVICE_TYPES, help="default: cuda where there is a device, else cpu")
    add(
        "--seconds",
        type=_seconds,
        default=3.0,
        metavar="S",
        help="how long to measure (default: %(default)s)",
    )


def env(args: argparse.Namespace) -> None:
    """Say what this machine and torch can do, and what amp_fx will therefore do. Paste it into a bug report.

    Nothing is measured: rates are those of the built-in table (see the command profile).

    Examples:
      %(prog)s
      %(prog)s --json | jq .cpu
    """
    found = environment()
    print(json.dumps(found.to_dict()) if args.json else paint(str(found), sys.stdout))


def profile(args: argparse.Namespace) -> None:
    """Measure this machine's matmul rates, memory bandwidth and kernel launch cost.

    The backend weighs casts against faster arithmetic with these numbers. By default it takes them from a
    built-in table, so that all runs and ranks decide alike; give it the written file where the table is wrong
    about your machine. Leave the machine idle meanwhile.

    Examples:
      %(prog)s
      %(prog)s --device cuda --seconds 10 -o h200.json
      %(prog)s --json | jq .peak
    """
    writable(args.output)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    measured = measure(device, args.seconds, say)
    output = args.output
    if args.json:
        print(measured.to_json())
    else:
        output = output or f"amp_fx_{device}.json"
        table = builtin(device)
        print(f"{measured.device_type}: {table.name}\n")
        rows = [
            ("", "measured", "built-in"),
            *((f"matmul {dtype}", _rate(measured, dtype), _rate(table, dtype)) for dtype in measured.peak),
            ("memory", f"{measured.bandwidth / 1e9:.1f} GB/s", f"{table.bandwidth / 1e9:.1f} GB/s"),
            ("kernel launch", f"{measured.launch * 1e6:.1f} us", f"{table.launch * 1e6:.1f} us"),
        ]
        print("\n".join(f"{name:<22}{here:>36}{there:>36}" for name, here, there in rows))
    if output:
        measured.save(output)
        tell = say if args.json else print
        tell(f'wrote {output}; use it with options={{"profile": "{output}"}}')


def _seconds(text: str) -> float:
    return number(text, math.ulp(0.0), "a positive number")


def _rate(profile: DeviceProfile, dtype: str) -> str:
    if dtype not in profile.peak:
        return "none"
    ratio = profile.peak[dtype] / profile.peak["float32"]
    return f"{profile.peak[dtype] / 1e9:.1f} GFLOP/s ({ratio:5.2f} x float32)"


def targets(args: argparse.Namespace) -> None:
    """List the GPUs that need not be in this machine.

    Memory, bandwidth and rates are those that the vendor has published; the cost model counts on 0.8 of them. How
    attention runs, padding and tuning are assumed; see docs/targets.md.

    Examples:
      %(prog)s
      %(prog)s --json | jq '.[].name'
    """
    found = TARGETS.values()
    if args.json:
        facts = [
            {"name": t.name, "architecture": t.architecture, "profile": t.profile.to_dict()} for t in found
        ]
        print(json.dumps(facts))
        return
    line = "{:<18}{:<14}{:<5}{:<8}{:<11}{:<13}{}".format
    head = line("target", "architecture", "SMs", "memory", "bandwidth", "float32", "bfloat16")
    print(paint(head, sys.stdout))
    for target in found:
        gpu = target.gpu
        rates = (f"{rate:.0f} TFLOP/s" for rate in (gpu.float32, gpu.bfloat16))
        memory = f"{gpu.memory} GB", f"{gpu.bandwidth:.0f} GB/s"
        print(line(target.name, target.architecture, gpu.sms, *memory, *rates))
