"""What a report says: the first screen, calls by op and dtype, Markdown, and a table for notebooks."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from html import escape

import torch

from amp_fx.plans.plan import dtype_name
from amp_fx.reports.advice import NOT_COMPILED, UNUSED_RULE
from amp_fx.reports.kept_casts import kept_lines
from amp_fx.reports.report_data import ReportData
from amp_fx.viz.words import more_bytes

__all__ = ["first_screen", "heading", "markdown", "notebook", "table"]

#: the first screen: lines, and characters in a line where there is no terminal that has fewer
_LINES, _WIDTH = 25, 118

_BAR = 12

#: a change of traffic that is none
_SAME = 0.0005

#: what the second column of costs is
_BASELINE = "autocast made to return the same dtypes, backward traced without it"

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def first_screen(report: ReportData) -> str:
    """At most 25 lines: shares by dtype, casts beside torch.autocast's, and what is to be known and done."""
    head = [heading(report)]
    if report.plans:
        head += [*_verdict(report), "", *_share_lines(report), "", *_cost_lines(report)]
    for block in _findings(report, _LINES - len(head)):
        head += block
    width = _columns()
    return "\n".join(_clip(line, width) for line in head[:_LINES])


def _findings(report: ReportData, room: int) -> list[list[str]]:
    """What is to be known and done, in so many lines: advice takes what the others leave."""
    counted = Counter(report.graph_breaks).items()
    breaks = [f"{times} times {reason}" if times > 1 else reason for reason, times in counted]
    unused = [row.text for row in report.advice if row.kind == UNUSED_RULE]
    blocks = [
        *_left_out(report),
        _block("cast kernels that are kept", kept_lines(report.kept), 3),
        _block("unused rules", unused, 3),
        _block("graph breaks", breaks, 3),
    ]
    advice = [str(row) for row in report.advice if row.kind not in ("graph break", NOT_COMPILED, UNUSED_RULE)]
    return [*blocks, _block("advice", advice, min(4, room - sum(map(len, blocks)) - 1))]


def heading(report: ReportData) -> str:
    """The title, how many graphs there are, and the policy."""
    forward = sum(plan.phase == "forward" for plan in report.plans)
    backward = sum(plan.phase == "backward" for plan in report.plans)
    graphs = f"{forward} graph{'s' * (forward != 1)}"
    if backward:
        graphs += f", {backward} backward"
    policy = ", ".join(dict.fromkeys(plan.policy for plan in report.plans)) or "none"
    if meant := dict.fromkeys(plan.meaning for plan in report.plans if plan.meaning):
        policy += f" ({', '.join(meant)})"
    return f"amp_fx {report.title}".rstrip() + f": {graphs}, policy {policy}"


def _verdict(report: ReportData) -> list[str]:
    """What a step moves beside torch.autocast, in one sentence; nothing where nobody counted."""
    ours, theirs = (report.costs.get(name) for name in ("amp_fx", "torch.autocast"))
    if ours is None or theirs is None or not ours.moved or not theirs.moved:
        return []
    change = 1 - ours.moved / theirs.moved
    if abs(change) < _SAME:
        text = "Same traffic as torch.autocast"
    else:
        text = (
            more_bytes(report.plans, ours.moved, theirs.moved)
            or f"{change:.1%} less traffic than torch.autocast"
        )
    if ours.kernels is not None and theirs.kernels and ours.kernels < theirs.kernels:
        text += f", with {ours.kernels} of its {theirs.kernels} cast kernels"
    if report.device == "cpu":
        text += ". What a GPU would do: target='cuda:h100'"
    return textwrap.wrap(f"{text[0].upper()}{text[1:]}.", _columns())


def _columns() -> int:
    """Of a line: what the terminal has, if it is one."""
    if not sys.stdout.isatty():
        return _WIDTH
    return max(40, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))


def _share_lines(report: ReportData) -> list[str]:
    lines = [f"{'':16}{'FLOPs':>8}{'':{_BAR + 1}}{'bytes of results':>18}"]
    for dtype, share in report.shares().items():
        flops, size = (
            f"{share[kind]:>8.1%} {'#' * round(share[kind] * _BAR):<{_BAR}}" for kind in ("flops", "bytes")
        )
        lines.append(f"  {dtype:<14}{flops}{'':10}{size}".rstrip())
    return lines if len(lines) > 1 else ["no floating computation"]


def _cost_lines(report: ReportData) -> list[str]:
    compared = report.compared()
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
    if report.costs and "torch.autocast" in compared:
        lines.append(f"  ({_BASELINE})")
    if held := report.held:
        copies = [given for given in held if given.dtype is not torch.float32]
        kept = f"{len(copies)}, {_size(sum(given.bytes for given in held))}"
        lines.append(f"  {'low copies of weights kept':<28}{kept:>24}")
    return lines


def table(report: ReportData) -> str:
    """Calls by op and dtype, forward and backward together, most frequent op first."""
    columns, calls = report.calls()
    width = max([len("op"), *(len(op) for op, _ in calls)])
    lines = [f"{'op':<{width}}" + "".join(f"{column:>10}" for column in columns)]
    for op, row in calls:
        cells = "".join(f"{row[column] or '':>10}" for column in columns)
        lines.append(f"{op:<{width}}{cells}".rstrip())
    return "\n".join(lines)


def markdown(report: ReportData) -> str:
    """First screen, calls by op and dtype, all advice, and every cast, as Markdown."""
    lines = [f"# {report.title or 'amp_fx'}", "", "```", first_screen(report), "```", ""]
    lines += ["## Calls by op and dtype", "", "```", table(report), "```", ""]
    if report.advice:
        lines += ["## Advice", "", *(f"- {_cell(str(row))}" for row in report.advice), ""]
    lines += [
        "## Casts",
        "",
        "| value | from | to | bytes | readers | source |",
        "|---|---|---|---:|---|---|",
    ]
    for plan in report.plans:
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


def notebook(report: ReportData) -> str:
    """HTML that loads nothing: shares by dtype, and folded the first screen and the calls."""
    shares = [
        [dtype, f"{share['flops']:.1%}", f"{share['bytes']:.1%}"] for dtype, share in report.shares().items()
    ]
    columns, calls = report.calls()
    rows = [[op, *(str(row[column] or "") for column in columns)] for op, row in calls]
    return "".join(
        (
            '<div style="font-family:monospace">',
            _html_table(heading(report), ["dtype", "FLOPs", "bytes of results"], shares),
            f"<details><summary>the report</summary><pre>{escape(first_screen(report))}</pre></details>",
            "<details><summary>calls by op and dtype</summary>",
            _html_table("", ["op", *columns], rows),
            "</details></div>",
        )
    )


def _left_out(report: ReportData) -> list[list[str]]:
    """What never became a graph, two lines for each: what and why, then what to do."""
    found = [row for row in report.notes if row.kind == NOT_COMPILED]
    if not found and not report.plans:
        return [["nothing was compiled"]]
    rows = [line for row in found[:2] for line in (row.text, f"  {row.remedy}") if line.strip()]
    block = _block("not compiled: runs eagerly, in the dtypes of its weights", rows, len(rows))
    if len(found) > 2:
        block[0] += f" ({len(found)}, the first 2)"
    return [block]


def _block(title: str, rows: Sequence[str], most: int) -> list[str]:
    """A title and at most so many rows; the title says how many there are."""
    if not rows or most < 1:
        return []
    shown = f" ({len(rows)}, the first {most})" if len(rows) > most > 1 else ""
    return [f"{title}{shown}", *(f"  {row}" for row in rows[:most])]


def _clip(line: str, width: int) -> str:
    """A line of the first screen. What is to be pasted stays whole, however long; so do source lines."""
    text, options, rest = line.partition("options={")
    if len(text) <= width:
        return line
    head, bracket, place = text.rpartition(" [")
    end = f"{bracket}{place}" if text.endswith("]") and len(place) < width // 2 else ""
    text = head if end else text
    return f"{text[: width - 4 - len(end)]}...{end}{' ' if options else ''}{options}{rest}"


def _html_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<th>{escape(text)}</th>" for text in columns)]
    cells += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    title = (
        f'<caption style="text-align:left;white-space:nowrap">{escape(caption)}</caption>' if caption else ""
    )
    return f"<table>{title}{body}</table>"


def _size(nbytes: int) -> str:
    """Three or more digits and a unit: ``"5.63 MB"``."""
    scaled = next(((nbytes / unit, name) for unit, name in _UNITS if nbytes >= unit), None)
    return f"{nbytes} B" if scaled is None else f"{scaled[0]:.2f} {scaled[1]}"


def _cell(text: str) -> str:
    """Text that survives in a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
