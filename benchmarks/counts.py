"""What mixed precision costs, counted, not timed: casts, bytes moved, bytes saved for backward, kernels.

    python -m benchmarks.counts [--only NAME ...] [--arms NAME ...] [--modes MODE ...] [--json FILE]
                                [--target cuda:h100]

Every arm compiles through Inductor up to and including fusion, where counts are exact and free of noise; no
code is generated, so nothing has to be compiled or timed. What each number is, is said at :class:`Counts`. The GPU of
a ``--target`` need not be in the machine.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import Lowered, lower_with_inductor, program_outputs, replace_inner_compile, size_hint
from amp_fx.errors import FallbackWarning, OptionsError, TargetError
from amp_fx.instruments.reports.lowered import cost_of
from amp_fx.instruments.targets import TARGETS, find_target
from amp_fx.instruments.targets._torch import enter
from benchmarks.arms import ARMS, MODES, Arm, compile_for_target, prepare
from benchmarks.results import arguments, describe, write
from benchmarks.scaler import beside
from benchmarks.workloads import WORKLOADS, Workload, make


@dataclass(frozen=True)
class Counts:
    """Counts of one graph or of several.

    Attributes:
        conversions: of one floating dtype to another in the final graph, in registers for the most part.
        conversion_bytes: what they would read and write if each were a kernel of its own.
        bytes_moved: Inductor's estimate of what all kernels read and write, after fusion.
        saved_bytes: storages that the forward keeps for the backward. Inputs, parameters and what the program
            returns are not counted, since they live on anyway, nor views of them.
        extern_kernels: calls of library kernels: matmuls, convolutions, attention.
        generated_kernels: kernels that Inductor would generate.
        casts: kernels that convert and move values and compute nothing.
        cast_bytes: what these kernels read and write.
    """

    conversions: int = 0
    conversion_bytes: int = 0
    bytes_moved: int = 0
    saved_bytes: int = 0
    extern_kernels: int = 0
    generated_kernels: int = 0
    casts: int = 0
    cast_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def kernels(self) -> int:
        return self.extern_kernels + self.generated_kernels


@dataclass
class Counter:
    """What was compiled inside :func:`counting`; a graph without a backward counts as a forward.

    Attributes:
        graphs: ``"forward"``, ``"backward"`` or ``"inference"``, each with the lowered graph, in order.
    """

    forward: Counts = Counts()
    backward: Counts = Counts()
    graphs: list[tuple[str, Lowered]] = field(default_factory=list)
    _forwards: dict[int, fx.GraphModule] = field(default_factory=dict)

    @property
    def total(self) -> Counts:
        return self.forward + self.backward

    def inner_compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Counts one graph; stands in for Inductor's code generation."""
        lowered = lower_with_inductor(gm, example_inputs, **kwargs)
        cost = cost_of([lowered])
        counts = Counts(
            conversions=cost.casts,
            conversion_bytes=cost.cast_bytes,
            bytes_moved=lowered.bytes_moved,
            extern_kernels=lowered.extern_kernels,
            generated_kernels=len(lowered.generated),
            casts=cost.kernels or 0,
            cast_bytes=cost.kernel_bytes or 0,
        )
        # the two halves of one graph share its id
        graph_id: int = kwargs["graph_id"]
        if kwargs.get("is_backward"):
            self.backward += counts
            self.forward += Counts(saved_bytes=saved_bytes(self._forwards[graph_id], lowered.before))
            self.graphs.append(("backward", lowered))
        else:
            self.forward += counts
            self._forwards[graph_id] = lowered.before
            self.graphs.append(("inference" if kwargs.get("is_inference") else "forward", lowered))
        return lowered.call


@contextlib.contextmanager
def counting(counter: Counter | None = None) -> Iterator[Counter]:
    """Counts what is compiled inside the block, at the first call of a function and of its backward."""
    counter = Counter() if counter is None else counter
    with replace_inner_compile(counter.inner_compile):
        yield counter


def saved_bytes(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Bytes of the storages that a forward graph returns to its backward and that nobody else keeps.

    AOTAutograd gives a saved value the same name in both graphs. Storages are counted once, and whole: a
    saved slice keeps all of it alive.
    """
    others = {
        storage._cdata
        for node in (*forward.graph.find_nodes(op="placeholder"), *program_outputs(forward))
        if (storage := _storage(node)) is not None
    }
    returned = {node.name: node for node in forward.graph.output_node().all_input_nodes}
    storages: dict[int, int] = {}
    for node in backward.graph.find_nodes(op="placeholder"):
        # neither tangents, which the forward does not return, nor symbolic sizes
        if node.name in returned and (storage := _storage(returned[node.name])) is not None:
            storages[storage._cdata] = size_hint(storage.nbytes())
    return sum(size for storage, size in storages.items() if storage not in others)


def _storage(node: fx.Node) -> torch.UntypedStorage | None:
    value = node.meta.get("val")
    return value.untyped_storage() if isinstance(value, Tensor) else None


#: what counts for a target take for granted, as nothing runs
ASSUMED = (
    "16-bit attention without a mask runs in FlashAttention, other attention in the memory-efficient kernel",
    "matmuls are not padded (Inductor would time them on the card)",
    "nothing is tuned on the card",
    "programs are traced without autocast: where a program reads a dtype, it reads that of the fp32 program",
)

#: what is counted unless asked for more
_DEFAULT = ("fp32", "autocast", "bf16", "amp_fx", "off", "fast")


@dataclass(frozen=True)
class Row:
    """The counts of one workload, arm and mode.

    Attributes:
        beside: what a loss scaler does in a step outside the graphs; on a GPU.
        notes: amp_fx's fallbacks and graph breaks: reasons that the row does not measure what its name says.
    """

    workload: str
    arm: str
    mode: str
    forward: Counts
    backward: Counts
    beside: Counts = Counts()
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Counts:
        return self.forward + self.backward + self.beside


def count(workload: Workload, arm: Arm, mode: str, device: str = "cpu") -> tuple[Row, Counter]:
    """Counts one workload, arm and mode on a device or the target of this process; also the graphs behind the counts.

    Leaves the workload's model as it was.
    """
    counter = Counter()
    if mode == "inference" and arm.backend == "amp_fx":
        # counted with the casts of the weights, as autocast has them in each call
        arm = replace(arm, options={"weights": "cast", **(arm.options or {})})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        if device in TARGETS:
            compile_for_target(workload, arm, mode, counter.inner_compile)
        else:
            with counting(counter):
                result = prepare(workload, arm, mode, device).forward()
                if mode == "training":
                    result.backward()
            torch._dynamo.reset()
    notes = tuple(str(w.message) for w in caught if issubclass(w.category, FallbackWarning))
    scaling = Counts()
    if arm.scaler and device != "cpu":
        sizes = [parameter.numel() for parameter in workload.model.parameters()]
        kernels, moved = beside(arm.backend == "amp_fx", sizes)
        scaling = Counts(extern_kernels=kernels, bytes_moved=moved)
    return Row(workload.name, arm.name, mode, counter.forward, counter.backward, scaling, notes), counter


def _columns(counts: Counts) -> dict[str, float]:
    return {
        "casts": counts.casts,
        "cast MB": counts.cast_bytes / 1e6,
        "moved MB": counts.bytes_moved / 1e6,
        "saved MB": counts.saved_bytes / 1e6,
        "kernels": counts.kernels,
        "conversions": counts.conversions,
    }


def _cell(value: float, reference: float | None) -> str:
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    if reference is None:
        return number
    if not reference:
        return f"{number}    =" if value == reference else f"{number}    +"
    return f"{number} {value / reference:.3f}"


def table(rows: Sequence[Row], mode: str) -> str:
    """One mode: a line per workload and count, a column per arm, each with its ratio to autocast or to the first."""
    rows = [row for row in rows if row.mode == mode]
    arms = list(dict.fromkeys(row.arm for row in rows))
    base = "autocast" if "autocast" in arms else arms[0] if arms else ""
    lines = [f"{mode:28}" + "".join(f"{arm:>18}" for arm in arms)]
    for workload in dict.fromkeys(row.workload for row in rows):
        by_arm = {row.arm: _columns(row.total) for row in rows if row.workload == workload}
        for column in _columns(Counts()):
            if mode != "training" and column == "saved MB":
                continue
            cells = ""
            for arm in arms:
                if arm not in by_arm:
                    cells += f"{'-':>18}"
                    continue
                reference = by_arm[base][column] if arm != base and base in by_arm else None
                cells += f"{_cell(by_arm[arm][column], reference):>18}"
            lines.append(f"{workload:18}{column:10}{cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks.counts", __doc__)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=_DEFAULT, metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--target", metavar="NAME", help=f"instead of a device: {', '.join(TARGETS)}")
    args = parser.parse_args(argv)

    device = args.device
    if args.target:
        try:
            device = find_target(args.target).name
            enter(device)
        except TargetError as error:
            parser.error(str(error))
    header = describe(device)
    if args.target:
        header["assumed"] = ASSUMED
    for key, value in header.items():
        print(f"{key}: {'; '.join(value) if isinstance(value, tuple) else value}")
    rows: list[Row] = []
    failed: list[str] = []
    for name in args.only:
        workload = make(name)
        for mode in args.modes:
            for arm in args.arms:
                print(f"{name} {mode} {arm}", file=sys.stderr)
                try:
                    rows.append(count(workload, ARMS[arm], mode, device)[0])
                except OptionsError as error:
                    print(f"  skipped: {error}", file=sys.stderr)
                except Exception as error:  # the other rows are worth having
                    failed.append(f"{name} {mode} {arm}: {error!r}")
    for mode in args.modes:
        print(f"\n{table(rows, mode)}")
    for row in rows:
        for note in row.notes:
            print(f"note: {row.workload} {row.mode} {row.arm}: {note}")
    for line in failed:
        print(f"failed: {line}")
    if args.json:
        write(args.json, header, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
