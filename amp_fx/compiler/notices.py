"""Notices that a program is given once.

That no graph has arrived, that float16 is trained without loss scaling, that autocast is off around a graph, that its
parameters are in another 16-bit dtype, that nothing of it runs below 16 bits, and that Dynamo leaves code beside graphs
to eager.

What Dynamo does not compile, and why, it says itself under ``TORCH_LOGS=graph_breaks``, and :func:`amp_fx.explain`
shows it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import partial

import torch

from amp_fx._torch import AFTER_STEP, EXIT, frames_given_up, is_looked_up
from amp_fx.errors import ScalingWarning
from amp_fx.runtime.state import register

logger = logging.getLogger(__name__)

#: True while a model is compiled for a report, and not used
_is_looking: ContextVar[bool] = ContextVar("amp_fx_is_looking", default=False)

_told: set[str] = set()
register("what was told once", _told.clear)

#: what Dynamo had given up when the last graph arrived
_given_up: list[tuple[int, int]] = []
register("what Dynamo had given up", _given_up.clear)

#: what the reasons of graph breaks have in common behind which code is never compiled
_NEVER_COMPILED = ("torch.compiler.disable", "RNN, GRU, or LSTM", " is not compiled")


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """Inside, models are compiled for a report and not used: nothing is told, and no graph counts."""
    token = _is_looking.set(True)
    try:
        yield
    finally:
        _is_looking.reset(token)


def warn_unscaled(cause: str) -> None:
    """Warns, once for each cause, that a graph trains in float16 and amp_fx does not scale its gradients."""
    if _is_looking.get() or cause in _told:
        return
    _told.add(cause)
    warnings.warn(
        f"amp_fx trains a graph in float16 without loss scaling, since {cause}: gradients below 6e-8 become zero. "
        "Use options={'dtype': 'float16', 'scaler': 'default'} with scaler = amp_fx.GradScaler(device), or dtype "
        "'bfloat16', which needs no scaling. Where torch.amp.GradScaler scales the loss, ignore this: "
        "warnings.simplefilter('ignore', amp_fx.ScalingWarning).",
        ScalingWarning,
        stacklevel=2,
    )


def say_disabled(graph: str) -> None:
    """Says once that a graph is lowered though the program has switched autocast off around it."""
    _say_once(
        "disabled",
        "graph %s is called inside torch.autocast(enabled=False), and amp_fx lowers it: around a compiled function, or "
        "behind a graph break, a backend cannot tell this from a program without autocast. To keep it in fp32, give a "
        "rule: options={'policy': {'base': 'autocast', 'rules': [{'module': ..., 'precision': 'fp32'}]}}.",
        graph,
    )


def say_wide(profile: str) -> None:
    """Says once that fp16 was asked for, and a graph runs in fp32 as the device multiplies no faster in fp16."""
    _say_once(
        "wide",
        "dtype='float16' is asked for, and a graph runs in fp32: %s gains nothing by fp16. options={'profile': 'off'} "
        "runs it in fp16, as on a GPU.",
        profile,
    )


def say_rounded(graph: str, rounded: Mapping[torch.dtype, int], low: torch.dtype, *, is_again: bool) -> None:
    """Says once that parameters are in a 16-bit dtype other than the low one, and whether they are rounded again."""
    counts = ", ".join(f"{count} parameters are {str(dtype)[6:]}" for dtype, count in rounded.items())
    then = (
        "are rounded again to {}" if is_again else "stay as the program has them, where {} is the low dtype"
    )
    _say_once(
        "rounded",
        "graph %s: %s, and %s. Load the model in fp32, or give options={'dtype': %r}.",
        graph,
        counts,
        then.format(str(low)[6:]),
        str(next(iter(rounded)))[6:],
    )


def say_none_below(graph: str, level: str, why: str, remedy: str) -> None:
    """Says once for each cause that a graph is to run in a level below 16 bits, and none of its matmuls does.

    ``remedy``: a sentence without its full stop, or an empty string.
    """
    _say_once(
        f"{level}: {why}",
        "no matmul of graph %s runs below 16 bits (%s): %s. %samp_fx.explain(model, *args) has the reason of each.",
        graph,
        level,
        why,
        f"{remedy}. " if remedy else "",
    )


def _say_once(about: str, text: str, *values: object) -> None:
    if not _is_looking.get() and about not in _told:
        _told.add(about)
        logger.warning(text, *values)


def outside_remedy(device: str, low: torch.dtype) -> str:
    """The remedy for fp32 in code that Dynamo leaves to eager."""
    return (
        f"Call the compiled model inside torch.autocast({device!r}, {low}), or compile it by amp_fx.compile(model,"
        " outside='autocast')"
    )


def say_eager(graph: str, graph_break: str, device: str, low: torch.dtype) -> None:
    """Says once that Dynamo leaves a function to eager: one at which a graph ends, or between two graphs.

    After an ordinary break the program goes on in another graph, and nothing is told.
    """
    if _is_looking.get():
        return
    now = frames_given_up()
    before = _given_up[0] if _given_up else now
    _given_up[:] = [now]
    is_never = any(part in graph_break for part in _NEVER_COMPILED)
    is_between = all(count > earlier for count, earlier in zip(now, before, strict=True))
    if is_never or is_between:
        _say_once(
            "eager",
            "Dynamo leaves code %s to eager: matmuls in there run in the dtypes of their weights. %s. "
            "amp_fx.explain(model, *args) counts them.",
            f"after graph {graph} ({graph_break})" if is_never else f"before graph {graph}",
            outside_remedy(device, low),
        )


def expect_graph() -> None:
    """Warns at the first step of an optimizer, or when the process ends, if no graph has arrived until then.

    Up to torch 2.13 ``nn.Sequential(...).compile(backend="amp_fx")`` comes to this: Dynamo does not look at functions
    of torch.nn. A backend hears nothing of code that never becomes a graph.
    """
    AFTER_STEP.listen(_stepped)
    # without an optimizer, as in serving; before logging itself ends
    EXIT.listen(_ending)


def graph_arrived() -> None:
    """amp_fx was called with a graph of the program's."""
    if not _is_looking.get():
        AFTER_STEP.leave(_stepped)
        EXIT.leave(_ending)


def _warn_of_none(event: str, *_: object) -> None:
    # torch.compile may have been given other backends only: what amp_fx compiles for itself names none
    if is_looked_up("amp_fx"):
        graph_arrived()
        logger.warning(
            "torch.compile was given backend='amp_fx' and %s, but no graph has reached amp_fx: what was compiled runs "
            "eagerly, or was not called. Up to torch 2.13, model.compile() compiles nothing of torch's own modules "
            "(nn.Sequential, nn.TransformerEncoderLayer): use model = torch.compile(model, backend='amp_fx'), or a "
            "subclass with a forward of your own. amp_fx.explain(model, *args) names the reason.",
            event,
        )


_stepped = partial(_warn_of_none, "an optimizer has stepped")
_ending = partial(_warn_of_none, "the process ends")
