"""A GPU that need not be in this machine: its numbers, by name, and the C++ that makes a process believe in it.

Published numbers are rows of ``amp_fx.placement.gpus``. ``deviceless.cpp`` is built once for each torch, into the
user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from amp_fx.errors import TargetError, did_you_mean
from amp_fx.placement.devices import cuda_profile
from amp_fx.placement.gpus import GPUS, LIMITS, Gpu, Limits
from amp_fx.placement.profile import DeviceProfile

__all__ = ["TARGETS", "Target", "find_target", "load_library"]

_SOURCE = Path(__file__).with_name("deviceless.cpp")
#: as torch's headers want it
_STANDARD = "-std=c++20"


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
        """What NVIDIA's compilers call it: ``"sm_90"``."""
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


def load_library() -> None:
    """Makes this process believe in one CUDA device, as far as C++ is asked. There is no way back."""
    ctypes.CDLL(str(_library())).amp_fx_enter()


def _library() -> Path:
    """The shared library, compiled if it is not there yet: 10 to 20 seconds."""
    flags = [_STANDARD, "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    facts = [_SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.platform, *flags]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    path = _cache_folder() / f"deviceless-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(path, flags)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "amp_fx"


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
