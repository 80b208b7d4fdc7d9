"""Profiles by name: the built-in tables of devices, and what ``options={"profile": ...}`` stands for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from amp_fx.errors import did_you_mean
from amp_fx.precision.placement.gpus import ROCM, Gpu, gpu_row
from amp_fx.precision.placement.profile import (
    DEVICE_TYPES,
    FLOAT8,
    INT8,
    DeviceProfile,
    ProfileError,
    check_device_type,
)  # fmt: skip


def resolve(spec: str | DeviceProfile, device_type: str) -> DeviceProfile | None:
    """The profile that an option stands for on a device: ``"auto"``, ``"off"`` for none, the path of a file, or itself.

    With a file of a GPU, a graph on the CPU has the built-in profile: graph breaks leave such pieces. Device types that
    have no profiles (XPU, MPS) have none with ``"auto"``: every listed op goes low. ProfileError where there is no such
    file, or it is no profile, or one of another device type.
    """
    if spec == "off" or (spec == "auto" and device_type not in DEVICE_TYPES):
        return None
    check_device_type(device_type)
    if isinstance(spec, DeviceProfile):
        return spec
    if spec == "auto":
        return builtin(device_type)
    profile = load(spec)
    if device_type == "cpu" and profile.device_type != "cpu":
        return builtin("cpu")
    if profile.device_type != device_type:
        raise ProfileError(
            f"profile {spec!r} is of device type {profile.device_type!r}, the graph runs on {device_type!r}; "
            f"measure that one with `python -m amp_fx profile --device {device_type} -o FILE`, or use 'auto'."
        )
    return profile


def load(spec: str) -> DeviceProfile:
    """The profile in the file that an option names; ProfileError where there is no such file, or it is none."""
    if not os.path.exists(spec):
        raise ProfileError(
            f"Unknown profile {spec!r}; valid: 'auto', 'off', or a file that "
            "`python -m amp_fx profile -o FILE` wrote." + _near_profile(spec)
        )
    return DeviceProfile.load(spec)


def _near_profile(spec: str) -> str:
    """A hint from the two words and from the JSON files where the path points."""
    path = Path(spec)
    try:
        files = [*map(str, path.parent.glob("*.json"))]
    except OSError:
        files = []
    return did_you_mean(spec, ["auto", "off", *files]) or did_you_mean(str(path.with_suffix(".json")), files)


class _Cpu(NamedTuple):
    name: str
    flags: frozenset[str]  # names of torch.cpu.get_capabilities(), and "darwin"
    float32: float  # sustained FLOP/s of one thread
    bfloat16: float  # relative to float32
    float16: float  # relative to float32
    int8: float | None = None  # likewise: packed weights, products summed in int32; None: slower than bf16
    calls: Mapping[str, float] = {}  # as in DeviceProfile, of one thread; what is known


#: a single query without AMX, where the flash kernel multiplies in a loop. Measured on the Zen 4, assumed elsewhere: 16
#: heads of 64, 129 keys: 233 us, fp32 62, as two products 38; 12 heads, 2,048 keys: 2,951, 896 and 526 us
_LOOP = {"flash_query": 1.9e-9}
#: with AMX, measured on a Sapphire Rapids. 12 heads of 64, a single query, 2,048 keys: 466 us, as two products 581. The
#: ``flash_product`` is from a ViT's and a BERT's calls: 833 us for 12 x 197 x 197, 333 for 12 x 128 x 128
_AMX_FLASH = {
    "flash_query": 0.3e-9, "flash_block": 3e-6, "flash_product": 4.1e-12,
    "flash_block_backward": 72e-6, "flash_product_backward": 5.3e-12,
}  # fmt: skip
#: fitted to 19 sizes on a Xeon with AMX, one thread, torch 2.13 (4 to 256 heads, 16 to 1,024 queries): 0.7 to 1.3 of
#: the times found. In inference products took 0.94 to 3.8 of the flash kernel's time, in training 0.2 to 1.8
_AMX_ATTENTION = {
    **_AMX_FLASH, "products_head": 1.6e-6, "products_score": 2.6e-9, "products_element": 0.26e-9,
    "products_head_backward": 4.1e-6, "products_score_backward": 5.6e-9, "products_element_backward": 4.3e-9,
}  # fmt: skip
#: fitted to 18 sizes
_ZEN4_FLASH = {
    **_LOOP, "flash_block": 4e-6, "flash_product": 10e-12,
    "flash_block_backward": 45e-6, "flash_product_backward": 7e-12,
}  # fmt: skip
#: measured
_ZEN5_FLASH = {
    "flash_query": 1.4e-9, "flash_block": 3.5e-6, "flash_product": 12e-12,
    "flash_block_backward": 48e-6, "flash_product_backward": 7.5e-12,
}  # fmt: skip

#: The first row whose flags the CPU has counts. The ratios matter, the rates less so: FLOP a cycle times a
#: sustained clock, times 0.7 for what a GEMM reaches. "Measured": torch 2.13, one thread of a Zen 4, where
#: fp32 does 100e9, matrices of 512 x 512, harmonic mean of the three layouts of a training step.
CPUS = (
    # AMX tiles do 1024 bf16 operations a cycle, 16 times what two AVX-512 FMA pipes do in fp32 (Intel 64 and
    # IA-32 Optimization Reference Manual, chapter on AMX); half is left at AMX clocks and memory speed.
    # int8: twice as many. Measured on a Sapphire Rapids, one thread, packed weights: 1.6 to 1.85 times bf16 from 128
    # rows on. There bf16 does 1200e9, so twice the rate above would gain more than is there; 11 has what was found
    # between the two.
    _Cpu("amx_fp16", frozenset({"amx_bf16", "amx_fp16"}), 100e9, 8.0, 8.0, 11.0, _AMX_ATTENTION),
    # Sapphire and Emerald Rapids: fp16 has AVX-512 vectors, but oneDNN widens and accumulates in fp32.
    _Cpu("amx_bf16", frozenset({"amx_bf16", "avx512_fp16"}), 100e9, 8.0, 1.0, 11.0, _AMX_ATTENTION),
    # An AMX CPU whose hypervisor hides AVX512-FP16.
    _Cpu("amx_bf16 without fp16", frozenset({"amx_bf16"}), 100e9, 8.0, 0.03, 11.0, _AMX_ATTENTION),
    # Sapphire Rapids whose hypervisor hides AMX: vdpbf16ps does two multiply-adds a lane.
    _Cpu("avx512_bf16 avx512_fp16", frozenset({"avx512_bf16", "avx512_fp16"}), 100e9, 2.0, 1.0, 4.0, _LOOP),
    # Zen 5: bf16 vectors are as wide as the registers, and MKL runs fp32 with AVX2 on AMD. Measured on one: 4.4.
    _Cpu(
        "avx512_bf16 zen5",
        frozenset({"avx512_bf16", "avx512_vp2intersect"}),
        90e9,
        4.0,
        0.03,
        8.0,
        _ZEN5_FLASH,
    ),
    # Cooper Lake, Zen 4. Measured: bf16 2.2 in a GEMM, 1.8 in a whole GPT step. oneDNN has no fp16
    # kernel here, ATen's own loops do 0.15 (linear) or 0.02 (mm): 0.04 in all, less for larger matrices. int8
    # (VNNI), a layer of 2048 with packed weights: 1.5 times bf16 at 1 row, 1.8 at 16, 2.0 at 128.
    _Cpu("avx512_bf16", frozenset({"avx512_bf16"}), 100e9, 2.0, 0.03, 4.0, _ZEN4_FLASH),
    # Cascade Lake to Ice Lake. bf16 as in the next row. int8: assumed; the Zen 4 reaches 4.0 by the same instructions.
    _Cpu("avx512 vnni", frozenset({"avx512_bw", "avx512_vnni"}), 100e9, 0.4, 0.03, 3.0),
    # Skylake: oneDNN emulates bf16 in fp32 vectors. Measured with ONEDNN_MAX_CPU_ISA=AVX512_CORE:
    # 0.36 alone, 0.53 where other processes take half of the time (pytorch#86270: half as fast).
    _Cpu("avx512", frozenset({"avx512_bw"}), 100e9, 0.4, 0.03),
    # Alder Lake to Arrow Lake. 16 bits as in the next row, int8 as with AVX-512.
    _Cpu("avx2 vnni", frozenset({"avx2", "avx_vnni"}), 70e9, 0.03, 0.03, 3.0),
    # ATen does not ask oneDNN for 16-bit matmuls below AVX-512, but runs its loops. Measured with
    # ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY at AVX2: 0.04. Users report down to 1/90 (pytorch#118499).
    _Cpu("avx2", frozenset({"avx2"}), 70e9, 0.03, 0.03),
    # Apple: fp32 goes to Accelerate, which has matrix units; 16 bits go to ATen's loops. Order of magnitude.
    _Cpu("apple", frozenset({"neon", "darwin"}), 200e9, 0.01, 0.01),
    # Neoverse V1, N2, V2: bfmmla does four times the multiply-adds of an fp32 FMA (Arm Architecture Reference
    # Manual, FEAT_BF16); half of that is assumed to be reached. fp16: loops, as on x86.
    _Cpu("arm_bf16", frozenset({"neon", "bf16"}), 60e9, 2.0, 0.03, None, _LOOP),
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
#: what a graph for CUDA is planned with where there is no CUDA device, such as an export on a build machine
_ASSUMED = gpu_row((8, 0))
#: large GEMMs and copies reach this part of the datasheet: on an H200 bf16 sustains about 790 of 989 TFLOP/s
_SUSTAINED = 0.8
#: Seconds between the starts of empty kernels in one stream. What depends on it: a training step of a ResNet with 8
#: images of 96 x 96. By Inductor's counts for an H100, two convolutions and the classifier in fp32 are 6 kernels fewer
#: and 10 MB more, which pays from 1 us a kernel on.
_CUDA_LAUNCH = 4e-6


def builtin(device_type: str) -> DeviceProfile:
    """The table row of this machine's device; ProfileError for a device type without a table.

    Read from what the device is (instruction flags and thread count, compute capability), never from what it is doing.
    The one setting that counts is what fp32 matmuls are allowed to be computed in: TF32, or bf16 on CPU. It is in
    ``fp32_precision``, which follows ``allow_tf32``, ``set_float32_matmul_precision`` and the global setting; the older
    getters raise once a program has used both generations of the API.
    """
    if check_device_type(device_type) == "cuda":
        return cuda_profile(*_cuda_row())
    flags = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    if sys.platform == "darwin":
        flags.add("darwin")
    return cpu_profile(cpu_row(frozenset(flags)), torch.get_num_threads())


def cpu_row(flags: frozenset[str]) -> _Cpu:
    """The row of a CPU with these instruction flags."""
    return next(row for row in CPUS if row.flags <= flags)


def cpu_profile(row: _Cpu, threads: int) -> DeviceProfile:
    """The profile of a row for so many threads."""
    rate = row.float32 * threads
    # oneDNN has no faster TF32 on today's CPUs, only bf16
    may_round = torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]  # set by property
    exact = max(1.0, row.bfloat16 * _CPU_FLOAT32_AS_BFLOAT16) if may_round else 1.0
    relative = {"float32": exact, "bfloat16": row.bfloat16, "float16": row.float16, INT8: row.int8}
    per_thread, socket = _CPU_BANDWIDTH
    return DeviceProfile(
        name=f"{row.name}, {threads} thread{'s' * (threads != 1)}",
        device_type="cpu",
        peak={dtype: rate * times for dtype, times in relative.items() if times is not None},
        bandwidth=min(per_thread * threads, socket),
        launch=_CPU_LAUNCH,
        calls={name: seconds / threads for name, seconds in row.calls.items()},
    )


def _cuda_row() -> tuple[str, Gpu]:
    if not torch.cuda.is_available():
        return f"sm_{''.join(map(str, _ASSUMED.capability))} assumed, no device", _ASSUMED
    if torch.version.hip is not None:
        return "rocm", ROCM
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", gpu_row((major, minor), torch.cuda.get_device_name())


def cuda_profile(label: str, row: Gpu) -> DeviceProfile:
    """The profile of a card; the label says how it was found."""
    float32 = row.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else row.float32
    rates = {
        "float32": float32, "bfloat16": row.bfloat16, "float16": row.float16, FLOAT8: row.float8, INT8: row.int8,
    }  # fmt: skip
    return DeviceProfile(
        name=f"{label} ({row.name})",
        device_type="cuda",
        peak={dtype: rate * 1e12 * _SUSTAINED for dtype, rate in rates.items() if rate is not None},
        bandwidth=row.bandwidth * 1e9 * _SUSTAINED,
        launch=_CUDA_LAUNCH,
    )
