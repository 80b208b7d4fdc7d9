"""What amp_fx hooks into torch: all of it, in one list.

Importing amp_fx hooks in nothing. :func:`install_all` is called when ``torch.compile`` is first given the backend's
name.

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

__all__ = ["AFTER_STEP", "BEFORE_STEP", "COMPILE_STARTS", "EXIT", "HOOKS", "UNTRACED", "install_all"]


class Hook:
    """One place where torch calls us, and whom that calls; ``add`` makes torch call a function."""

    def __init__(self, add: Callable[[Any], object]) -> None:
        self._add = add
        self._call = torch.compiler.disable(self._call_listeners)
        self._is_installed = False
        self._listeners: tuple[Callable[..., object], ...] = ()

    def install(self) -> None:
        """Puts it there; may be called again."""
        if not self._is_installed:
            self._is_installed = True
            self._add(self._call)

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


def _when_compiling_starts(call: Any) -> None:
    from torch._dynamo.callback import callback_handler

    callback_handler.start_callbacks = _Callbacks([call, *callback_handler.start_callbacks])


def _leave_untraced(_: Any) -> None:
    """Dynamo leaves our code alone, as it does torch's own scaler; but for what is around or in modules to compile."""
    from torch._dynamo import trace_rules

    traced = ("integrations", "widened.py")
    ours = [str(path) for path in Path(__file__).parents[1].iterdir() if path.name not in traced]
    trace_rules.SKIP_DIRS.extend(ours)
    trace_rules._recompile_re()


#: with ``torch._dynamo.callback.CallbackArgs``, in the mode of the program's call
COMPILE_STARTS = Hook(_when_compiling_starts)

#: with the optimizer, and the arguments of its step
BEFORE_STEP = Hook(_optimizer.register_optimizer_step_pre_hook)
AFTER_STEP = Hook(_optimizer.register_optimizer_step_post_hook)

EXIT = Hook(atexit.register)
UNTRACED = Hook(_leave_untraced)

HOOKS = (COMPILE_STARTS, BEFORE_STEP, AFTER_STEP, EXIT, UNTRACED)


def install_all() -> None:
    """Puts everything of amp_fx into torch; may be called again."""
    for hook in HOOKS:
        hook.install()
