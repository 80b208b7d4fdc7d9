"""The words of a report: the blocks of its first screen, tables, and Markdown."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from amp_fx.graphs.calls import short_source
from amp_fx.instruments.reports.advice import NO_AUTOCAST, NOT_COMPILED, OUTSIDE, UNUSED_RULE, Advice
from amp_fx.precision.plans.plan import Cost, InputPlan, Plan, dtype_name
from amp_fx.precision.plans.saved import SavedValue
from amp_fx.viz.words import kept_form, more_bytes, saved_text, size

#: the first screen: lines, and characters in a line where there is no terminal that has fewer
_LINES, _WIDTH = 25, 118
_BAR = 12
#: a change of traffic that is none
_SAME = 0.0005
#: what the second column of costs is
_BASELINE = "autocast made to return the same dtypes, backward traced without it"


def screen(head: Sequence[str], blocks: Sequence[Sequence[str]]) -> str:
    """At most 25 lines, no wider than the terminal."""
    lines = [*head, *(line for block in blocks for line in block)]
    width = _columns()
    return "\n".join(_clip(line, width) for line in lines[:_LINES])


def heading(title: str, plans: Sequence[Plan]) -> str:
    """The title, how many graphs there are, and the policy."""
    forward, backward = (sum(plan.phase == phase for plan in plans) for phase in ("forward", "backward"))
    graphs = f"{forward} graph{'s' * (forward != 1)}"
    if backward:
        graphs += f", {backward} backward"
    policy = ", ".join(dict.fromkeys(plan.policy for plan in plans)) or "none"
    if meant := dict.fromkeys(plan.meaning for plan in plans if plan.meaning):
        policy += f" ({', '.join(meant)})"
    return f"amp_fx {title}".rstrip() + f": {graphs}, policy {policy}"


def verdict(
    plans: Sequence[Plan], costs: Mapping[str, Cost], device: str, advice: Sequence[Advice]
) -> list[str]:
    """Predicted time and memory, then the bytes of a step beside torch.autocast; nothing where nobody counted."""
    ours, theirs = (costs.get(name) for name in ("amp_fx", "torch.autocast"))
    if ours is None or theirs is None or not ours.moved or not theirs.moved:
        return []
    prediction = _prediction(plans, ours, theirs)
    return [*prediction, *_traffic(plans, ours, theirs, ours.moved / theirs.moved, device, advice)]


def _prediction(plans: Sequence[Plan], ours: Cost, theirs: Cost) -> list[str]:
    """Predicted time beside torch.autocast and fp32, and what is kept for the backward."""
    forward, texts = [plan for plan in plans if plan.phase == "forward"], list[str]()
    if forward and all(plan.seconds for plan in forward):
        own, stock, wide = (
            sum(plan.seconds[name] for plan in forward) for name in ("amp_fx", "torch.autocast", "fp32")
        )
        rates = ", ".join(dict.fromkeys(plan.profile for plan in forward))
        texts.append(
            f"Predicted time {_duration(own)}, with torch.autocast {_duration(stock)}, in fp32 {_duration(wide)} "
            f"(rates of {rates})"
        )
    if ours.saved and theirs.saved:
        texts.append(
            f"Kept for the backward {size(ours.saved, '.1f')}, with torch.autocast {size(theirs.saved, '.1f')}"
        )
    return textwrap.wrap(f"{'. '.join(texts)}.", _columns()) if texts else []


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _traffic(
    plans: Sequence[Plan], ours: Cost, theirs: Cost, ratio: float, device: str, advice: Sequence[Advice]
) -> list[str]:
    """The bytes of a step beside torch.autocast, and their ratio, in one sentence."""
    change = 1 - ratio
    text = f"{change:.1%} less traffic than torch.autocast"
    if abs(change) < _SAME:
        text = "same traffic as torch.autocast"
    elif more := more_bytes(plans, ours.moved, theirs.moved):
        text = more
    if ours.kernels is not None and theirs.kernels and ours.kernels < theirs.kernels:
        text += f", with {ours.kernels} of its {theirs.kernels} cast kernels"
    text += "".join(f". {row.text}" for row in advice if row.kind == NO_AUTOCAST)
    if device == "cpu":
        text += ". What a GPU would do: target='cuda:h100'"
    return textwrap.wrap(f"{text[0].upper()}{text[1:]}.", _columns())


def share_lines(shares: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each dtype, with bars; ``shares`` are those of ``"flops"`` and ``"bytes"``."""
    lines = [f"{'':16}{'FLOPs':>8}{'':{_BAR + 1}}{'bytes of results':>18}"]
    for dtype, row in shares.items():
        bars = [f"{row[kind]:>8.1%} {'#' * round(row[kind] * _BAR):<{_BAR}}" for kind in ("flops", "bytes")]
        lines.append(f"  {dtype:<14}{bars[0]}{'':10}{bars[1]}".rstrip())
    return lines if len(lines) > 1 else ["no floating computation"]


def outside_lines(outside: Mapping[str, int], plans: Sequence[Plan], notes: Sequence[Advice]) -> list[str]:
    """A line on code that Dynamo leaves to eager; nothing where that multiplies nothing."""
    total = sum(outside.values()) + sum(node.flops for plan in plans for node in plan.nodes)
    rows = [f"{flops / total:.1%} of the FLOPs in {dtype}" for dtype, flops in outside.items()]
    remedy = "; amp_fx.compile(model, outside='autocast')" * any(row.kind == OUTSIDE for row in notes)
    return [f"  outside of graphs, in eager code: {', '.join(rows)}{remedy}"] if rows else []


#: form of a value that is saved -> in words
_FORMS = {
    "8 bits": "values in 8 bits", "4 bits": "in 4 bits", "1 bit": "masks in 1 bit", "cast again": "weights cast again",
}  # fmt: skip


def cost_lines(
    compared: Mapping[str, Cost], held: Sequence[InputPlan], weights: Iterable[str], *, is_measured: bool
) -> list[str]:
    """Casts, cast kernels and bytes beside torch.autocast's, as far as they are known; and what is kept of weights."""
    lines = [f"{'':30}" + "".join(f"{name:>24}" for name in compared)]
    for title, count, moved in (
        ("casts in the graphs", "casts", "cast_bytes"),
        ("cast kernels after fusion", "kernels", "kernel_bytes"),
        ("bytes moved by all kernels", "", "moved"),
    ):
        cells = [
            (f"{getattr(cost, count)}, " if count else "") + size(getattr(cost, moved), ".2f")
            for cost in compared.values()
            if getattr(cost, moved) is not None
        ]
        if len(cells) == len(compared):
            lines.append(f"  {title:<28}" + "".join(f"{cell:>24}" for cell in cells))
    if is_measured and "torch.autocast" in compared:
        lines.append(f"  ({_BASELINE})")
    if held:
        copies = [given for given in held if given.dtype is not torch.float32]
        kept = f"{len(copies)}, {size(sum(given.bytes for given in held), '.2f')}"
        lines.append(f"  {'low copies of weights kept':<28}{kept:>24}")
    return [*lines, *(f"  weights: {text}" for text in weights)]


def saved_lines(plans: Sequence[Plan]) -> list[str]:
    """What the option ``activation_memory`` makes of what is saved for the backward."""
    total = sum((Counter(plan.saved) for plan in plans), Counter[str]())
    if not total:
        return []
    forms = [f"{total[form]} {how}" for form, how in _FORMS.items() if total[form]]
    before, after = (size(total[key], ".2f") for key in ("before", "after"))
    return [f"  saved for backward: {before} -> {after} ({', '.join(forms) or 'nothing in fewer bits'})"]


def findings(
    plans: Sequence[Plan],
    kept: Sequence[str],
    breaks: Sequence[str],
    advice: Sequence[Advice],
    saved: Sequence[SavedValue],
    taken: int,
) -> list[list[str]]:
    """Notes, advice, and values that are kept for the backward; these take the lines that the rest leaves.

    Whoever asked for fewer of them reads about them first.
    """
    counted, asked = Counter(breaks).items(), any(plan.saved for plan in plans)
    blocks = [
        _not_compiled(plans, advice),
        _block("cast kernels that are kept", kept, 1 if asked else 3),
        _block("unused rules", [row.text for row in advice if row.kind == UNUSED_RULE], 3),
        _block("graph breaks", [f"{n} times {why}" if n > 1 else why for why, n in counted], 3),
    ]
    others = [
        str(row) for row in advice if row.kind not in ("graph break", NO_AUTOCAST, NOT_COMPILED, UNUSED_RULE)
    ]
    blocks.append(_block("advice", others, min(4, _LINES - taken - sum(map(len, blocks)) - 1)))
    left = _LINES - taken - sum(map(len, blocks)) - 1
    return [*blocks, _block("largest values kept for the backward", [*map(saved_text, saved)], left)]


def _not_compiled(plans: Sequence[Plan], advice: Sequence[Advice]) -> list[str]:
    """The code that never became a graph, two lines for each: the code and the reason, then the remedy."""
    found = [row for row in advice if row.kind == NOT_COMPILED]
    if not found and not plans:
        return ["nothing was compiled"]
    rows = [line for row in found[:2] for line in (row.text, f"  {row.remedy}") if line.strip()]
    block = _block("not compiled: runs eagerly, in the dtypes of its weights", rows, len(rows))
    if len(found) > 2:
        block[0] += f" ({len(found)}, the first 2)"
    return block


def _block(title: str, rows: Sequence[str], most: int) -> list[str]:
    """A title and at most so many rows; the title says how many there are."""
    if not rows or most < 1:
        return []
    first = "the first" if most == 1 else f"the first {most}"
    shown = f" ({len(rows)}, {first})" if len(rows) > most else ""
    return [f"{title}{shown}", *(f"  {row}" for row in rows[:most])]


def table(columns: Sequence[str], calls: Mapping[str, Counter[str]]) -> str:
    """Calls by op and dtype."""
    width = max(map(len, ["op", *calls]))
    lines = [f"{'op':<{width}}" + "".join(f"{column:>10}" for column in columns)]
    for op, row in calls.items():
        cells = "".join(f"{row[column] or '':>10}" for column in columns)
        lines.append(f"{op:<{width}}{cells}".rstrip())
    return "\n".join(lines)


def markdown(
    title: str,
    first: str,
    calls: str,
    advice: Sequence[Advice],
    saved: Sequence[SavedValue],
    plans: Sequence[Plan],
) -> str:
    """First screen, calls by op and dtype, all advice, what takes most between forward and backward, every cast."""
    lines = [f"# {title or 'amp_fx'}", "", "```", first, "```", ""]
    lines += ["## Calls by op and dtype", "", "```", calls, "```", ""]
    if advice:
        lines += ["## Advice", "", *(f"- {_cell(str(row))}" for row in advice), ""]
    if saved:
        lines += [
            "## Largest values kept for the backward",
            "",
            "| value | bytes | kept in | why |",
            "|---|---:|---|---|",
        ]
    for row in saved:
        name = (
            f"{f'{row.times} x ' * (row.times > 1)}{f'{row.module_path}: ' * bool(row.module_path)}{row.op}"
        )
        cells = name, str(row.bytes), kept_form(row), row.reason
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += [""] * bool(saved)
    head = "| value | from | to | bytes | readers | source |"
    lines += ["## Casts", "", head, "|---|---|---|---:|---|---|"]
    for cast in (cast for plan in plans for cast in plan.casts):
        dtypes = dtype_name(cast.from_dtype), dtype_name(cast.to_dtype)
        cells = (cast.value, *dtypes, str(cast.bytes), ", ".join(cast.users), cast.source)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join([*lines, ""])


def _columns() -> int:
    """The columns of a line: the terminal's, where the output is a terminal."""
    if not sys.stdout.isatty():
        return _WIDTH
    return max(40, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))


def _clip(line: str, width: int) -> str:
    """A line of the first screen. What is to be pasted stays whole, however long; so do source lines."""
    text, options, rest = line.partition("options={")
    if len(text) <= width:
        return line
    head, bracket, place = text.rpartition(" [")
    end = ""
    if text.endswith("]") and bracket:
        # the folders of a library say less than the line in it
        place = place if len(place) < width // 2 else f"{short_source(place[:-1])[: width // 2]}]"
        text, end = head, f"{bracket}{place}"
        if len(text) + len(end) <= width:
            return f"{text}{end}{' ' if options else ''}{options}{rest}"
    return f"{text[: width - 4 - len(end)]}...{end}{' ' if options else ''}{options}{rest}"


def _cell(text: str) -> str:
    """Text that survives in a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
