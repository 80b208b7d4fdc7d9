"""Errors on their way through Dynamo, which wraps what backends raise."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["for_the_caller", "raised_by_backend", "speaks_to_dynamo", "unwrapped_errors"]


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
    """The error that a backend has raised, out of the one that Dynamo or Inductor have made of it."""
    from torch._dynamo.exc import BackendCompilerFailed

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error


def for_the_caller(error: Exception) -> Exception:
    """The error with a second base class by which Dynamo hands it on as it is; Dynamo wraps other errors."""
    from torch._dynamo.exc import ShortenTraceback

    kind, text = type(error), str(error)
    # Dynamo appends to the arguments how to report a bug to PyTorch
    own = {"__module__": kind.__module__, "__str__": lambda _: text}
    passes = type(kind.__name__, (ShortenTraceback, kind), own)
    return passes(*error.args, first_useful_frame=None).with_traceback(error.__traceback__)


def speaks_to_dynamo(error: Exception) -> bool:
    """True for what asks Dynamo to trace again or to leave a function alone, or says what a program cannot do."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)
