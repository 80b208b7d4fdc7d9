"""The report: what ran in which precision, what the casts cost, what is risky, and what to change.

    report = amp_fx.explain(model, batch)
    print(report)               # the first screen
    print(report.table())       # calls by op and dtype
    report.save("report.html")  # the picture

A report is plans and a few counts; everything it says is worked out from them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.plans.diff import Diff, diff_plans
from amp_fx.plans.files import TooLongError, read_text, write_text
from amp_fx.plans.plan import InputPlan, Plan, dtype_name
from amp_fx.plans.schema import SchemaError, decode
from amp_fx.reports.advice import Advice, Risk, advise, rank_risks
from amp_fx.viz import dot, html, model, model_explorer

__all__ = ["SUFFIXES", "Cost", "Report"]

#: bumped when the JSON form changes incompatibly
_VERSION = 1

#: the first screen: lines, and characters in a line
_LINES, _WIDTH = 25, 118

#: what :meth:`Report.save` writes
SUFFIXES = (".html", ".svg", ".png", ".dot", ".json", ".md")

_BAR = 12

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

#: bytes; a report has about 600 a call
_MAX_FILE = 256 * 1024 * 1024


@dataclass(frozen=True)
class Cost:
    """What casts cost in all graphs of a report.

    Attributes:
        casts: conversions between floating dtypes in the graphs.
        cast_bytes: what they read and write if each is a kernel of its own.
        kernels: kernels that do nothing but cast, after Inductor's fusion; None where it was not asked.
        kernel_bytes: what these read and write.
        moved: what all kernels read and write.
    """

    casts: int
    cast_bytes: int
    kernels: int | None = None
    kernel_bytes: int | None = None
    moved: int | None = None


@dataclass
class Report:
    """What amp_fx did to a program.

    Attributes:
        plans: one per graph; forward graphs, and the backward ones where they are known.
        title: what the report is about.
        costs: ``"amp_fx"`` and ``"torch.autocast"``, forward and backward; empty where only plans are known.
        notes: advice that plans cannot give: what weights hold.
    """

    plans: list[Plan] = field(default_factory=list)
    title: str = ""
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[Advice] = field(default_factory=list)

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

    @property
    def graph_breaks(self) -> list[str]:
        """Why Dynamo split the program, one line per break."""
        return [plan.graph_break for plan in self.plans if plan.graph_break]

    @property
    def advice(self) -> list[Advice]:
        """What is worth changing, most useful first."""
        return [*self.notes, *advise(self.plans)]

    @property
    def risks(self) -> list[Risk]:
        """The kinds of nodes whose precision is likeliest to matter, riskiest first."""
        return rank_risks(self.plans)

    def shares(self) -> dict[str, dict[str, float]]:
        """Share of each dtype: ``{"bfloat16": {"flops": 0.98, "bytes": 0.6}}``, bytes of results."""
        flops: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for plan in self.plans:
            for node in plan.nodes:
                if node.dtype is not None:
                    flops[dtype_name(node.dtype)] += node.flops
                    sizes[dtype_name(node.dtype)] += node.bytes
        return {
            dtype: {
                "flops": flops[dtype] / max(flops.total(), 1),
                "bytes": sizes[dtype] / max(sizes.total(), 1),
            }
            for dtype in sorted(sizes, key=lambda dtype: (-flops[dtype], -sizes[dtype]))
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
        """The low copies of weights that graphs without gradients keep across calls, each once."""
        copies = (given for plan in self.plans for given in plan.inputs if given.copy_of)
        return list({(given.name, given.bytes): given for given in copies}.values())

    def table(self) -> str:
        """Calls by op and dtype, forward and backward together, most frequent op first."""
        columns, calls = self._calls()
        width = max([len("op"), *(len(op) for op, _ in calls)])
        lines = [f"{'op':<{width}}" + "".join(f"{column:>10}" for column in columns)]
        for op, row in calls:
            cells = "".join(f"{row[column] or '':>10}" for column in columns)
            lines.append(f"{op:<{width}}{cells}".rstrip())
        return "\n".join(lines)

    def _calls(self) -> tuple[list[str], list[tuple[str, Counter[str]]]]:
        """Dtypes in use, and for every op its calls by dtype."""
        calls: dict[str, Counter[str]] = {}
        for plan in self.plans:
            for op, dtypes in plan.ops_by_dtype().items():
                calls.setdefault(op, Counter()).update(dtypes)
        columns = [d for d in ("float16", "bfloat16", "float32") if any(row[d] for row in calls.values())]
        columns += sorted({d for row in calls.values() for d in row} - set(columns))
        return columns, sorted(calls.items(), key=lambda item: (-item[1].total(), item[0]))

    def diff(self, other: Report) -> Diff:
        """What ``other`` changes against this report."""
        return diff_plans(self.plans, other.plans)

    def __str__(self) -> str:
        head = [*self._heading(), "", *self._share_lines(), "", *self._cost_lines()]
        for block in self._findings(_LINES - len(head)):
            head += block
        return "\n".join(map(_clip, head[:_LINES]))

    def _findings(self, room: int) -> list[list[str]]:
        """What is to be known and done, in so many lines: advice takes what the others leave."""
        risks = self.risks
        counted = Counter(self.graph_breaks).items()
        breaks = [f"{times} times {reason}" if times > 1 else reason for reason, times in counted]
        blocks = [
            _block("graph breaks", breaks, 3),
            _block("riskiest", list(map(str, risks)), 3),
            _block("to keep the riskiest in fp32", [f"options={row.options}" for row in risks[:1]], 1),
        ]
        advice = [str(row) for row in self.advice if row.kind != "graph break"]
        return [*blocks, _block("advice", advice, min(4, room - sum(map(len, blocks)) - 1))]

    def _heading(self) -> list[str]:
        forward = sum(plan.phase == "forward" for plan in self.plans)
        backward = sum(plan.phase == "backward" for plan in self.plans)
        graphs = f"{forward} graph{'s' * (forward != 1)}"
        if backward:
            graphs += f", {backward} backward"
        policy = ", ".join(dict.fromkeys(plan.policy for plan in self.plans)) or "none"
        return [f"amp_fx {self.title}".rstrip() + f": {graphs}, policy {policy}"]

    def _share_lines(self) -> list[str]:
        lines = [f"{'':16}{'FLOPs':>8}{'':{_BAR + 1}}{'bytes of results':>18}"]
        for dtype, share in self.shares().items():
            flops, size = (
                f"{share[kind]:>8.1%} {'#' * round(share[kind] * _BAR):<{_BAR}}"
                for kind in ("flops", "bytes")
            )
            lines.append(f"  {dtype:<14}{flops}{'':10}{size}".rstrip())
        return lines if len(lines) > 1 else ["no floating computation"]

    def _cost_lines(self) -> list[str]:
        compared = self.compared()
        lines = [f"{'':30}" + "".join(f"{name:>24}" for name in compared)]
        for title, count, size in (
            ("casts in the graphs", "casts", "cast_bytes"),
            ("cast kernels after fusion", "kernels", "kernel_bytes"),
            ("bytes moved by all kernels", None, "moved"),
        ):
            cells = ""
            for cost in compared.values():
                nbytes = getattr(cost, size)
                if nbytes is None:
                    break
                number = f"{getattr(cost, count)}, " if count else ""
                cells += f"{number + _size(nbytes):>24}"
            else:
                lines.append(f"  {title:<28}{cells}")
        if held := self.held:
            kept = f"{len(held)}, {_size(sum(given.bytes for given in held))}"
            lines.append(f"  {'low copies of weights kept':<28}{kept:>24}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form: the data, and under ``"summary"`` what the first screen says."""
        return {
            "version": _VERSION,
            "title": self.title,
            "summary": {
                "shares": self.shares(),
                "costs": {name: asdict(cost) for name, cost in self.compared().items()},
                "held_bytes": sum(given.bytes for given in self.held),
                "risks": [asdict(risk) for risk in self.risks],
                "advice": [asdict(row) for row in self.advice],
                "graph_breaks": self.graph_breaks,
            },
            "plans": [plan.to_dict() for plan in self.plans],
            "costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "notes": [asdict(row) for row in self.notes],
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
        )

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a report that :meth:`save` wrote as ``.json``.

        Raises:
            AmpFxError: the file holds no report.
            OSError: the file cannot be read.
        """
        try:
            data = json.loads(read_text(path, _MAX_FILE))
        except TooLongError as error:
            raise AmpFxError(f"{path} {error}: not a report.") from error
        except (ValueError, RecursionError) as error:
            raise AmpFxError(f"{path} is not valid JSON: {error}.") from error
        if not isinstance(data, dict):
            raise AmpFxError(f"{path} holds no report: a report is a JSON object.")
        try:
            return cls.from_dict(data)
        except AmpFxError as error:
            raise AmpFxError(f"{path}: {error}") from error

    def save(self, path: str | Path, *, against: Report | None = None) -> Path:
        """Writes the report; the suffix says how.

        Args:
            path: ``.html`` the picture, to be opened in a browser; ``.svg``, ``.png`` and ``.dot`` the picture
                as it is at first, by Graphviz; ``.json`` what :meth:`load` reads; ``.md`` text;
                ``.model-explorer.json`` the graph for Google's Model Explorer, with its node data beside it.
            against: an earlier report: pictures mark what changed since.

        Returns:
            The path.

        Raises:
            AmpFxError: another suffix, or Graphviz's ``dot`` is missing for ``.svg`` and ``.png``.
            OSError: the file cannot be written.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if path.name.endswith(model_explorer.SUFFIX):
            model_explorer.write(model.drawing(self, against), path)
        elif suffix == ".json":
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
        elif suffix == ".md":
            write_text(path, self.to_markdown())
        elif suffix == ".html":
            write_text(path, html.render(model.drawing(self, against)))
        elif suffix in SUFFIXES:
            dot.write(model.drawing(self, against), path)
        else:
            raise AmpFxError(
                f"cannot write {path.name!r}; valid suffixes: {', '.join((*SUFFIXES, model_explorer.SUFFIX))}."
                + did_you_mean(suffix, SUFFIXES)
            )
        return path

    def to_markdown(self) -> str:
        """First screen, calls by op and dtype, all advice, and every cast, as Markdown."""
        lines = [f"# {self.title or 'amp_fx'}", "", "```", str(self), "```", ""]
        lines += ["## Calls by op and dtype", "", "```", self.table(), "```", ""]
        if self.advice:
            lines += ["## Advice", "", *(f"- {_cell(str(row))}" for row in self.advice), ""]
        lines += [
            "## Casts",
            "",
            "| value | from | to | bytes | readers | source |",
            "|---|---|---|---:|---|---|",
        ]
        for plan in self.plans:
            for cast in plan.casts:
                cells = (
                    cast.value,
                    dtype_name(cast.from_dtype),
                    dtype_name(cast.to_dtype),
                    str(cast.bytes),
                    ", ".join(cast.users),
                    cast.source,
                )
                lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        return "\n".join([*lines, ""])

    def _repr_html_(self) -> str:
        shares = [
            [dtype, f"{share['flops']:.1%}", f"{share['bytes']:.1%}"]
            for dtype, share in self.shares().items()
        ]
        columns, calls = self._calls()
        rows = [[op, *(str(row[column] or "") for column in columns)] for op, row in calls]
        return "".join(
            (
                '<div style="font-family:monospace">',
                _html_table(self._heading()[0], ["dtype", "FLOPs", "bytes of results"], shares),
                f"<details><summary>the first screen</summary><pre>{escape(str(self))}</pre></details>",
                "<details><summary>calls by op and dtype</summary>",
                _html_table("", ["op", *columns], rows),
                "</details></div>",
            )
        )


def _block(title: str, rows: Sequence[str], most: int) -> list[str]:
    """A title and at most so many rows; the title says how many there are."""
    if not rows or most < 1:
        return []
    shown = f" ({len(rows)}, the first {most})" if len(rows) > most > 1 else ""
    return [f"{title}{shown}", *(f"  {row}" for row in rows[:most])]


def _clip(line: str) -> str:
    """A line of the first screen. What is to be pasted stays whole, however long; so do source lines."""
    text, options, rest = line.partition("options={")
    if len(text) <= _WIDTH:
        return line
    head, bracket, place = text.rpartition(" [")
    end = f"{bracket}{place}" if text.endswith("]") and len(place) < _WIDTH // 2 else ""
    text = head if end else text
    return f"{text[: _WIDTH - 4 - len(end)]}...{end}{' ' if options else ''}{options}{rest}"


def _html_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<th>{escape(text)}</th>" for text in columns)]
    cells += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    title = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    return f"<table>{title}{body}</table>"


def _size(nbytes: int) -> str:
    """Three or more digits and a unit: ``"5.63 MB"``."""
    scaled = next(((nbytes / unit, name) for unit, name in _UNITS if nbytes >= unit), None)
    return f"{nbytes} B" if scaled is None else f"{scaled[0]:.2f} {scaled[1]}"


def _cell(text: str) -> str:
    """Text that survives in a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
