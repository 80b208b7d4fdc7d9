"""What amp_fx hooks into torch: all of it, in one list.

Importing amp_fx hooks in nothing. :func:`install_all` is called when ``torch.compile`` is first given the backend's
name; :func:`remove_all` takes everything out again.

=============== =====================================================================================================
hook            what for
=============== =====================================================================================================
COMPILE_STARTS  in which mode the program called the function that Dynamo compiles
BEFORE_STEP     an optimizer steps without the scaler that has scaled its gradients
AFTER_STEP      copies of weights, which a step changes; an optimizer steps, and no graph has arrived
EXIT            the process ends, and no graph has arrived
UNTRACED        Dynamo does not trace what programs call of amp_fx in their steps
=============== =====================================================================================================

Torch calls some of these where Dynamo would compile whatever Python runs, and with a lock held that compiling takes. So
what torch gets to call is disabled for Dynamo, here, and takes no lock of ours. Torch also refuses hooks that come or
go while it goes through them: a hook stays where nobody listens any more.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.optim.optimizer as _optimizer

__all__ = [
    "AFTER_STEP", "BEFORE_STEP", "COMPILE_STARTS", "EXIT", "HOOKS", "UNTRACED", "install_all", "remove_all",
]  # fmt: skip

Undo = Callable[[], object]


class Hook:
    """One place where torch calls us, and whom that calls; ``add`` makes torch call a function and returns its undo."""

    def __init__(self, add: Callable[[Any], Undo]) -> None:
        self._add = add
        self._call = torch.compiler.disable(self._call_listeners)
        self._undo: Undo | None = None
        self._listeners: tuple[Callable[..., object], ...] = ()

    @property
    def is_installed(self) -> bool:
        """True while torch has it."""
        return self._undo is not None

    def install(self) -> None:
        """Puts it there; may be called again."""
        if self._undo is None:
            self._undo = self._add(self._call)

    def remove(self) -> None:
        """Takes it out, and forgets who listens; may be called again."""
        undo, self._undo, self._listeners = self._undo, None, ()
        if undo is not None:
            undo()

    def listen(self, listener: Callable[..., object]) -> None:
        """From now on ``listener`` is called, with whatever torch passes; may be called again."""
        self.install()
        if listener not in self._listeners:
            self._listeners = (*self._listeners, listener)

    def leave(self, listener: Callable[..., object]) -> None:
        """``listener`` is called no more; it may ask for that itself."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def _call_listeners(self, *args: Any) -> None:
        for listener in self._listeners:
            listener(*args)


class _Callbacks(list[Any]):
    """Callbacks of Dynamo's of which ``torch.compiler.reset()`` keeps the first, which is ours."""

    def clear(self) -> None:
        del self[1:]


def _when_compiling_starts(call: Any) -> Undo:
    from torch._dynamo.callback import callback_handler

    callback_handler.start_callbacks = _Callbacks([call, *callback_handler.start_callbacks])

    def undo() -> None:
        others = [other for other in callback_handler.start_callbacks if other is not call]
        callback_handler.start_callbacks = others

    return undo


def _at_exit(call: Any) -> Undo:
    atexit.register(call)
    return lambda: atexit.unregister(call)


def _leave_untraced(_: Any) -> Undo:
    """Dynamo leaves our code alone, as it does torch's own scaler; but for what is around or in modules to compile."""
    from torch._dynamo import trace_rules

    traced = ("integrations", "widened.py")
    ours = [str(path) for path in Path(__file__).parents[1].iterdir() if path.name not in traced]
    trace_rules.SKIP_DIRS.extend(ours)
    trace_rules._recompile_re()

    def undo() -> None:
        for folder in ours:
            trace_rules.SKIP_DIRS.remove(folder)
        trace_rules._recompile_re()

    return undo


#: with ``torch._dynamo.callback.CallbackArgs``, in the mode of the program's call
COMPILE_STARTS = Hook(_when_compiling_starts)

#: with the optimizer, and the arguments of its step
BEFORE_STEP = Hook(lambda call: _optimizer.register_optimizer_step_pre_hook(call).remove)
AFTER_STEP = Hook(lambda call: _optimizer.register_optimizer_step_post_hook(call).remove)

EXIT = Hook(_at_exit)
UNTRACED = Hook(_leave_untraced)

HOOKS = (COMPILE_STARTS, BEFORE_STEP, AFTER_STEP, EXIT, UNTRACED)


def install_all() -> None:
    """Puts everything of amp_fx into torch; may be called again."""
    for hook in HOOKS:
        hook.install()


def remove_all() -> None:
    """Takes everything of amp_fx out of torch. What was compiled stays; what compiles later may hook in again."""
    for hook in HOOKS:
        hook.remove()
