"""A process of its own that compiles for a target, so that nothing is patched in the user's: both of its ends."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from dataclasses import dataclass, field
from typing import IO, Any

from amp_fx.errors import FallbackWarning, ScalingWarning, TargetError
from amp_fx.targets.device import find_target

__all__ = ["TargetProcess", "serve"]


@dataclass
class _Reply:
    """What the process answers to a call: a value or an error with its traceback, and the warnings of amp_fx."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""
    warnings: list[Warning] = field(default_factory=list)


class TargetProcess:
    """Calls functions in a process that compiles for a target; ends when nobody refers to it, or earlier."""

    def __init__(self, target: str) -> None:
        self._target = find_target(target).name
        # what the process writes there is of interest if it dies
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # processes that compile for Inductor would know nothing of the target
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from amp_fx.targets.process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self._end = weakref.finalize(self, _end, self._process, self._log)
        try:
            self.call("amp_fx.targets._torch:enter", self._target)
        except BaseException:
            self.close()
            raise

    def call(self, function: str, *args: Any) -> Any:
        """Calls ``"package.module:function"`` there; raises here what it raises, with the warnings of amp_fx.

        Arguments are pickled, as is what the function returns.
        """
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None:
            raise AssertionError("the process has pipes")
        try:
            # as bytes: what cannot be read there is an error of the call, and leaves the pipe in order
            pickle.dump(pickle.dumps((function, args)), requests)
            requests.flush()
            reply: _Reply = pickle.load(replies)
        except (EOFError, BrokenPipeError) as ended:
            raise TargetError(self._obituary()) from ended
        for warning in reply.warnings:
            warnings.warn(warning, stacklevel=2)
        if reply.error is not None:
            raise reply.error from RuntimeError(f"in the process that compiles:\n{reply.trace}")
        return reply.value

    def close(self) -> None:
        """Ends the process."""
        self._end()

    def _obituary(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or ["it wrote nothing."]
        return f"the process that compiles for {self._target} ended with code {code}: {lines[-1]}"


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    process.kill()
    process.communicate()
    log.close()


def serve() -> None:
    """Serves a parent: requests come on stdin, replies go to stdout; what else is printed goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        replies.write(_bytes(_reply(request)))
        replies.flush()


def _reply(request: bytes) -> _Reply:
    reply = _Reply()
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


def _bytes(reply: _Reply) -> bytes:
    try:
        return pickle.dumps(reply)
    except Exception as error:  # whatever the value's class does
        said = f"the result cannot be handed back: {type(error).__name__}: {error}"
        return pickle.dumps(_Reply(error=TargetError(said), warnings=reply.warnings))


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return TargetError(f"{type(error).__name__}: {error}")
