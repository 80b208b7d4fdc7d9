"""What a report holds, and what follows from it in numbers. The words are in ``report_text.py``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from amp_fx.plans.plan import CastPlan, Cost, InputPlan, ModuleCasts, Plan, dtype_name
from amp_fx.reports.advice import Advice, advise
from amp_fx.reports.kept_casts import kept_casts

__all__ = ["ReportData"]


@dataclass
class ReportData:
    """What amp_fx did to a program.

    Attributes:
        plans: one per graph; forward graphs, and the backward ones where they are known.
        title: what the report is about.
        costs: ``"amp_fx"`` and ``"torch.autocast"`` with the same results, forward and backward; empty where only
            plans are known.
        notes: advice that plans cannot give: what weights hold, and what never became a graph.
        sensitivities: forward graph -> call -> what rounding the call adds to the relative error of the gradient;
            None where
            it overflows. Empty unless sensitivity was given.
        modules: casts by module, of both that ``costs`` compares, in the order of the program.
        device: type of the device that was planned for, ``"cpu"``; empty where only plans are known.
        measured: what ``sensitivities`` are: ``"sensitivity"``, or in a comparison ``"error"``, that of the call's
            own result.
    """

    plans: list[Plan] = field(default_factory=list)
    title: str = ""
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[Advice] = field(default_factory=list)
    sensitivities: dict[str, dict[str, float | None]] = field(default_factory=dict)
    modules: list[ModuleCasts] = field(default_factory=list)
    device: str = ""
    measured: str = "sensitivity"

    @property
    def graph_breaks(self) -> list[str]:
        """Why Dynamo split the program, one line per break; last those that came before any operation."""
        ends = [plan.graph_break for plan in self.plans if plan.graph_break]
        return ends + [row.text for row in self.notes if row.kind == "graph break"]

    @property
    def advice(self) -> list[Advice]:
        """What is worth changing, most useful first."""
        return [*self.notes, *advise(self.plans)]

    @property
    def kept(self) -> dict[str, list[CastPlan]]:
        """The casts that are kernels of their own after fusion, by the reason why they are, largest first."""
        return kept_casts(self.plans)

    def shares(self) -> dict[str, dict[str, float]]:
        """Share of each dtype: ``{"bfloat16": {"flops": 0.98, "bytes": 0.6}}``, bytes of results."""
        flops: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for plan in self.plans:
            for node in plan.nodes:
                if node.computed is not None and node.dtype is not None:
                    flops[dtype_name(node.computed)] += node.flops
                    sizes[dtype_name(node.dtype)] += node.bytes
        return {
            dtype: {
                "flops": flops[dtype] / max(flops.total(), 1),
                "bytes": sizes[dtype] / max(sizes.total(), 1),
            }
            for dtype in sorted({*sizes, *flops}, key=lambda dtype: (-flops[dtype], -sizes[dtype]))
        }

    def compared(self) -> dict[str, Cost]:
        """Costs beside what torch.autocast would cost, measured if that was asked for, else of the plans."""
        if self.costs:
            return self.costs
        casts = [cast for plan in self.plans for cast in plan.casts]
        found = {"amp_fx": Cost(len(casts), sum(cast.bytes for cast in casts))}
        known = [plan.autocast for plan in self.plans if plan.autocast is not None]
        if known and len(known) == len(self.plans):
            found["torch.autocast"] = Cost(
                sum(row["casts"] for row in known), sum(row["bytes"] for row in known)
            )
        return found

    @property
    def held(self) -> list[InputPlan]:
        """The low copies of weights that graphs without gradients keep across calls, each once, and their scales."""
        copies = (given for plan in self.plans for given in plan.inputs if given.copy_of)
        return list({(given.name, given.bytes): given for given in copies}.values())

    def calls(self) -> tuple[list[str], list[tuple[str, Counter[str]]]]:
        """Dtypes in use, and for every op its calls by dtype."""
        calls: dict[str, Counter[str]] = {}
        for plan in self.plans:
            for op, dtypes in plan.ops_by_dtype().items():
                calls.setdefault(op, Counter()).update(dtypes)
        columns = [
            d
            for d in ("int8", "float8_e4m3fn", "float16", "bfloat16", "float32")
            if any(row[d] for row in calls.values())
        ]
        columns += sorted({d for row in calls.values() for d in row} - set(columns))
        return columns, sorted(calls.items(), key=lambda item: (-item[1].total(), item[0]))
