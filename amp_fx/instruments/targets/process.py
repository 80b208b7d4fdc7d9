"""A GPU that need not be in this machine, by name; the C++ that makes a process believe in it, and that process.

Published numbers are rows of ``amp_fx.precision.placement.gpus``. ``deviceless.cpp`` is built once for each torch,
into the user's cache folder. Compiling has a process of its own, so that nothing is patched in the user's.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from amp_fx.errors import FallbackWarning, ScalingWarning, TargetError, did_you_mean
from amp_fx.precision.placement.devices import cuda_profile
from amp_fx.precision.placement.gpus import GPUS, LIMITS, Gpu, Limits
from amp_fx.precision.placement.profile import DeviceProfile

_SOURCE = Path(__file__).with_name("deviceless.cpp")


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: its published numbers, and what code may use on one multiprocessor."""

    gpu: Gpu
    limits: Limits

    @property
    def name(self) -> str:
        """As users write it: ``"cuda:h100"``."""
        return f"cuda:{self.gpu.key}"

    @property
    def architecture(self) -> str:
        """The name that NVIDIA's compilers have for it: ``"sm_90"``."""
        return "sm_{}{}".format(*self.gpu.capability)

    @property
    def profile(self) -> DeviceProfile:
        """The rates that the cost model weighs with."""
        return cuda_profile(self.architecture, self.gpu)


#: by name. Triton compiles for capability 8.0 and later ones
TARGETS = {
    target.name: target
    for target in (Target(gpu, LIMITS[gpu.capability]) for gpu in GPUS if gpu.capability in LIMITS)
}


def find_target(name: str) -> Target:
    """The target of a name such as ``"cuda:h100"``; a TargetError names the nearest one."""
    found = TARGETS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise TargetError(
            f"Unknown target {name!r}; valid: {', '.join(TARGETS)}."
            + (did_you_mean(str(name).lower(), TARGETS) or did_you_mean(f"cuda:{name}".lower(), TARGETS))
        )
    return found


def library() -> Path:
    """The library by which a process believes in a CUDA device, compiled if it is not there yet: 10 to 20 seconds."""
    # C++20, as torch's headers want it
    flags = ["-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    facts = [_SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.platform, *flags]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache else Path.home() / ".cache"
    path = folder / "amp_fx" / f"deviceless-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(path, flags)
    return path


def _compile(path: Path, flags: list[str]) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise TargetError(
            f"compiling for an absent GPU takes a C++ compiler, and there is no {compiler!r}: install g++ "
            "(Debian, Ubuntu: apt install g++) or set CXX."
        )
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, *flags, "-shared", "-fPIC", f"-I{root / 'include'}",
            f"-I{root / 'include/torch/csrc/api/include'}", str(_SOURCE), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10",
            "-o", str(made),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
            raise TargetError(
                f"{compiler} does not compile {_SOURCE.name} for torch {torch.__version__}: {errors[0]}"
            )
        # at once, as other processes may do the same
        os.replace(made, path)


# --- the process, both of its ends ---


@dataclass
class _Reply:
    """The process's answer to a call: a value or an error with its traceback, and the warnings of amp_fx."""

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
            # fake values would look for memory on a GPU that is there
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.child = subprocess.Popen(
            [sys.executable, "-c", "from amp_fx.instruments.targets.process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        #: ends the process
        self.close = weakref.finalize(self, _end, self.child, self._log)
        try:
            self.call("amp_fx.instruments.targets._torch:enter", self._target)
        except BaseException:
            self.close()
            raise

    def call(self, function: str, *args: Any) -> Any:
        """Calls ``"package.module:function"`` there; raises here what it raises, with the warnings of amp_fx.

        Arguments are pickled, as is what the function returns. TargetError where the process ends.
        """
        requests, replies = self.child.stdin, self.child.stdout
        if requests is None or replies is None:
            raise AssertionError("the process has pipes")
        try:
            # as bytes: what cannot be read there is an error of the call, and leaves the pipe in order
            pickle.dump(pickle.dumps((function, args)), requests)
            requests.flush()
            reply: _Reply = pickle.load(replies)
        except (EOFError, BrokenPipeError) as ended:
            code = self.child.wait()
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines() or ["it wrote nothing."]
            raise TargetError(
                f"the process that compiles for {self._target} ended with code {code}: {lines[-1]}"
            ) from ended
        for warning in reply.warnings:
            warnings.warn(warning, stacklevel=2)
        if reply.error is not None:
            raise reply.error from RuntimeError(f"in the process that compiles:\n{reply.trace}")
        return reply.value


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
