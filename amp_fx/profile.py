"""What a device can do, in four numbers: matmul rate per dtype, memory bandwidth, and the cost of a kernel.

The cost model weighs casts against faster arithmetic with them. :func:`builtin` reads them from the tables
below, keyed only on what the device is, so that runs and ranks decide alike. :func:`measure` finds them out
on this machine; ``python -m amp_fx profile`` writes them to a file for ``options={"profile": "FILE"}``.

Rates are FLOP/s (a multiply-add counts two), bandwidth is bytes/s, read plus written, times are seconds.
Two ratios decide most placements: low precision to float32, and arithmetic to bandwidth. Both vary far less
between devices of one kind than the rates themselves.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.files import TooLongError, read_text, write_text

__all__ = ["DEVICE_TYPES", "DTYPES", "DeviceProfile", "ProfileError", "builtin", "measure", "resolve"]

DEVICE_TYPES = ("cpu", "cuda")

#: dtypes that a profile may have a matmul rate for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_FORMAT = "amp_fx device profile"
_VERSION = 1
#: bytes; a profile has about 300
_MAX_FILE = 64 * 1024


class ProfileError(AmpFxError, ValueError):
    """A device profile is wrong, cannot be read, or does not fit the device."""


@dataclass(frozen=True)
class DeviceProfile:
    """Rates of one device.

    Attributes:
        name: what was looked up or measured, for reports.
        device_type: ``"cpu"`` or ``"cuda"``.
        peak: dtype name -> sustained rate of a large matmul, in FLOP/s; always has "float32".
        bandwidth: of main or device memory, in bytes/s, reads and writes together.
        launch: what a kernel of its own costs at least, in seconds: the launch on CUDA, the call and a
            parallel region on CPU.
    """

    name: str
    device_type: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    launch: float

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Time of so many FLOP in large matmuls with operands of a dtype.

        Raises:
            ProfileError: the profile has no rate for the dtype.
        """
        if dtype not in self.peak:
            raise ProfileError(
                f"profile {self.name!r} has no matmul rate for {dtype!r}; it has {', '.join(self.peak)}."
                + did_you_mean(dtype, self.peak)
            )
        return flops / self.peak[dtype]

    def bytes_seconds(self, n: float) -> float:
        """Time to read or write so many bytes of memory."""
        return n / self.bandwidth

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form, with its format and version."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "name": self.name,
            "device_type": self.device_type,
            "peak": dict(self.peak),
            "bandwidth": self.bandwidth,
            "launch": self.launch,
        }

    def to_json(self) -> str:
        """The profile as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceProfile:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            ProfileError: another format or version, or a field that is missing, unknown or out of range.
        """
        values = dict(data)
        found = values.pop("format", None), values.pop("version", None)
        if found != (_FORMAT, _VERSION):
            raise ProfileError(
                f"not a profile of this amp_fx: format {_short(found[0])}, version {_short(found[1])}; "
                f"expected {_FORMAT!r}, {_VERSION}. Write a new one with: python -m amp_fx profile"
            )
        _same_keys("device profile", values, ("name", "device_type", "peak", "bandwidth", "launch"))
        if not isinstance(values["name"], str):
            raise ProfileError(f"device profile: name must be a string; got {_short(values['name'])}.")
        if not isinstance(values["peak"], Mapping):
            raise ProfileError(f"device profile: peak must be an object; got {_short(values['peak'])}.")
        _same_keys("peak", values["peak"], ("float32",), optional=DTYPES)
        return cls(
            name=values["name"],
            device_type=_device_type(values["device_type"]),
            peak={dtype: _positive(f"peak of {dtype}", rate) for dtype, rate in values["peak"].items()},
            bandwidth=_positive("bandwidth", values["bandwidth"]),
            launch=_positive("launch", values["launch"]),
        )

    @classmethod
    def from_json(cls, text: str) -> DeviceProfile:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ProfileError: the text is too long, not JSON, or not a device profile.
        """
        if len(text) > _MAX_FILE:
            raise ProfileError(f"not a device profile: more than {_MAX_FILE} characters.")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"a device profile is JSON: {error}.") from error
        if not isinstance(data, dict):
            raise ProfileError(f"a device profile is a JSON object; got {type(data).__name__}.")
        return cls.from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_json` to a file: all of it, or nothing and the old file stays.

        Raises:
            OSError: the file cannot be written.
        """
        write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Reads a file that :meth:`save` wrote.

        Raises:
            ProfileError: the file cannot be read, or is not a device profile.
        """
        try:
            text = read_text(path, _MAX_FILE)
        except TooLongError as error:
            raise ProfileError(f"profile {os.fspath(path)!r} {error}: not a device profile.") from error
        except OSError as error:
            raise ProfileError(f"cannot read profile {os.fspath(path)!r}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ProfileError(f"profile {os.fspath(path)!r} is not UTF-8 text.") from error
        try:
            return cls.from_json(text)
        except ProfileError as error:
            raise ProfileError(f"profile {os.fspath(path)!r}: {error}") from error


def resolve(spec: str, device_type: str) -> DeviceProfile | None:
    """The profile that an option value stands for.

    Args:
        spec: ``"auto"`` for the built-in one, ``"off"`` for none, or the path of a file.
        device_type: what the graph runs on.

    Raises:
        ProfileError: no such file, not a profile, or one of another device type.

    With a file of a GPU, a graph on the CPU has the built-in profile: graph breaks leave such pieces.
    """
    _device_type(device_type)
    if spec == "off":
        return None
    if spec == "auto":
        return builtin(device_type)
    if not os.path.exists(spec):
        raise ProfileError(
            f"Unknown profile {spec!r}; valid: 'auto', 'off', or a file that "
            "`python -m amp_fx profile -o FILE` wrote." + _near_profile(spec)
        )
    profile = DeviceProfile.load(spec)
    if device_type == "cpu" and profile.device_type != "cpu":
        return builtin("cpu")
    if profile.device_type != device_type:
        raise ProfileError(
            f"profile {spec!r} is of device type {profile.device_type!r}, the graph runs on {device_type!r}; "
            f"measure that one with `python -m amp_fx profile --device {device_type} -o FILE`, or use 'auto'."
        )
    return profile


# --- what the tables say ---------------------------------------------------------------------------


class _Cpu(NamedTuple):
    name: str
    flags: frozenset[str]  # names of torch.cpu.get_capabilities(), and "darwin"
    float32: float  # sustained FLOP/s of one thread
    bfloat16: float  # relative to float32
    float16: float  # relative to float32


#: The first row whose flags the CPU has counts. The ratios matter, the rates less so: FLOP a cycle times a
#: sustained clock, times 0.7 for what a GEMM reaches. "Measured": torch 2.13, one thread of a Zen 4, where
#: fp32 does 100e9, matrices of 512 x 512, harmonic mean of the three layouts of a training step.
_CPUS = (
    # AMX tiles do 1024 bf16 operations a cycle, 16 times what two AVX-512 FMA pipes do in fp32 (Intel 64 and
    # IA-32 Optimization Reference Manual, chapter on AMX); half is left at AMX clocks and memory speed.
    _Cpu("amx_fp16", frozenset({"amx_bf16", "amx_fp16"}), 100e9, 8.0, 8.0),
    # Sapphire and Emerald Rapids: fp16 has AVX-512 vectors, but oneDNN widens and accumulates in fp32.
    _Cpu("amx_bf16", frozenset({"amx_bf16", "avx512_fp16"}), 100e9, 8.0, 1.0),
    # An AMX CPU whose hypervisor hides AVX512-FP16.
    _Cpu("amx_bf16 without fp16", frozenset({"amx_bf16"}), 100e9, 8.0, 0.03),
    # Sapphire Rapids whose hypervisor hides AMX: vdpbf16ps does two multiply-adds a lane.
    _Cpu("avx512_bf16 avx512_fp16", frozenset({"avx512_bf16", "avx512_fp16"}), 100e9, 2.0, 1.0),
    # Zen 5: bf16 vectors are as wide as the registers, and MKL runs fp32 with AVX2 on AMD. Measured on one: 4.4.
    _Cpu("avx512_bf16 zen5", frozenset({"avx512_bf16", "avx512_vp2intersect"}), 90e9, 4.0, 0.03),
    # Cooper Lake, Zen 4. Measured: bf16 2.2 in a GEMM, 1.8 in a whole GPT step. oneDNN has no fp16
    # kernel here, ATen's own loops do 0.15 (linear) or 0.02 (mm): 0.04 in all, less for larger matrices.
    _Cpu("avx512_bf16", frozenset({"avx512_bf16"}), 100e9, 2.0, 0.03),
    # Skylake to Ice Lake: oneDNN emulates bf16 in fp32 vectors. Measured with ONEDNN_MAX_CPU_ISA=AVX512_CORE:
    # 0.36 alone, 0.53 where other processes take half of the time (pytorch#86270: half as fast).
    _Cpu("avx512", frozenset({"avx512_bw"}), 100e9, 0.4, 0.03),
    # ATen does not ask oneDNN for 16-bit matmuls below AVX-512, but runs its loops. Measured with
    # ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY at AVX2: 0.04. Users report down to 1/90 (pytorch#118499).
    _Cpu("avx2", frozenset({"avx2"}), 70e9, 0.03, 0.03),
    # Apple: fp32 goes to Accelerate, which has matrix units; 16 bits go to ATen's loops. Order of magnitude.
    _Cpu("apple", frozenset({"neon", "darwin"}), 200e9, 0.01, 0.01),
    # Neoverse V1, N2, V2: bfmmla does four times the multiply-adds of an fp32 FMA (Arm Architecture Reference
    # Manual, FEAT_BF16); half of that is assumed to be reached. fp16: loops, as on x86.
    _Cpu("arm_bf16", frozenset({"neon", "bf16"}), 60e9, 2.0, 0.03),
    # Neoverse N1 and older: as avx2.
    _Cpu("arm", frozenset({"neon"}), 30e9, 0.03, 0.03),
    # Anything else: four lanes, multiply and add; loops for 16 bits, 1e9 to 3e9 measured with
    # ATEN_CPU_CAPABILITY=default.
    _Cpu("generic", frozenset(), 10e9, 0.1, 0.1),
)

#: bytes/s that one thread can ask for (measured: 17e9 to 24e9 alone, 8e9 on each of two busy cores), and that
#: a socket gives (eight channels of DDR4-3200: 205e9)
_CPU_BANDWIDTH = 15e9, 200e9

#: seconds; measured: 1 to 2 us for the call, the rest is an OpenMP region
_CPU_LAUNCH = 5e-6

#: oneDNN may round fp32 operands to bf16 (float32_matmul_precision "medium"): rate relative to bf16, measured
_CPU_FLOAT32_AS_BFLOAT16 = 0.65


class _Gpu(NamedTuple):
    name: str
    float32: float  # TFLOP/s without tensor cores
    tf32: float  # TFLOP/s, where the user allows it
    float16: float  # TFLOP/s, dense, accumulated in fp32
    bfloat16: float  # TFLOP/s, dense
    bandwidth: float  # GB/s


#: Compute capability -> datasheet numbers of its common card. A capability between two rows is the lower one.
_GPUS = {
    # No tensor cores: cuBLAS computes 16-bit matmuls in fp32 FMAs; bf16 is emulated, half of that is assumed.
    (5, 0): _Gpu("M40", 6.8, 6.8, 6.8, 3.4, 288),  # Tesla M40 datasheet
    (6, 0): _Gpu("P100", 10.6, 10.6, 10.6, 5.3, 732),  # Tesla P100 SXM2 datasheet
    (6, 1): _Gpu("P40", 11.8, 11.8, 11.8, 5.9, 346),  # Tesla P40 datasheet
    # Tensor cores for fp16 only.
    (7, 0): _Gpu("V100", 15.7, 15.7, 125, 7.8, 900),  # Tesla V100 SXM2 datasheet
    (7, 5): _Gpu("T4", 8.1, 8.1, 65, 4.0, 320),  # T4 datasheet
    # Tensor cores for fp16, bf16 and TF32.
    (8, 0): _Gpu("A100", 19.5, 156, 312, 312, 1555),  # A100 datasheet, 40 GB
    (8, 6): _Gpu("RTX 3090", 35.6, 35.6, 71, 71, 936),  # NVIDIA Ampere GA102 whitepaper, table 2
    (8, 9): _Gpu("RTX 4090", 82.6, 82.6, 165.2, 165.2, 1008),  # NVIDIA Ada whitepaper, appendix A
    (9, 0): _Gpu("H100", 66.9, 494.7, 989.4, 989.4, 3350),  # H100 datasheet, SXM5; an H200 has 4800 GB/s
    (10, 0): _Gpu(
        "B200", 75, 1100, 2250, 2250, 7700
    ),  # Blackwell datasheet, HGX B200 (half of the sparse rates)
    (12, 0): _Gpu(
        "RTX 5090", 104.8, 104.8, 209.5, 209.5, 1792
    ),  # NVIDIA RTX Blackwell whitepaper, appendix A
}

#: ROCm numbers its architectures otherwise. AMD Instinct MI200 datasheet, one die of an MI250X.
_ROCM = _Gpu("MI250X", 47.9, 47.9, 191.5, 191.5, 1638)

#: what a graph for CUDA is planned with where there is no CUDA device, such as an export on a build machine
_ASSUMED = (8, 0)

#: large GEMMs and copies reach this part of the datasheet: on an H200 bf16 sustains about 790 of 989 TFLOP/s
_SUSTAINED = 0.8

#: seconds between the starts of empty kernels in one stream
_CUDA_LAUNCH = 4e-6


def builtin(device_type: str) -> DeviceProfile:
    """The table row of this machine's device.

    Read from what the device is (instruction flags and thread count, compute capability), never from what
    it is doing; environment variables that hide instructions from libraries do not count. The one setting
    that counts is what fp32 matmuls are allowed to be computed in: TF32, or bf16 on CPU.

    Raises:
        ProfileError: not a device type with a table.
    """
    if _device_type(device_type) == "cuda":
        return _cuda_profile(*_cuda_row())
    return _cpu_profile(_cpu_row(_cpu_flags()), torch.get_num_threads())


def _cpu_flags() -> frozenset[str]:
    flags = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    if sys.platform == "darwin":
        flags.add("darwin")
    return frozenset(flags)


def _cpu_row(flags: frozenset[str]) -> _Cpu:
    return next(row for row in _CPUS if row.flags <= flags)


def _cpu_profile(row: _Cpu, threads: int) -> DeviceProfile:
    rate = row.float32 * threads
    low = {"bfloat16": rate * row.bfloat16, "float16": rate * row.float16}
    per_thread, socket = _CPU_BANDWIDTH
    return DeviceProfile(
        name=f"{row.name}, {threads} threads",
        device_type="cpu",
        peak={
            "float32": _float32_rate("cpu", rate, max(rate, low["bfloat16"] * _CPU_FLOAT32_AS_BFLOAT16)),
            **low,
        },
        bandwidth=min(per_thread * threads, socket),
        launch=_CPU_LAUNCH,
    )


def _cuda_row() -> tuple[str, _Gpu]:
    if not torch.cuda.is_available():
        return f"sm_{_ASSUMED[0]}{_ASSUMED[1]} assumed, no device", _GPUS[_ASSUMED]
    if torch.version.hip is not None:
        return "rocm", _ROCM
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", _gpu_row((major, minor))


def _gpu_row(capability: tuple[int, int]) -> _Gpu:
    return _GPUS[max((known for known in _GPUS if known <= capability), default=min(_GPUS))]


def _cuda_profile(label: str, row: _Gpu) -> DeviceProfile:
    rates = {
        "float32": _float32_rate("cuda", row.float32, row.tf32),
        "bfloat16": row.bfloat16,
        "float16": row.float16,
    }
    return DeviceProfile(
        name=f"{label} ({row.name})",
        device_type="cuda",
        peak={dtype: rate * 1e12 * _SUSTAINED for dtype, rate in rates.items()},
        bandwidth=row.bandwidth * 1e9 * _SUSTAINED,
        launch=_CUDA_LAUNCH,
    )


def _float32_rate(device_type: str, exact: float, relaxed: float) -> float:
    """The rate of an fp32 matmul: ``relaxed`` if the user lets it be computed in less than fp32.

    Read from ``fp32_precision``, which follows ``allow_tf32``, ``set_float32_matmul_precision`` and the
    global setting; the older getters raise once a program has used both generations of the API.
    """
    if device_type == "cuda":
        return relaxed if torch.backends.cuda.matmul.fp32_precision == "tf32" else exact
    # oneDNN has no faster TF32 on today's CPUs, only bf16
    return relaxed if torch.backends.mkldnn.matmul.fp32_precision == "bf16" else exact  # type: ignore[attr-defined]  # set by property


# --- measuring -------------------------------------------------------------------------------------

#: a measurement is repeated at least so often
_ROUNDS = 20

#: a median so far above the best round means that something else used the machine
_BUSY = 1.5
#: seconds; no kernel takes so long to start where its threads have cores to run on
_ABSURD_LAUNCH = 500e-6

#: rows of the square matrices that are multiplied, until one takes its share of the time
_GEMM_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)

#: elements of the float32 tensors that are copied; the last are larger than the caches of most devices
_COPY_SIZES = {"cpu": (1 << 20, 1 << 23, 1 << 25), "cuda": (1 << 20, 1 << 23, 1 << 25, 1 << 27)}

#: elements of the byte tensor of the empty kernel: one more than ATen's grain size, so that CPUs open a
#: parallel region
_LAUNCH_SIZE = 32768 + 1
_LAUNCHES = 10


class _Task(NamedTuple):
    """Something to time, and how much work it does: FLOP, bytes or kernels."""

    run: Callable[[], None]
    work: float


def measure(
    device_type: str, seconds: float = 3.0, progress: Callable[[str], None] | None = None
) -> DeviceProfile:
    """Measures this machine.

    Everything is measured in turns, so that a falling clock hurts all numbers alike, and the best round
    counts: other processes only ever slow a round down (on two shared cores a parallel region may take 10 ms
    instead of 5 us, and the median with it). A matmul counts in the three layouts of a training step:
    forward, gradient of the input, gradient of the weight. Without kernels of its own a dtype may be fast in
    one of them only.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``, the current device.
        seconds: about how long to take; less than 1 means small sizes and rough numbers.
        progress: called with a line of text for each step, and with a warning if the machine was busy.

    Raises:
        ProfileError: there is no such device, or it is too busy for the numbers to mean anything.
    """
    if _device_type(device_type) == "cuda" and not torch.cuda.is_available():
        raise ProfileError("there is no CUDA device here to measure; valid here: 'cpu'.")
    say = progress or (lambda line: None)
    start = time.perf_counter()
    share = seconds / (_ROUNDS * (len(DTYPES) + 2))
    tasks = {}
    for name, dtype in DTYPES.items():
        say(f"matmul {name}")
        gemms = (_gemm(size, dtype, device_type) for size in _GEMM_SIZES)
        tasks[name] = _largest(gemms, 8, share, device_type)
    say("copy")
    copies = (_copy(size, device_type) for size in _COPY_SIZES[device_type])
    tasks["bandwidth"] = _largest(copies, 4, share, device_type)
    tasks["launch"] = _launch(device_type)

    samples: dict[str, list[float]] = {name: [] for name in tasks}
    say("all of them in turns")
    while len(samples["launch"]) < _ROUNDS or time.perf_counter() - start < seconds:
        for name, task in tasks.items():
            samples[name].append(_clock(task, device_type) / task.work)
    best = {name: min(found) for name, found in samples.items()}
    if best["launch"] > _ABSURD_LAUNCH:
        raise ProfileError(
            f"too busy to measure: a kernel starts in {best['launch'] * 1e3:.1f} ms at best, so its "
            "threads wait for cores; stop other work, or use fewer threads (OMP_NUM_THREADS)."
        )
    spread = max(median(samples[name]) / best[name] for name in samples)
    if spread > _BUSY:
        say(f"warning: rounds differ {spread:.1f} times, so the machine is busy; measure again when idle")
    return DeviceProfile(
        name=f"{_device_name(device_type)}, measured",
        device_type=device_type,
        peak={name: 1 / best[name] for name in DTYPES},
        bandwidth=1 / best["bandwidth"],
        launch=best["launch"],
    )


def _device_name(device_type: str) -> str:
    return torch.cuda.get_device_name() if device_type == "cuda" else builtin("cpu").name


def _clock(task: _Task, device_type: str) -> float:
    if device_type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    task.run()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _largest(tasks: Iterable[_Task], growth: int, share: float, device_type: str) -> _Task:
    """The last task that takes at most ``share`` seconds; each is ``growth`` times the one before. Warm."""
    task = None
    for task in tasks:
        # the first call warms up
        if min(_clock(task, device_type) for _ in range(4)) * growth > share:
            break
    assert task is not None
    return task


def _gemm(size: int, dtype: torch.dtype, device_type: str) -> _Task:
    # normal values: constant ones let a GPU clock higher than real data does
    generator = torch.Generator(device_type).manual_seed(0)
    a, b = (torch.randn(size, size, device=device_type, generator=generator).to(dtype) for _ in range(2))

    def run() -> None:
        torch.mm(a, b.t())
        torch.mm(a, b)
        torch.mm(a.t(), b)

    return _Task(run, 3 * 2 * size**3)


def _copy(size: int, device_type: str) -> _Task:
    source = torch.ones(size, device=device_type)
    target = torch.zeros_like(source)

    def run() -> None:
        target.copy_(source)

    return _Task(run, source.nbytes + target.nbytes)


def _launch(device_type: str) -> _Task:
    source = torch.zeros(_LAUNCH_SIZE, dtype=torch.uint8, device=device_type)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(_LAUNCHES):
            torch.bitwise_not(source, out=target)

    return _Task(run, _LAUNCHES)


# --- checks ----------------------------------------------------------------------------------------


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _device_type(value: object) -> str:
    if value not in DEVICE_TYPES:
        raise ProfileError(
            f"Unknown device type {_short(value)}; valid: {', '.join(map(repr, DEVICE_TYPES))}."
            + did_you_mean(str(value)[:60], DEVICE_TYPES)
        )
    return str(value)


def _positive(what: str, value: object) -> float:
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < float(value) < math.inf:
            return float(value)
    except OverflowError:  # an int beyond any float
        pass
    raise ProfileError(f"device profile: {what} must be a positive number; got {_short(value)}.")


def _same_keys(
    what: str, values: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    valid = dict.fromkeys((*required, *optional))
    for key in values:
        if key not in valid:
            raise ProfileError(
                f"{what}: unknown key {_short(key)}; valid: {', '.join(valid)}."
                + did_you_mean(str(key)[:60], valid)
            )
    missing = [key for key in required if key not in values]
    if missing:
        raise ProfileError(f"{what}: {', '.join(missing)} missing; has {', '.join(values) or 'nothing'}.")


def _near_profile(spec: str) -> str:
    """A hint from the two words and from the JSON files where the path points."""
    path = Path(spec)
    try:
        files = {str(found): found.name for found in path.parent.glob("*.json")}
    except OSError:
        files = {}
    hint = did_you_mean(spec, ["auto", "off", *files])
    return hint or did_you_mean(str(path.with_suffix(".json")), files)
