"""What amp_fx hooks into torch: all of it, in one list.

Importing amp_fx hooks in nothing. :func:`remove_all` takes everything out again.

=============== ============================================ ==========================================================
hook            what for                                     in torch from when to when
=============== ============================================ ==========================================================
COMPILE_STARTS  in which mode the program called             from the first ``torch.compile(backend="amp_fx")`` on
COMPILE_ENDS    functions that Dynamo gives up               likewise; besides, while ``explain`` traces
AFTER_STEP      an optimizer steps, and nothing was compiled from ``torch.compile`` to the first graph, or step
AFTER_STEP      copies of weights, which a step may change   from the first copy to the last
BEFORE_STEP     fp16 that trains without loss scaling        from such a graph to the first step of its optimizer
SCALER_STEPS    a step of what another scaler has scaled     while scalers of amp_fx live that scale graphs
EXIT            the process ends, and nothing was compiled   from ``torch.compile`` to the first graph, or step
UNTRACED        what programs call of ours in their steps    from ``torch.compile``, or the first ``GradScaler``, on
=============== ============================================ ==========================================================

Torch calls some of these where Dynamo would compile whatever Python runs, and with a lock held that compiling takes. So
what torch gets to call is disabled for Dynamo, here, and takes no lock of ours.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.optim.optimizer as _optimizer

__all__ = [
    "AFTER_STEP",
    "BEFORE_STEP",
    "COMPILE_ENDS",
    "COMPILE_STARTS",
    "EXIT",
    "HOOKS",
    "SCALER_STEPS",
    "UNTRACED",
    "Calls",
    "Hook",
    "remove_all",
]

#: what torch calls, and whom that calls, with whatever torch passes
Call = Callable[..., None]
Listener = Callable[..., object]
Undo = Callable[[], object]


class Hook:
    """Something of ours in torch.

    Args:
        name: for those who look at the list.
        add: puts it there, and returns what undoes that.
    """

    def __init__(self, name: str, add: Callable[[], Undo]) -> None:
        self.name = name
        self._add = add
        self._undo: Undo | None = None

    @property
    def is_installed(self) -> bool:
        """True while torch has it."""
        return self._undo is not None

    def install(self) -> None:
        """Puts it there; may be said again."""
        if self._undo is None:
            self._undo = self._add()

    def remove(self) -> None:
        """Takes it out; may be said again."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class Calls(Hook):
    """One place where torch calls us: there while somebody listens.

    Args:
        name: for those who look at the list.
        register: makes torch call a function, and returns what undoes that.
        is_busy: says whether torch is going through what it calls, so that this must not change now.
    """

    def __init__(
        self, name: str, register: Callable[[Call], Undo], is_busy: Callable[[], bool] = lambda: False
    ) -> None:
        # typed as whatever it may be given
        called: Any = torch.compiler.disable(self._call)
        super().__init__(name, lambda: register(called))
        self._is_busy = is_busy
        self._listeners: tuple[Listener, ...] = ()

    def listen(self, listener: Listener) -> None:
        """From now on ``listener`` is called; may be said again."""
        if listener not in self._listeners:
            self._listeners = (*self._listeners, listener)
        self.settle()

    def leave(self, listener: Listener) -> None:
        """``listener`` is called no more; it may say so itself."""
        self._listeners = tuple(other for other in self._listeners if other != listener)
        self.settle()

    def settle(self) -> None:
        """Is there if somebody listens, and else is not; where torch is busy, once Dynamo next begins to compile."""
        if bool(self._listeners) == self.is_installed:
            return
        if self._is_busy():
            COMPILE_STARTS.listen(self._settle_later)
        elif self._listeners:
            self.install()
        else:
            self.remove()

    def _settle_later(self, _: object) -> None:
        COMPILE_STARTS.leave(self._settle_later)
        self.settle()

    def remove(self) -> None:
        """Takes it out, and forgets who listens."""
        self._listeners = ()
        super().remove()

    def _call(self, *args: Any) -> None:
        for listener in self._listeners:
            listener(*args)


class _Callbacks(list[Any]):
    """Callbacks of Dynamo's of which ``torch.compiler.reset()`` keeps the first, which is ours."""

    def clear(self) -> None:
        del self[1:]


def _of_dynamo(name: str) -> Callable[[Call], Undo]:
    """Puts a function in front of one of the lists of Dynamo's callbacks."""

    def register(call: Call) -> Undo:
        from torch._dynamo.callback import callback_handler

        setattr(callback_handler, name, _Callbacks([call, *getattr(callback_handler, name)]))

        def undo() -> None:
            others = [other for other in getattr(callback_handler, name) if other is not call]
            setattr(callback_handler, name, others)

        return undo

    return register


def _a_step_is_running() -> bool:
    """True inside ``Optimizer.step``, in any thread: while its hooks are called, none may come or go."""
    return any(map(_is_in_step, sys._current_frames().values()))


def _is_in_step(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        # what Dynamo makes of it, too
        if code.co_filename == _optimizer.__file__ and "wrapper" in code.co_name:
            return True
        frame = frame.f_back
    return False


def _before_scaler_steps(call: Call) -> Undo:
    """Calls back with every scaler, and the optimizer, before ``torch.amp.GradScaler.step``.

    Torch has no hook there, and an optimizer's own is not called in a step that is skipped.
    """
    kind, step = torch.amp.GradScaler, torch.amp.GradScaler.step
    is_listening = True

    @functools.wraps(step)
    def told(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        if is_listening:
            call(self, optimizer)
        return step(self, optimizer, *args, **kwargs)

    # as Dynamo leaves torch's scaler alone, but not what that calls
    untraced: Any = torch.compiler.disable(told, recursive=False)

    def undo() -> None:
        nonlocal is_listening
        is_listening = False
        # whoever has replaced it since calls on
        if kind.step is untraced:
            kind.step = step

    kind.step = untraced
    return undo


def _at_exit(call: Call) -> Undo:
    atexit.register(call)
    return lambda: atexit.unregister(call)


def _leave_untraced() -> Undo:
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
COMPILE_STARTS = Calls("Dynamo begins to compile", _of_dynamo("start_callbacks"))

#: likewise; also where compiling has failed, with the error on its way
COMPILE_ENDS = Calls("Dynamo has compiled", _of_dynamo("end_callbacks"))

#: with the optimizer, and the arguments of its step; what is called takes whatever torch passes
BEFORE_STEP = Calls(
    "an optimizer steps",
    lambda call: _optimizer.register_optimizer_step_pre_hook(call).remove,  # pyright: ignore[reportArgumentType]
    _a_step_is_running,
)
AFTER_STEP = Calls(
    "an optimizer has stepped",
    lambda call: _optimizer.register_optimizer_step_post_hook(call).remove,  # pyright: ignore[reportArgumentType]
    _a_step_is_running,
)

#: with the scaler and the optimizer
SCALER_STEPS = Calls("a scaler steps", _before_scaler_steps)

EXIT = Calls("the process ends", _at_exit)

UNTRACED = Hook("Dynamo does not trace what programs call of ours", _leave_untraced)

HOOKS = (COMPILE_STARTS, COMPILE_ENDS, BEFORE_STEP, AFTER_STEP, SCALER_STEPS, EXIT, UNTRACED)


def remove_all() -> None:
    """Takes everything of amp_fx out of torch. What was compiled stays; what compiles later may hook in again."""
    for hook in HOOKS:
        hook.remove()
