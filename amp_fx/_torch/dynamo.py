"""What Dynamo compiles now, and its log."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import compiled_autograd as _compiled_autograd
from torch._dynamo import config as _dynamo_config
from torch._guards import CompileContext
from torch._logging import trace_structured as _trace_structured

__all__ = [
    "compile_id",
    "in_compiled_autograd",
    "is_left_out_in_place",
    "is_looked_up",
    "log_artifact",
    "on_dynamo_compile",
    "unwrapped_errors",
]


class _Kept(list[Any]):
    """Callbacks of which ``torch.compiler.reset()`` keeps the first."""

    def clear(self) -> None:
        del self[1:]


def on_dynamo_compile(started: Callable[[str], None]) -> None:
    """Calls back, from now on, when Dynamo begins to compile: with the compile id, in the mode of the program's call.

    Call it once.
    """
    from torch._dynamo.callback import callback_handler

    callback_handler.start_callbacks = _Kept(
        [lambda args: started(args.compile_id), *callback_handler.start_callbacks]
    )


def in_compiled_autograd() -> bool:
    """True while compiled autograd hands a backward graph to the backend."""
    return _compiled_autograd.in_compiled_autograd_region


def compile_id() -> str:
    """Dynamo's name of the graph that is being compiled, forward or backward, as ``"0/0"``."""
    current = CompileContext.current_compile_id()
    return "graph" if current is None else str(current)


def is_left_out_in_place(module: torch.nn.Module) -> bool:
    """True where ``module.compile()`` compiles nothing of the module itself: Dynamo skips functions of torch.

    ``torch.compile(module)`` puts a function of its own around such modules.
    """
    from torch._dynamo import trace_rules

    return not _dynamo_config.wrap_top_frame and bool(trace_rules.check(module.forward))


def is_looked_up(name: str) -> bool:
    """True if ``torch.compile`` was given this name as backend."""
    from torch._dynamo.backends import registry

    return name in registry._COMPILER_FNS


@contextlib.contextmanager
def unwrapped_errors(kind: type[Exception]) -> Iterator[None]:
    """Errors of one kind leave the block as a backend raised them: Dynamo wraps what backends raise."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, kind):
            raise error.inner_exception from error
        raise


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to the TORCH_TRACE log of this compile, where tlparse shows it."""
    _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
