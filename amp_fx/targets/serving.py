"""The other side of :class:`amp_fx.targets.process.TargetProcess`: ``python -m amp_fx.targets.serving``."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
import warnings
from typing import BinaryIO

from amp_fx.errors import FallbackWarning, ScalingWarning, TargetError
from amp_fx.targets._torch import enter as enter_target
from amp_fx.targets.process import Reply
from amp_fx.targets.table import find_target

__all__ = ["enter"]


def enter(target: str) -> None:
    """Makes the process one that compiles for a target.

    Raises:
        TargetError: unknown target, or this machine cannot compile for it.
    """
    enter_target(find_target(target))


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        replies.write(_bytes(_reply(request)))
        replies.flush()


def _reply(request: bytes) -> Reply:
    reply = Reply()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        try:
            function, args = pickle.loads(request)
            module, _, name = function.partition(":")
            reply.value = getattr(importlib.import_module(module), name)(*args)
        except Exception as error:
            reply.error, reply.trace = _sendable(error), "".join(traceback.format_exception(error))
    for warning in caught:
        if isinstance(warning.message, (FallbackWarning, ScalingWarning)):
            reply.warnings.append(warning.message)
    return reply


def _bytes(reply: Reply) -> bytes:
    try:
        return pickle.dumps(reply)
    except Exception as error:  # whatever the value's class does
        said = f"the result cannot be handed back: {type(error).__name__}: {error}"
        return pickle.dumps(Reply(error=TargetError(said), warnings=reply.warnings))


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return TargetError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Serves a parent: requests come on stdin, replies go to stdout; what else is printed goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
