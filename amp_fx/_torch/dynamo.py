"""What Dynamo compiles now, where it stopped, and its log."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo import compiled_autograd as _compiled_autograd
from torch._dynamo import config as _dynamo_config
from torch._dynamo.utils import counters as _counters
from torch._guards import CompileContext
from torch._logging import trace_structured as _trace_structured

from amp_fx._torch.hooks import COMPILE_STARTS

__all__ = [
    "breaks_since_reset", "compile_id", "copy_of", "given_up", "graph_break", "in_compiled_autograd",
    "in_inference_mode", "is_left_out_in_place", "is_looked_up", "log_artifact",
    "note_inference_mode", "note_mode", "raised_by_backend", "speaks_to_dynamo", "take_over", "unwrapped_errors",
]  # fmt: skip


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
    return _compiled_autograd.in_compiled_autograd_region


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

    reason = str(cause.reason).strip().splitlines()[0]
    if not cause.user_stack:
        return reason
    frame = cause.user_stack[-1]
    if reason == "step_unsupported":
        reason = f"the rest of {frame.name} is not compiled"
    # torch.compile puts a function of this file around what has no Python frame of the user's
    is_entry = frame.filename == external_utils.__file__
    return reason if is_entry else f"{reason} [{frame.filename}:{frame.lineno}]"


def given_up() -> dict[str, int]:
    """What made Dynamo give up functions in this process, in its words, and how often."""
    return dict(_counters["unimplemented"])


def is_left_out_in_place(module: torch.nn.Module) -> bool:
    """True where ``module.compile()``, unlike ``torch.compile(module)``, compiles nothing: Dynamo skips torch's own."""
    from torch._dynamo import trace_rules

    return not _dynamo_config.wrap_top_frame and bool(trace_rules.check(module.forward))


def is_looked_up(name: str) -> bool:
    """True if ``torch.compile`` was given this name as backend."""
    from torch._dynamo.backends import registry

    return name in registry._COMPILER_FNS


@contextlib.contextmanager
def unwrapped_errors(kind: type[Exception]) -> Iterator[None]:
    """Errors of one kind leave the block as a backend raised them: Dynamo wraps what backends raise."""
    try:
        yield
    except Exception as error:
        cause = raised_by_backend(error)
        if cause is not error and isinstance(cause, kind):
            raise cause from error
        raise


def raised_by_backend(error: Exception) -> Exception:
    """What a backend has raised, of what Dynamo or Inductor have made of it."""
    from torch._dynamo.exc import BackendCompilerFailed

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error


def speaks_to_dynamo(error: Exception) -> bool:
    """True for what asks Dynamo to trace again or to leave a function alone, or says what a program cannot do."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to the TORCH_TRACE log of this compile, where tlparse shows it."""
    _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
