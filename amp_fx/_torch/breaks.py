"""What Dynamo leaves out: graph breaks, and functions that it gives up as a whole."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
import torch.optim.optimizer as _optimizer
from torch._dynamo.utils import counters as _dynamo_counters

from amp_fx._torch.hooks import COMPILE_ENDS, COMPILE_STARTS

__all__ = ["DynamoWatch", "LeftOut", "breaks_without_graph", "graph_break", "rest_left_out"]


def graph_break(gm: fx.GraphModule) -> str:
    """Why Dynamo ended a graph before the program did, with the source line, or an empty string."""
    rest = rest_left_out(gm)
    if rest is not None:
        return f"{rest.cause}; the rest of {rest.function} runs eagerly{_bracketed(rest.place)}"
    cause = getattr(gm, "compile_subgraph_reason", None)
    return _break_text(cause) if cause is not None and cause.graph_break else ""


def _break_text(cause: Any) -> str:
    reason = str(cause.reason).strip().splitlines()[0]
    return f"{reason}{_bracketed(_place(cause.user_stack[-1]))}" if cause.user_stack else reason


def breaks_without_graph() -> list[str]:
    """Every graph break since the last ``torch.compiler.reset()``, also those before which there was no graph."""
    from torch._dynamo.output_graph import graph_break_reasons

    return list(dict.fromkeys(map(_break_text, graph_break_reasons)))


def _place(frame: Any) -> str:
    return "" if _is_entry(frame.filename) else f"{frame.filename}:{frame.lineno}"


def _is_entry(filename: str) -> bool:
    """True for the function that torch.compile puts around what has no Python frame of the user's."""
    from torch._dynamo import external_utils

    return filename == external_utils.__file__


def _bracketed(place: str) -> str:
    return f" [{place}]" if place else ""


@dataclass(frozen=True)
class LeftOut:
    """Code that Dynamo was to compile and runs eagerly instead.

    Attributes:
        function: name of the function.
        whole: False where a graph was made of what comes before ``place``.
        place: ``"file:line"`` of what Dynamo cannot take; empty where that is the module which was compiled.
        cause: what that is, in Dynamo's words.
        hint: what Dynamo suggests, or an empty string.
    """

    function: str
    whole: bool
    place: str
    cause: str
    hint: str

    @property
    def reason(self) -> str:
        """The cause and its place, as graph breaks are named."""
        return f"{self.cause}{_bracketed(self.place)}"


def _left_out(function: str, whole: bool, place: str, message: str) -> LeftOut:
    """Reads a message of Dynamo's: the cause is its first line, hints have lines of their own."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["Dynamo gives no reason"]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    return LeftOut(function, whole, place, lines[0].rstrip("."), hints[0].rstrip(".") if hints else "")


class DynamoWatch:
    """Hears of functions that Dynamo gives up as a whole.

    Dynamo says nothing of functions that it never looks at: those of torch's own modules, or inside
    ``torch.compiler.disable``.

    Args:
        tell: called with each.
        backend: only of functions that were to be compiled for it; None: of all.
    """

    #: messages of Dynamo's, with how often it gave them before the compile that is going on
    _before: Counter[str] | None = None

    def __init__(self, tell: Callable[[LeftOut], object], backend: Callable[..., Any] | None = None) -> None:
        self._tell = tell
        self._backend = backend

    def start(self) -> None:
        """Listens from now on, until :meth:`stop`; may be called again."""
        COMPILE_STARTS.listen(self._started)
        COMPILE_ENDS.listen(self._ended)

    def stop(self) -> None:
        """Listens no more."""
        COMPILE_STARTS.leave(self._started)
        COMPILE_ENDS.leave(self._ended)

    def _started(self, _: object) -> None:
        DynamoWatch._before = Counter(_dynamo_counters["unimplemented"])

    def _ended(self, _: object) -> None:
        from torch._dynamo.exc import Unsupported, UserError

        # called while the error, if there is one, is on its way to Dynamo, which lets the function run eagerly then
        error = sys.exc_info()[1]
        stack = getattr(error, "real_stack", None)
        if isinstance(error, (Unsupported, UserError)) and stack:
            code, compiler = _compiling()
            # the step of an optimizer calls what is hooked in, which Dynamo leaves out: nothing of the program's
            if code is None or code.co_filename == _optimizer.__file__:
                return
            if self._backend is None or compiler is self._backend:
                named = getattr(code, "co_qualname", code.co_name)
                name = "the model" if _is_entry(code.co_filename) else named
                self._tell(_left_out(name, True, _place(stack[-1]), getattr(error, "msg", str(error))))


def _compiling() -> tuple[Any, Any]:
    """The code object that Dynamo is compiling, and the function that was given as backend.

    None where that is not known, and where failing is an error (``fullgraph=True``).
    """
    frame = sys._getframe()
    while frame is not None:
        known = frame.f_locals if frame.f_code.co_name == "_compile" else {}
        if known.get("one_graph"):
            break
        if "compiler_fn" in known and "code" in known:
            compiler = known["compiler_fn"]
            while hasattr(compiler, "_torchdynamo_orig_backend"):
                compiler = compiler._torchdynamo_orig_backend
            # what torch.compile makes of a name and options
            return known["code"], getattr(compiler, "compiler_fn", compiler)
        frame = frame.f_back
    return None, None


def rest_left_out(gm: fx.GraphModule) -> LeftOut | None:
    """The rest of the function, where Dynamo cannot go on compiling after a graph; None where it can."""
    cause = getattr(gm, "compile_subgraph_reason", None)
    if cause is None or cause.reason != "step_unsupported" or not cause.user_stack:
        return None
    frame = cause.user_stack[-1]
    messages = _dynamo_counters["unimplemented"]
    before = DynamoWatch._before if DynamoWatch._before is not None else messages
    new = [message for message, count in messages.items() if count > before[message]]
    return _left_out(frame.name, False, _place(frame), new[-1] if new else "")
