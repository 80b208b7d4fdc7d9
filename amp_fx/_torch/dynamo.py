"""The frame that Dynamo compiles, where it stopped, and its log; and all hooks of amp_fx in torch, in one list.

Importing amp_fx hooks in nothing, and does not import Dynamo, which takes longer than all of amp_fx.
:func:`install_all` is called when ``torch.compile`` is first given the backend's name.

Torch calls some of these where Dynamo would compile whatever Python runs, and with a lock held that compiling takes. So
what torch gets to call is disabled for Dynamo, here, and takes no lock of ours. Torch also refuses hooks that come or
go while it goes through them: a hook stays where nobody listens any more.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
import torch.optim.optimizer as _optimizer
from torch._guards import CompileContext
from torch._logging import trace_structured

from amp_fx._torch.grouped import forget_grouped_shapes, shape_groups
from amp_fx._torch.recurrent import take_recurrent

__all__ = [
    "AFTER_STEP", "BEFORE_STEP", "COMPILE_STARTS", "EXIT", "GROUPS", "HOOKS", "RECURRENT", "UNTRACED", "after_closure",
    "breaks_since_reset", "called_in", "compile_id", "copy_of", "frames_given_up", "given_up",
    "graph_break", "in_compiled_autograd",
    "in_inference_mode", "install_all", "is_left_out_in_place", "is_looked_up", "log_artifact",
    "note_inference_mode", "note_mode", "take_over",
]  # fmt: skip


class Hook:
    """One place where torch calls us, and whom that calls; ``add`` makes torch call a function.

    One listener may return what torch is to get; the others return None.
    """

    def __init__(self, add: Callable[[Any], object]) -> None:
        self._add = add
        self._is_installed = False
        self.listeners: tuple[Callable[..., object], ...] = ()

    def install(self) -> None:
        """Puts it there; may be called again."""
        if not self._is_installed:
            self._is_installed = True
            self._add(torch.compiler.disable(self.call_listeners))

    def listen(self, listener: Callable[..., object]) -> None:
        """From now on ``listener`` is called, with whatever torch passes; may be called again."""
        self.install()
        if listener not in self.listeners:
            self.listeners = (*self.listeners, listener)

    def leave(self, listener: Callable[..., object]) -> None:
        """``listener`` is called no more; it may ask for that itself."""
        self.listeners = tuple(other for other in self.listeners if other != listener)

    def call_listeners(self, *args: Any) -> object:
        """As torch calls them."""
        results = [listener(*args) for listener in self.listeners]
        return next((result for result in results if result is not None), None)


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

    traced = ("integrations", "runtime", "widened.py")
    root = Path(__file__).parents[1]
    ours = [
        str(path)
        for folder in (root, root / "runtime")
        for path in folder.iterdir()
        if path.name not in traced
    ]
    trace_rules.SKIP_DIRS.extend(ours)
    trace_rules._recompile_re()


#: in which mode the program called the function that Dynamo compiles; with ``torch._dynamo.callback.CallbackArgs``
COMPILE_STARTS = Hook(_when_compiling_starts)
#: an optimizer steps without the scaler that has scaled its gradients; with the optimizer and the arguments of a
#: step, in whose place a listener may return others
BEFORE_STEP = Hook(_optimizer.register_optimizer_step_pre_hook)
#: copies of weights, which a step changes; an optimizer steps, and no graph has arrived; likewise
AFTER_STEP = Hook(_optimizer.register_optimizer_step_post_hook)
#: the process ends, and no graph has arrived
EXIT = Hook(atexit.register)
#: Dynamo does not trace what programs call of amp_fx in their steps
UNTRACED = Hook(_leave_untraced)

#: products of experts have shapes in every dtype that their kernels take
GROUPS = Hook(shape_groups)
#: an LSTM is in graphs where it stays one kernel, and what is around other recurrent layers
RECURRENT = Hook(take_recurrent)

HOOKS = (COMPILE_STARTS, BEFORE_STEP, AFTER_STEP, EXIT, UNTRACED, GROUPS, RECURRENT)


def install_all() -> None:
    """Puts everything of amp_fx into torch; may be called again."""
    for hook in HOOKS:
        hook.install()
    COMPILE_STARTS.listen(forget_grouped_shapes)


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step with a closure that calls ``then`` in the end; None where they have no closure."""
    optimizer, *own = args
    closure = kwargs["closure"] if "closure" in kwargs else next(iter(own), None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def run(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        then()
        return loss

    return (args, {**kwargs, "closure": run}) if "closure" in kwargs else ((optimizer, run, *own[1:]), kwargs)


class _Started(threading.local):
    """The compilation that Dynamo has begun last in this thread, and the mode in which the program called."""

    id = ""
    in_inference_mode = False

    def note(self, args: Any) -> None:
        """Dynamo begins to compile: soon it switches the mode off, and leaves no trace of it."""
        self.id, self.in_inference_mode = args.compile_id, torch.is_inference_mode_enabled()


_started = _Started()


def note_inference_mode() -> None:
    """From now on :func:`in_inference_mode` knows."""
    COMPILE_STARTS.listen(_started.note)


def note_mode(in_inference_mode: bool) -> None:
    """Sets it for the graph that is being compiled, where Dynamo does not call."""
    _started.id, _started.in_inference_mode = compile_id(), in_inference_mode


def in_inference_mode() -> bool:
    """True if the graph being compiled will be called under ``torch.inference_mode``; guards tell the two apart."""
    if _started.id and _started.id == compile_id():
        return _started.in_inference_mode
    return torch.is_inference_mode_enabled()


def in_compiled_autograd() -> bool:
    """True while compiled autograd hands a backward graph to the backend."""
    from torch._dynamo import compiled_autograd

    return compiled_autograd.in_compiled_autograd_region


def compile_id() -> str:
    """Dynamo's name of the graph that is being compiled, forward or backward, as ``"0/0"``."""
    current = CompileContext.current_compile_id()
    return "graph" if current is None else str(current)


def take_over(copied: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Gives a copy of a graph of Dynamo's what AOTAutograd recognises and reads, and no tensors of the program."""
    placeholders = (each.graph.find_nodes(op="placeholder") for each in (copied, gm))
    for node, original in zip(*placeholders, strict=True):
        # Dynamo itself forgets them when it is done
        node.meta.pop("grapharg", None)
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    copied.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph of Dynamo's, with what AOTAutograd reads of it; Dynamo itself reads its own graph again."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta = dict(gm.graph.output_node().meta)
    copied = fx.GraphModule(gm, graph)
    take_over(copied, gm)
    return copied


def graph_break(gm: fx.GraphModule) -> str:
    """Why Dynamo ended a graph before the program did, with the source line, or an empty string."""
    cause = getattr(gm, "compile_subgraph_reason", None)
    return _break_text(cause) if cause is not None and cause.graph_break else ""


def breaks_since_reset() -> list[str]:
    """Every graph break since the last ``torch.compiler.reset()``, also those before which there was no graph."""
    from torch._dynamo.output_graph import graph_break_reasons

    return list(dict.fromkeys(map(_break_text, graph_break_reasons)))


def _break_text(cause: Any) -> str:
    from torch._dynamo import external_utils

    text = str(cause.reason).strip()
    # of what is left out on purpose, as an LSTM is, the first line says only that
    reason = (text.partition(" Reason: ")[2] or text).splitlines()[0]
    if not cause.user_stack:
        return reason
    frame = cause.user_stack[-1]
    if reason == "step_unsupported":
        reason = f"the rest of {frame.name} is not compiled"
    # torch.compile puts a function of this file around what has no Python frame of the user's
    is_entry = frame.filename == external_utils.__file__
    return reason if is_entry else f"{reason} [{frame.filename}:{frame.lineno}]"


def given_up() -> dict[str, int]:
    """The reasons for which Dynamo gave up functions in this process, in its words, and how often."""
    from torch._dynamo.utils import counters

    return dict(counters["unimplemented"])


def frames_given_up() -> tuple[int, int]:
    """How many functions Dynamo did not compile in this process, asked while it compiles another, and its reasons.

    Where both have grown it has left a function to eager as a whole: an error that reaches the user has no reason
    there, and a data-dependent branch has one and is compiled.
    """
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return frames["total"] - frames["ok"] - 1, sum(given_up().values())


#: makes what a module, or None, is called in, given it and the arguments of a call
_Context = Callable[[Any, tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[object]]


@dataclass
class _Within:
    """Stands for what compiles the function of a module, and makes it enter a context in each call.

    A copy of the module compiles anew by this. The hooks that torch.compile calls around a function do not do: behind
    them it puts autocast back.
    """

    compiler: Any
    context: _Context

    def __call__(self, function: Any) -> Any:
        return called_in(self.compiler(function), self.context, getattr(function, "__self__", None))

    def __getattr__(self, name: str) -> Any:
        if name in ("compiler", "__deepcopy__", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.compiler, name)


def called_in(compiled: Any, context: _Context, module: Any = None) -> Any:
    """The result of ``torch.compile``, inside a context in each call; ``module`` is the function's."""
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(compiled, OptimizedModule):
        made: Any = _Within(compiled.dynamo_ctx, context)
        compiled.dynamo_ctx = made
        compiled._initialize()
    if isinstance(compiled, torch.nn.Module):
        return compiled

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context(module, args, kwargs):
            return compiled(*args, **kwargs)

    return run


def is_left_out_in_place(module: torch.nn.Module) -> bool:
    """True where ``module.compile()``, unlike ``torch.compile(module)``, compiles nothing: torch's own, up to 2.13."""
    from torch._dynamo import config, trace_rules
    from torch._dynamo.eval_frame import OptimizedModule

    is_wrapped = config.wrap_top_frame or hasattr(OptimizedModule, "_should_wrap_module_call_impl")
    return not is_wrapped and bool(trace_rules.check(module.forward))


def is_looked_up(name: str) -> bool:
    """True if ``torch.compile`` was given this name as backend."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    return registry is not None and name in registry._COMPILER_FNS


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to the TORCH_TRACE log of this compile, where tlparse shows it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
