"""Measures a device: matmul rates, memory bandwidth, the cost of a kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.profile import (
    DTYPES,
    FLASH_BLOCKS,
    FLASH_QUERY,
    FLOAT8,
    INT8,
    DeviceProfile,
    ProfileError,
    check_device_type,
)  # fmt: skip
from amp_fx.precision.policy.scaled import ZERO_POINT

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

    run: Callable[[], object]
    work: float


def measure(
    device_type: str, seconds: float = 3.0, progress: Callable[[str], object] = lambda line: None
) -> DeviceProfile:
    """Measures this machine: ``"cpu"``, or the current device of ``"cuda"``, in about so many seconds.

    Everything is measured in turns, so that a falling clock hurts all numbers alike, and the best round counts: other
    processes only ever slow a round down. A matmul counts in the three layouts of a training step: a dtype without
    kernels of its own may be fast in one of them only. A matmul in fp8 has one layout, and adds up fast in the forward
    only; one in int8 is that of an evaluation, with a packed weight on a CPU. Less than a second means small sizes and
    rough numbers. ``progress`` takes a line for each step, and a warning if the machine was busy.

    ProfileError where there is no such device, or it is too busy for the numbers to mean anything.
    """
    if check_device_type(device_type) == "cuda" and not torch.cuda.is_available():
        raise ProfileError("there is no CUDA device here to measure; valid here: 'cpu'.")
    start = time.perf_counter()
    makers: dict[str, Callable[[int], _Task]] = {
        name: partial(_gemm, dtype=dtype, device_type=device_type) for name, dtype in DTYPES.items()
    }
    rates = builtin(device_type).peak
    if FLOAT8 in rates:
        makers[FLOAT8] = partial(scaled_gemm, device_type=device_type)
    if INT8 in rates:
        makers[INT8] = _packed_int8_gemm if device_type == "cpu" else _int8_gemm
    share = seconds / (_ROUNDS * (len(makers) + 2))
    tasks = {}
    for name, make in makers.items():
        progress(f"matmul {name}")
        tasks[name] = _largest(map(make, _GEMM_SIZES), 8, share, device_type)
    progress("copy")
    copies = (_copy(size, device_type) for size in _COPY_SIZES[device_type])
    tasks["bandwidth"] = _largest(copies, 4, share, device_type)
    tasks["launch"] = _launch(device_type)
    calls = _flash_calls() if device_type == "cpu" else {}
    tasks |= calls
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    progress("all of them in turns")
    while len(samples["launch"]) < _ROUNDS or time.perf_counter() - start < seconds:
        for name, task in tasks.items():
            samples[name].append(clock(task, device_type) / task.work)
    best = {name: min(found) for name, found in samples.items()}
    if best["launch"] > _ABSURD_LAUNCH:
        raise ProfileError(
            f"too busy to measure: a kernel starts in {best['launch'] * 1e3:.1f} ms at best, so its "
            "threads wait for cores; stop other work, or use fewer threads (OMP_NUM_THREADS)."
        )
    spread = max(median(samples[name]) / best[name] for name in samples)
    if spread > _BUSY:
        progress(
            f"warning: rounds differ {spread:.1f} times, so the machine is busy; measure again when idle"
        )
    device = torch.cuda.get_device_name() if device_type == "cuda" else builtin("cpu").name
    return DeviceProfile(
        name=f"{device}, measured",
        device_type=device_type,
        peak={name: 1 / best[name] for name in makers},
        bandwidth=1 / best["bandwidth"],
        launch=best["launch"],
        # what products take is from the table: it is generated code's time, with a compiler's in front
        calls={**builtin(device_type).calls, **{name: best[name] for name in calls}},
    )


def clock(task: _Task, device_type: str) -> float:
    """Seconds that a task takes, the device waited for."""
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
        if min(clock(task, device_type) for _ in range(4)) * growth > share:
            break
    assert task is not None
    return task


def _random(size: int, dtype: torch.dtype, device_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two square matrices of random values: constant ones let a GPU clock higher than real data does."""
    generator = torch.Generator(device_type).manual_seed(0)
    a, b = (torch.randn(size, size, device=device_type, generator=generator) for _ in range(2))
    scale = 1 if dtype.is_floating_point else 30
    return (a * scale).to(dtype), (b * scale).to(dtype)


def _gemm(size: int, dtype: torch.dtype, device_type: str) -> _Task:
    a, b = _random(size, dtype, device_type)

    def run() -> None:
        torch.mm(a, b.t())
        torch.mm(a, b)
        torch.mm(a.t(), b)

    return _Task(run, 3 * 2 * size**3)


def scaled_gemm(size: int, device_type: str) -> _Task:
    """Matmuls in e4m3 with one scale for each operand, which all such devices have; results are bf16."""
    a, b = _random(size, torch.float8_e4m3fn, device_type)
    scale = torch.ones((), device=device_type)

    def run() -> None:
        for fast in (True, False, False):
            torch.ops.aten._scaled_mm.default(a, b.t(), scale, scale, None, None, torch.bfloat16, fast)

    return _Task(run, 3 * 2 * size**3)


def _int8_gemm(size: int) -> _Task:
    """A product of signed matrices on a GPU, summed in int32."""
    a, b = _random(size, torch.int8, "cuda")
    return _Task(lambda: torch.ops.aten._int_mm.default(a, b.t()), 2 * size**3)


def _packed_int8_gemm(size: int) -> _Task:
    """The fused kernel that Inductor makes of :func:`amp_fx.precision.policy.scaled.packed_int8_mm`."""
    a, b = _random(size, torch.int8, "cpu")
    unsigned = (a.short() + ZERO_POINT).to(torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(b, [size, size])
    scales, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int64)

    def run() -> None:
        torch.ops.onednn.qlinear_pointwise.default(
            unsigned, 1.0, ZERO_POINT, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return _Task(run, 2 * size**3)


def _copy(size: int, device_type: str) -> _Task:
    source = torch.ones(size, device=device_type)
    target = torch.zeros_like(source)
    return _Task(lambda: target.copy_(source), source.nbytes + target.nbytes)


def _flash_calls() -> dict[str, _Task]:
    """The flash kernel for attention on a CPU, and its backward, where blocks and where products take the time.

    A head is a pair of blocks with few products in the first, and three pairs, as large as they get, in the second.
    Single queries, too: their keys are beyond the caches of a core, as those of a decode step.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    keys, values = torch.randn(2, 1, 16, 2048, 64).to(torch.bfloat16)
    found = {FLASH_QUERY: _Task(partial(flash, keys[:, :, :1], keys, values), keys.numel())}
    few, many = 256, 4 * torch.get_num_threads()
    flop = 4 * many * 768 * 512 * 64
    blocks, products = zip(*FLASH_BLOCKS, strict=True)
    for names, heads, queries, length, width, work in (
        (blocks, few, 32, 32, 16, (few, few)),
        (products, many, 768, 512, 64, (flop, flop * 5 / 2)),
    ):
        query, gradient = torch.randn(2, 1, heads, queries, width).to(torch.bfloat16)
        key = torch.randn(1, heads, length, width).to(torch.bfloat16)
        forward = partial(flash, query, key, key)
        backward = partial(flash_backward, gradient, query, key, key, *forward(), 0.0, False)
        found |= zip(names, map(_Task, (forward, backward), work), strict=True)
    return found


def _launch(device_type: str) -> _Task:
    source = torch.zeros(_LAUNCH_SIZE, dtype=torch.uint8, device=device_type)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(_LAUNCHES):
            torch.bitwise_not(source, out=target)

    return _Task(run, _LAUNCHES)
