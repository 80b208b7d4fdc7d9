"""A process of its own that compiles for a target, so that nothing is patched in the user's."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import weakref
from dataclasses import dataclass, field
from typing import IO, Any

from amp_fx.errors import TargetError
from amp_fx.targets.table import find_target

__all__ = ["Reply", "TargetProcess"]


@dataclass
class Reply:
    """What the process answers to a call.

    Attributes:
        value: what the function returned.
        error: what it raised instead.
        trace: where it did.
        warnings: of amp_fx, in order.
    """

    value: Any = None
    error: Exception | None = None
    trace: str = ""
    warnings: list[Warning] = field(default_factory=list)


class TargetProcess:
    """Calls functions in a process that compiles for a target. It ends when nobody has a reference to this, or earlier.

    Args:
        target: ``"cuda:h100"``.

    Raises:
        TargetError: unknown target, or this machine cannot compile for it.
    """

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
            [sys.executable, "-m", "amp_fx.targets.serving"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self._end = weakref.finalize(self, _end, self._process, self._log)
        try:
            self.call("amp_fx.targets.serving:enter", self._target)
        except BaseException:
            self.close()
            raise

    def call(self, function: str, *args: Any) -> Any:
        """Calls ``"package.module:function"`` there.

        Warnings of amp_fx are given here as well.

        Args:
            function: one that the process can import.
            *args: are pickled, as is what the function returns.

        Raises:
            TargetError: the process has ended.
            Exception: whatever the function raises.
        """
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None:
            raise AssertionError("the process has pipes")
        try:
            # as bytes: what cannot be read there is an error of the call, and leaves the pipe in order
            pickle.dump(pickle.dumps((function, args)), requests)
            requests.flush()
            reply: Reply = pickle.load(replies)
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
