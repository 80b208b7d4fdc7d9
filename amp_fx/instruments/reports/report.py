"""The report: what ran in which precision, what the casts cost, and what to change.

A report is plans and a few counts. All it says is worked out from them: numbers here, words in ``text.py``. What is
compiled inside ``with amp_fx.record()`` has a report, too.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.instruments.reports import text
from amp_fx.instruments.reports.advice import Advice, advise, kept_casts, kept_data, kept_lines
from amp_fx.precision.plans.files import as_data, check_kind, decode_file, read_object, write_text
from amp_fx.precision.plans.plan import CastPlan, Cost, InputPlan, ModuleCasts, Plan, dtype_name
from amp_fx.precision.plans.plan_files import Diff, diff_plans
from amp_fx.precision.plans.reading import listen
from amp_fx.precision.plans.saved import SavedValue, largest
from amp_fx.viz import beside, dot, html, model
from amp_fx.viz.style import DTYPES
from amp_fx.viz.words import because

#: of a file; the version is bumped when the JSON form changes incompatibly
_HEADER = {"version": 1}
#: fields that JSON has as they are
_SAVED = ("plans", "title", "costs", "notes", "sensitivities", "modules", "device", "outside")
#: what :meth:`Report.save` writes
SUFFIXES = (".html", ".svg", ".png", ".dot", ".json", ".md")


def check_suffix(path: str | Path) -> None:
    """Raises AmpFxError for a file that :meth:`Report.save` does not write."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise AmpFxError(
            f"cannot write {path.name!r}; valid suffixes: {', '.join((*SUFFIXES, beside.SUFFIX))}."
            + did_you_mean(path.suffix.lower(), SUFFIXES)
        )


@dataclass
class Report:
    """The plans and counts of one program under amp_fx.

    Attributes:
        plans: one per graph; forward graphs, and the backward ones where they are known.
        title: what the report is about.
        costs: ``"amp_fx"`` and ``"torch.autocast"`` with the same results, forward and backward, where they are known.
        notes: advice that plans cannot give: what weights hold, and what never became a graph.
        sensitivities: forward graph -> call -> what rounding the call adds to the relative error of the gradient;
            None where it overflows.
        modules: casts by module, of both that ``costs`` compares, in the order of the program.
        device: type of the device that was planned for, ``"cpu"``; empty where only plans are known.
        outside: dtype -> FLOPs of matmuls in code that Dynamo leaves to eager, forward and backward; not of a target.
        measured: ``"sensitivity"``, or where ``sensitivities`` are errors of the call's own result, ``"error"``.
    """

    plans: list[Plan] = field(default_factory=list)
    title: str = ""
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[Advice] = field(default_factory=list)
    sensitivities: dict[str, dict[str, float | None]] = field(default_factory=dict)
    modules: list[ModuleCasts] = field(default_factory=list)
    device: str = ""
    outside: dict[str, int] = field(default_factory=dict)
    measured: str = "sensitivity"

    @property
    def plan(self) -> Plan:
        """The plan of the only forward graph; AmpFxError where there are several, or none."""
        forward = [plan for plan in self.plans if plan.phase == "forward"]
        if len(forward) != 1:
            raise AmpFxError(
                f"the report has {len(forward)} forward graphs; take one from its plans, or replay all: "
                "report.save('report.json') and options={'plan': 'report.json'}."
            )
        return forward[0]

    def why(self, name: str) -> str:
        """Why a call of the only forward graph computes as it does, in words; KeyError if there is no such call."""
        return because(self.plan.node(name))

    @property
    def graph_breaks(self) -> list[str]:
        """Why Dynamo split the program, one line per break; last those that came before any operation."""
        ends = [plan.graph_break for plan in self.plans if plan.graph_break]
        return ends + [row.text for row in self.notes if row.kind == "graph break"]

    @property
    def advice(self) -> list[Advice]:
        """Changes that are worth making, most useful first."""
        return [*self.notes, *advise(self.plans)]

    @property
    def kept(self) -> dict[str, list[CastPlan]]:
        """The casts that are kernels of their own after fusion, by the reason why they are, largest first."""
        return kept_casts(self.plans)

    @property
    def largest_saved(self) -> list[SavedValue]:
        """What takes most of what is kept for the backward, ten rows: equal values of repeated blocks are one."""
        return largest(value for plan in self.plans for value in plan.saved_values)

    def shares(self) -> dict[str, dict[str, float]]:
        """Share of each dtype, :attr:`outside` included: ``{"bfloat16": {"flops": 0.98, "bytes": 0.6}}``.

        The bytes are those of results, in graphs.
        """
        flops: Counter[str] = Counter(self.outside)
        sizes: Counter[str] = Counter()
        for plan in self.plans:
            for node in plan.nodes:
                if node.computed is not None and node.dtype is not None:
                    flops[dtype_name(node.computed)] += node.flops
                    sizes[dtype_name(node.dtype)] += node.bytes
        all_flops, all_bytes = max(flops.total(), 1), max(sizes.total(), 1)
        return {
            dtype: {"flops": flops[dtype] / all_flops, "bytes": sizes[dtype] / all_bytes}
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
            casts, size = (sum(row[key] for row in known) for key in ("casts", "bytes"))
            found["torch.autocast"] = Cost(casts, size)
        return found

    @property
    def held(self) -> list[InputPlan]:
        """The low copies of weights that graphs without gradients keep across calls, each once, and their scales."""
        copies = (given for plan in self.plans for given in plan.inputs if given.copy_of)
        return list({(given.name, given.bytes): given for given in copies}.values())

    def __str__(self) -> str:
        head = [text.heading(self.title, self.plans)]
        if self.plans:
            head += [
                *text.verdict(self.plans, self.costs, self.device, self.notes),
                "",
                *text.share_lines(self.shares()),
                *text.outside_lines(self.outside, self.plans, self.notes),
            ]
            # in training there is no choice
            weights = dict.fromkeys(p.weights for p in self.plans if p.weights and not p.training)
            head += ["", *text.cost_lines(self.compared(), self.held, weights, is_measured=bool(self.costs))]
            head += text.saved_lines(self.plans)
        kept = kept_lines(self.kept)
        saved = self.largest_saved
        blocks = text.findings(self.plans, kept, self.graph_breaks, self.advice, saved, len(head))
        return text.screen(head, blocks)

    def __repr__(self) -> str:
        return f"<{text.heading(self.title, self.plans)}>"

    def table(self) -> str:
        """Calls by op and dtype, forward and backward together, most frequent op first."""
        calls: dict[str, Counter[str]] = {}
        for plan in self.plans:
            for op, dtypes in plan.ops_by_dtype().items():
                calls.setdefault(op, Counter()).update(dtypes)
        found = {dtype for row in calls.values() for dtype in row}
        columns = [dtype for dtype in DTYPES if dtype in found] + sorted(found.difference(DTYPES))
        return text.table(columns, dict(sorted(calls.items(), key=lambda item: (-item[1].total(), item[0]))))

    def to_markdown(self) -> str:
        """First screen, calls by op and dtype, all advice, largest saved values, and every cast, as Markdown."""
        return text.markdown(self.title, str(self), self.table(), self.advice, self.largest_saved, self.plans)

    def _repr_html_(self) -> str:
        calls = f"<summary>calls by op and dtype</summary><pre>{escape(self.table())}</pre>"
        beside = self._beside() if self.modules else ""
        return f"<pre>{escape(str(self))}</pre><details>{calls}</details>{beside}"

    def diff(self, other: Report) -> Diff:
        """The differences of ``other`` from this report.

        Casts are counted as on the first screens, in what Inductor is given; by the plans alone, as
        :func:`amp_fx.record` has them, where one of the two reports knows no more.
        """
        found = diff_plans(self.plans, other.plans)
        if not (self.costs and other.costs):
            return found
        old, new = self.costs["amp_fx"], other.costs["amp_fx"]
        return replace(found, casts=(old.casts, new.casts), cast_bytes=(old.cast_bytes, new.cast_bytes))

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form: the data, and under ``"summary"`` what the first screen says."""
        summary = {
            "shares": self.shares(),
            "costs": self.compared(),
            "held_bytes": sum(given.bytes for given in self.held),
            "advice": self.advice,
            "graph_breaks": self.graph_breaks,
            "kept": kept_data(self.kept),
            "largest_saved": self.largest_saved,
        }
        saved = {name: getattr(self, name) for name in _SAVED}
        if not self.sensitivities:
            del saved["sensitivities"]
        return as_data({**_HEADER, "summary": summary, **saved})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Reads what :meth:`to_dict` wrote; AmpFxError where it is something else."""
        check_kind(cls, data, AmpFxError)
        # an older report has not all of them
        found = {name: data[name] for name in (*_HEADER, *_SAVED) if name in data}
        return decode_file(cls, found, AmpFxError, _HEADER, "title", "plans", "costs", "notes")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a report that :meth:`save` wrote as ``.json``; AmpFxError where that cannot be read, or is none."""
        return read_object(path, "a report", cls.from_dict, AmpFxError)

    def save(
        self, path: str | Path, *, against: Report | None = None, depth: int | Literal["all"] | None = None
    ) -> Path:
        """Writes the report, and returns the path; the suffix says how.

        Args:
            path: ``.html`` the picture, to be opened in a browser; ``.svg``, ``.png`` and ``.dot`` the picture
                as it is at first, by Graphviz; ``.beside.svg`` casts by module beside torch.autocast's;
                ``.json`` what :meth:`load` reads; ``.md`` text.
            against: an earlier report: pictures mark what changed since.
            depth: how many levels of modules a picture shows; the modules of the last level are boxes with the numbers
                of calls by dtype and of casts. By default each graph is as deep as it has at most 24 boxes. ``"all"``
                opens everything; equal blocks still are one box.

        Raises:
            AmpFxError: another suffix or depth, Graphviz's ``dot`` is missing for ``.svg`` and ``.png``, or there is no
                comparison for ``.beside.svg``.
        """
        check_suffix(path := Path(path))
        suffix = path.suffix.lower()
        if path.name.endswith(beside.SUFFIX):
            write_text(path, self._beside())
        elif suffix == ".json":
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
        elif suffix == ".md":
            write_text(path, self.to_markdown())
        elif suffix == ".html":
            write_text(path, html.render(model.drawing(self, against, depth)))
        else:
            dot.write(model.drawing(self, against, depth), path)
        return path

    def _beside(self) -> str:
        if not self.modules:
            raise AmpFxError(
                "the report compares nothing: amp_fx.explain knows what torch.autocast would cast, amp_fx.record and"
                " reports of older versions do not."
            )
        return beside.render(model.drawing(self))


@dataclass(eq=False)
class Recording:
    """The result of :func:`record`: plans of compiled graphs, in order; the backward is in :func:`amp_fx.explain`."""

    plans: list[Plan] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """One report per compiled graph. ``Report(recording.plans)`` is one of all."""
        return [Report([plan]) for plan in self.plans]


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Collects the plan of every graph that amp_fx compiles inside the block, in any thread."""
    recording = Recording()
    with listen(recording.plans.append):
        yield recording
