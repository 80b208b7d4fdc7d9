"""What this machine and the installed torch can do, and what amp_fx will therefore do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amp_fx.errors import install_hint
from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.profile import FLOAT8, INT8, DeviceProfile
from amp_fx.precision.plans.files import as_data

#: instruction sets that decide how fast a CPU multiplies below 32 bits -> the names that torch has for them
_INSTRUCTIONS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "AMX": ("amx_bf16", "amx_tile"),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16"),
}
#: libraries that change what works
_LIBRARIES = (
    "triton", "onnx", "onnxscript", "onnxruntime", "matplotlib", "transformers", "accelerate", "lightning", "openvino",
)  # fmt: skip
_VARIABLES = ("TORCH", "INDUCTOR", "TRITON", "OMP_", "MKL_", "KMP_", "ONEDNN", "DNNL", "CUDA_", "CXX")


@dataclass(frozen=True)
class Environment:
    """The findings of :func:`environment`; ``str`` says them on one screen.

    Attributes:
        versions: ``"amp_fx"``, ``"torch"``, ``"python"``, ``"system"`` and installed libraries -> version.
        cpu: name, threads that torch uses, cores, and which instruction sets there are.
        gpus: of each name, compute capability and bytes of memory.
        profiles: device type -> the built-in profile.
        tools: ``"compiler"`` and ``"dot"`` -> version line or path; empty where it is missing.
        variables: of the environment that torch, Inductor or their libraries read.
        follows: what amp_fx will do, in sentences.
    """

    versions: dict[str, str]
    cpu: dict[str, Any]
    gpus: list[dict[str, Any]]
    profiles: dict[str, DeviceProfile]
    tools: dict[str, str]
    variables: dict[str, str]
    follows: list[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form."""
        return as_data(vars(self))

    def __str__(self) -> str:
        own = ("amp_fx", "torch", "python", "system")
        lines = [
            "{} {}, torch {}, Python {}, {}".format("amp_fx", *(self.versions[name] for name in own)),
            "",
        ]
        has = ", ".join(name for name in _INSTRUCTIONS if self.cpu[name]) or "none"
        rows = [
            ("CPU", f"{self.cpu['name']}, {self.cpu['threads']} of {self.cpu['cores']} cores used"),
            ("", f"has {has} (of {', '.join(_INSTRUCTIONS)})"),
        ]
        for gpu in self.gpus:
            memory = f"{gpu['memory'] / 2**30:.0f} GiB"
            rows.append(("GPU", f"{gpu['name']}, sm_{gpu['capability']}, {memory}"))
        if not self.gpus:
            rows.append(("GPU", "none"))
        for device, profile in self.profiles.items():
            rates = (f"{dtype} {rate / profile.peak['float32']:.3g}" for dtype, rate in profile.peak.items())
            rows.append(("rates", f"{device}, {profile.name}, times float32: {', '.join(rates)}"))
        rows += [(name, text or "missing") for name, text in self.tools.items()]
        libraries = [f"{name} {version}" for name, version in self.versions.items() if name not in own]
        rows.append(("libraries", ", ".join(libraries) or "none"))
        rows += [("variables", f"{name}={value}") for name, value in self.variables.items()]
        for name, text in rows:
            lines += textwrap.wrap(text, 100, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)
        return "\n".join([*lines, "", "what follows", *(f"  {text}" for text in self.follows)])


def environment() -> Environment:
    """Looks at this machine and the installed libraries; nothing is compiled or timed."""
    flags = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    cpu = {
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
        **{name: any(flag in flags for flag in known) for name, known in _INSTRUCTIONS.items()},
    }
    gpus, profiles = [], {"cpu": builtin("cpu")}
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = f"{facts.major}{facts.minor}"
        gpus.append({"name": facts.name, "capability": capability, "memory": facts.total_memory})
    if gpus:
        profiles["cuda"] = builtin("cuda")
    versions = {
        "amp_fx": _version("amp_fx") or "0",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: found for name in _LIBRARIES if (found := _version(name))},
    }
    tools = {"compiler": _compiler(), "dot": shutil.which("dot") or ""}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    follows = [*_follows(profiles, versions, tools)]
    return Environment(versions, cpu, gpus, profiles, tools, variables, follows)


def _follows(
    profiles: dict[str, DeviceProfile], versions: dict[str, str], tools: dict[str, str]
) -> Iterator[str]:
    """Sentences about what amp_fx does here, and what to install for more."""
    for device, profile in profiles.items():
        wide, bf16, fp16 = (profile.peak.get(name, 0.0) for name in ("float32", "bfloat16", "float16"))
        if bf16 > wide:
            yield f"On the {device}, matmuls and convolutions run in bfloat16 where that repays their casts."
        elif fp16 > wide:
            yield f"On the {device}, matmuls and convolutions run in float16; training takes amp_fx.GradScaler."
        else:
            yield f"The {device} multiplies no faster in 16 bits: graphs stay in fp32."
        if bf16 > wide >= fp16:
            yield f"On the {device}, dtype='float16' gains nothing, and graphs stay in fp32."
        for policy, rate, where in (("int8", INT8, "without gradients"), ("fp8", FLOAT8, "in training, too")):
            if profile.peak.get(rate, 0.0) > max(bf16, fp16, wide):
                yield f"On the {device}, policy='{policy}' runs matmuls in {policy} where that gains, {where}."
            else:
                yield f"On the {device}, policy='{policy}' means 'autocast': there is no faster {policy}."
    if not tools["compiler"]:
        yield "Inductor cannot compile for the CPU: install g++ (Debian, Ubuntu: apt install g++) or set CXX."
    if "triton" in versions and tools["compiler"]:
        yield "explain and calibrate take target='cuda:h100', a GPU that is not here; see the command targets."
    elif "triton" not in versions:
        yield f"GPUs that are not here take Triton: {install_hint('targets')}."
    if not tools["dot"]:
        yield "Pictures as .svg and .png take Graphviz's dot (apt install graphviz); .html and .beside.svg do not."
    if missing := [name for name in ("onnx", "onnxscript") if name not in versions]:
        yield f"ONNX files take {' and '.join(missing)}: {install_hint('onnx')}."


def _cpu_name() -> str:
    """The name that the system has for the processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _compiler() -> str:
    """The first line that the C++ compiler of Inductor says of its version; empty where there is none."""
    compiler = os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++")
    if (path := shutil.which(compiler)) is None:
        return ""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return next(iter(said.stdout.splitlines()), path)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
