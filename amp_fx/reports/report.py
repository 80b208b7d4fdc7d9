"""The report: what ran in which precision, what the casts cost, and what to change.

    report = amp_fx.explain(model, batch)
    print(report)               # the first screen
    print(report.table())       # calls by op and dtype
    report.save("report.html")  # the picture

A report is plans and a few counts; everything it says is worked out from them: in numbers by ``report_data.py``, in
words by ``report_text.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.plans.diff import Diff, diff_plans
from amp_fx.plans.files import SchemaError, as_data, decode, read_object, write_text
from amp_fx.plans.plan import Cost, ModuleCasts, Plan
from amp_fx.reports import report_text
from amp_fx.reports.advice import Advice
from amp_fx.reports.kept_casts import kept_data
from amp_fx.reports.report_data import ReportData
from amp_fx.viz import beside, dot, html, model
from amp_fx.viz.words import because

__all__ = ["SUFFIXES", "Report", "check_suffix"]

#: bumped when the JSON form changes incompatibly
_VERSION = 1

#: what :meth:`Report.save` writes
SUFFIXES = (".html", ".svg", ".png", ".dot", ".json", ".md")

#: bytes; a report has about 600 a call
_MAX_FILE = 256 * 1024 * 1024


def check_suffix(path: str | Path) -> None:
    """Refuses a file that :meth:`Report.save` does not write.

    Raises:
        AmpFxError: another suffix.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise AmpFxError(
            f"cannot write {path.name!r}; valid suffixes: {', '.join((*SUFFIXES, beside.SUFFIX))}."
            + did_you_mean(path.suffix.lower(), SUFFIXES)
        )


class Report(ReportData):
    """What amp_fx did to a program; see :class:`amp_fx.reports.report_data.ReportData` for its fields."""

    @property
    def plan(self) -> Plan:
        """The plan of the only forward graph.

        Raises:
            AmpFxError: there are several, or none.
        """
        forward = [plan for plan in self.plans if plan.phase == "forward"]
        if len(forward) != 1:
            raise AmpFxError(
                f"the report has {len(forward)} forward graphs; take one from its plans, or replay all: "
                "report.save('report.json') and options={'plan': 'report.json'}."
            )
        return forward[0]

    def why(self, name: str) -> str:
        """Why a call of the only forward graph computes as it does, in words.

        Raises:
            KeyError: no such call.
        """
        return because(self.plan.node(name))

    def __str__(self) -> str:
        return report_text.first_screen(self)

    def __repr__(self) -> str:
        return f"<{report_text.heading(self)}>"

    def table(self) -> str:
        """Calls by op and dtype, forward and backward together, most frequent op first."""
        return report_text.table(self)

    def to_markdown(self) -> str:
        """First screen, calls by op and dtype, all advice, and every cast, as Markdown."""
        return report_text.markdown(self)

    def _repr_html_(self) -> str:
        return report_text.notebook(self) + (self._beside() if self.modules else "")

    def diff(self, other: Report) -> Diff:
        """What ``other`` changes against this report.

        Casts are counted as on the first screens, in what Inductor is given; by the plans alone, as
        :func:`amp_fx.record` has them, where one of the two reports knows no more.
        """
        found = diff_plans(self.plans, other.plans)
        if not (self.costs and other.costs):
            return found
        before, after = self.costs["amp_fx"], other.costs["amp_fx"]
        return replace(
            found, casts=(before.casts, after.casts), cast_bytes=(before.cast_bytes, after.cast_bytes)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form: the data, and under ``"summary"`` what the first screen says."""
        return {
            "version": _VERSION,
            "title": self.title,
            "summary": {
                "shares": self.shares(),
                "costs": {name: asdict(cost) for name, cost in self.compared().items()},
                "held_bytes": sum(given.bytes for given in self.held),
                "advice": [asdict(row) for row in self.advice],
                "graph_breaks": self.graph_breaks,
                "kept": kept_data(self.kept),
            },
            "plans": [plan.to_dict() for plan in self.plans],
            "costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "notes": [asdict(row) for row in self.notes],
            **({"sensitivities": self.sensitivities} if self.sensitivities else {}),
            "modules": as_data(self.modules),
            "device": self.device,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            AmpFxError: another version, or not a report.
        """
        if data.get("version") != _VERSION:
            raise AmpFxError(
                f"report has version {data.get('version')!r}; this amp_fx reads version {_VERSION}."
            )
        missing = next((key for key in ("title", "plans", "costs", "notes") if key not in data), None)
        if missing is not None:
            raise SchemaError(f"not a report: report.{missing} is missing.")
        plans = decode(list[dict[str, Any]], data["plans"], "report.plans")
        return cls(
            [Plan.from_dict(plan) for plan in plans],
            decode(str, data["title"], "report.title"),
            decode(dict[str, Cost], data["costs"], "report.costs"),
            decode(list[Advice], data["notes"], "report.notes"),
            decode(dict[str, dict[str, float | None]], data.get("sensitivities", {}), "report.sensitivities"),
            # an older report has none
            decode(list[ModuleCasts], data.get("modules", []), "report.modules"),
            decode(str, data.get("device", ""), "report.device"),
        )

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a report that :meth:`save` wrote as ``.json``.

        Raises:
            AmpFxError: the file cannot be read, or holds no report.
        """
        return read_object(path, "a report", cls.from_dict, _MAX_FILE, AmpFxError)

    def save(self, path: str | Path, *, against: Report | None = None) -> Path:
        """Writes the report; the suffix says how.

        Args:
            path: ``.html`` the picture, to be opened in a browser; ``.svg``, ``.png`` and ``.dot`` the picture
                as it is at first, by Graphviz; ``.beside.svg`` casts by module beside torch.autocast's;
                ``.json`` what :meth:`load` reads; ``.md`` text.
            against: an earlier report: pictures mark what changed since.

        Returns:
            The path.

        Raises:
            AmpFxError: another suffix, Graphviz's ``dot`` is missing for ``.svg`` and ``.png``, or there is no
                comparison for ``.beside.svg``.
            OSError: the file cannot be written.
        """
        path = Path(path)
        check_suffix(path)
        suffix = path.suffix.lower()
        if path.name.endswith(beside.SUFFIX):
            write_text(path, self._beside())
        elif suffix == ".json":
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
        elif suffix == ".md":
            write_text(path, self.to_markdown())
        elif suffix == ".html":
            write_text(path, html.render(model.drawing(self, against)))
        else:
            dot.write(model.drawing(self, against), path)
        return path

    def _beside(self) -> str:
        if not self.modules:
            raise AmpFxError(
                "the report compares nothing: amp_fx.explain knows what torch.autocast would cast, amp_fx.record and"
                " reports of older versions do not."
            )
        return beside.render(model.drawing(self))
