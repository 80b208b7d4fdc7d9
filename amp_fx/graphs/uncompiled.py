"""Code that was to be compiled for amp_fx and runs eagerly, in the precision of its weights: told once, in the log.

A backend is called with graphs, so of code that never becomes a graph it hears nothing. What can be known without it:

- Dynamo gives up a function: it calls back at the end of each attempt to compile one.
- Dynamo compiles a function up to some line only: the graph says so.
- ``torch.compile`` was given the name of this backend, and when an optimizer steps for the first time, or else when the
  process ends, there still was no graph. This is what ``nn.Sequential(...).compile(backend="amp_fx")`` comes to:
  Dynamo does not look at functions of torch.nn.

:func:`amp_fx.explain` says it at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch.fx as fx

from amp_fx._torch import AFTER_STEP, EXIT, DynamoWatch, LeftOut, is_looked_up, rest_left_out
from amp_fx.state import register

__all__ = ["graph_arrived", "not_told", "remedy", "watch"]

logger = logging.getLogger(__name__)

#: What Dynamo cannot take, by the beginning of its message, and what to do. Its own hint for recurrent layers is
#: torch._dynamo.config.allow_rnn, with which Inductor fails on an LSTM in training (torch 2.13, CPU).
_REMEDIES = {
    "Attempted to wrap RNN, GRU, or LSTM": (
        "Call the layer in a method of its own with @torch.compiler.disable: what is around it is compiled then"
    ),
}

#: True while a model is only looked at
_not_told: ContextVar[bool] = ContextVar("amp_fx_not_told", default=False)


#: what this process was told
_told: set[str] = set()
register("what was told of code that is not compiled", lambda: _told.clear())


def watch(backend: Callable[..., Any]) -> None:
    """Listens to Dynamo from now on, and until a graph arrives to optimizers; called when the backend is loaded.

    Args:
        backend: the function that ``torch.compile`` finds by the name ``"amp_fx"``.
    """
    DynamoWatch(_tell, backend).start()
    AFTER_STEP.listen(_stepped)
    # without an optimizer, as in serving; before logging itself ends
    EXIT.listen(_ending)


def graph_arrived(gm: fx.GraphModule) -> None:
    """Notes that amp_fx was called with a graph."""
    if _not_told.get():
        return
    _settle()
    rest = rest_left_out(gm)
    if rest is not None:
        _tell(rest)


def _settle() -> None:
    """Nothing more is to be told of graphs that do not arrive."""
    AFTER_STEP.leave(_stepped)
    EXIT.leave(_ending)


@contextlib.contextmanager
def not_told() -> Iterator[None]:
    """Inside, models are looked at and not used: nothing is told, and no graph counts."""
    token = _not_told.set(True)
    try:
        yield
    finally:
        _not_told.reset(token)


def remedy(found: LeftOut) -> str:
    """What to do about it: our own words where Dynamo's do not help, else its first hint, or an empty string."""
    known = (text for cause, text in _REMEDIES.items() if found.cause.startswith(cause))
    return next(known, found.hint)


def _tell(found: LeftOut) -> None:
    text = _describe(found)
    if _not_told.get() or text in _told:
        return
    _told.add(text)
    logger.warning("not compiled: %s. Functions that it calls may still be compiled.", text)


def _describe(found: LeftOut) -> str:
    """What runs eagerly, why, and what to do."""
    what = found.function if found.whole else f"the rest of {found.function}"
    then = f". {remedy(found)}" if remedy(found) else ""
    return f"{what} runs eagerly, in the dtypes of its weights. Dynamo's reason: {found.reason}{then}"


def _stepped(*_: Any) -> None:
    """Optimizers call this after a step."""
    _tell_of_none("an optimizer has stepped")


def _ending() -> None:
    """Python calls this when the process ends."""
    # what Dynamo gave up says more
    if not _told:
        _tell_of_none("the process ends")


def _tell_of_none(event: str) -> None:
    if is_looked_up("amp_fx"):
        _settle()
        logger.warning(
            "torch.compile was given backend='amp_fx' and %s, but no graph has reached amp_fx: what was compiled runs "
            "eagerly, or was not called. model.compile() compiles nothing of torch's own modules (nn.Sequential, "
            "nn.TransformerEncoderLayer): use model = torch.compile(model, backend='amp_fx'), or a subclass with a "
            "forward of your own. amp_fx.explain(model, *args) names the reason.",
            event,
        )
