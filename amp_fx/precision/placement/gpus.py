"""Published numbers of NVIDIA GPUs: one table, for the cost model and for compiling for an absent GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One card. Rates are TFLOP/s, dense, products in 16 and 8 bits summed in fp32."""

    name: str  # part of what the driver calls it
    capability: tuple[int, int]
    float32: float  # without tensor cores
    tf32: float  # where the user allows it
    float16: float
    bfloat16: float
    bandwidth: float  # GB/s of device memory
    sms: int  # streaming multiprocessors
    memory: int  # GB
    l2: float  # MiB
    float8: float | None = None  # e4m3 and e5m2; None without such tensor cores
    int8: float | None = None  # summed in int32; None where torch has no kernels for them

    @property
    def key(self) -> str:
        """The name in lower case and without spaces: ``rtx4090``."""
        return self.name.lower().replace(" ", "")

    def flops_a_byte(self, dtype: str) -> float:
        """Operations that it does in a dtype while it moves a byte of memory."""
        return getattr(self, dtype) * 1e3 / self.bandwidth


#: Datasheet numbers. The first card of a compute capability stands for all that have no row of their own.
GPUS = (
    # No tensor cores: cuBLAS computes 16-bit matmuls in fp32 FMAs; bf16 is emulated, half of that is assumed.
    Gpu("M40", (5, 0), 6.8, 6.8, 6.8, 3.4, 288, 24, 12, 3),  # Tesla M40 datasheet
    Gpu("P100", (6, 0), 10.6, 10.6, 10.6, 5.3, 732, 56, 16, 4),  # Tesla P100 SXM2 datasheet, whitepaper
    Gpu("P40", (6, 1), 11.8, 11.8, 11.8, 5.9, 346, 30, 24, 3),  # Tesla P40 datasheet
    # Tensor cores for fp16 only.
    Gpu("V100", (7, 0), 15.7, 15.7, 125, 7.8, 900, 80, 16, 6),  # Tesla V100 SXM2 datasheet, whitepaper
    Gpu("T4", (7, 5), 8.1, 8.1, 65, 4.0, 320, 40, 16, 4),  # T4 datasheet
    # Tensor cores for fp16, bf16 and TF32.
    # A100 datasheet and whitepaper, 40 GB
    Gpu("A100", (8, 0), 19.5, 156, 312, 312, 1555, 108, 40, 40, int8=624),
    # NVIDIA Ampere GA102 whitepaper, table 2
    Gpu("RTX 3090", (8, 6), 35.6, 35.6, 71, 71, 936, 82, 24, 6, int8=284),
    # Tensor cores for fp8, too.
    # NVIDIA Ada whitepaper, appendix A
    Gpu("RTX 4090", (8, 9), 82.6, 82.6, 165.2, 165.2, 1008, 128, 24, 72, float8=330.3, int8=660.6),
    # L4 datasheet (half of the sparse rates)
    Gpu("L4", (8, 9), 30.3, 60, 121, 121, 300, 58, 24, 48, float8=242.5, int8=242.5),
    # H100 and H200 datasheets, SXM5 (half of the sparse rates); Hopper whitepaper;
    # int8: torch._int_mm came to 927 TOP/s on an H200 (fp8: 1456), and profiles take 0.8 of what stands here
    Gpu("H100", (9, 0), 66.9, 494.7, 989.4, 989.4, 3350, 132, 80, 50, float8=1978.9, int8=1158),
    Gpu("H200", (9, 0), 66.9, 494.7, 989.4, 989.4, 4800, 132, 141, 60, float8=1978.9, int8=1158),
    # Blackwell datasheet, HGX B200 (half of the sparse rates, an eighth of the board's memory)
    Gpu("B200", (10, 0), 75, 1100, 2250, 2250, 7700, 148, 180, 126, float8=4500, int8=4500),
    # NVIDIA RTX Blackwell whitepaper, appendix A
    Gpu("RTX 5090", (12, 0), 104.8, 104.8, 209.5, 209.5, 1792, 170, 32, 96, float8=419, int8=838),
)

#: ROCm numbers its architectures otherwise. AMD Instinct MI200 datasheet, one die of an MI250X.
ROCM = Gpu("MI250X", (9, 0), 47.9, 47.9, 191.5, 191.5, 1638, 110, 64, 8)


@dataclass(frozen=True)
class Limits:
    """The limits of one multiprocessor: resident threads, and KiB of shared memory, in all and for one block."""

    threads: int
    shared: int
    block_shared: int


#: Compute capability -> limits. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; all have
#: 65536 registers, 1024 threads in a block, and 48 KiB of shared memory for a block that does not ask.
LIMITS = {
    (8, 0): Limits(2048, 164, 163),
    (8, 6): Limits(1536, 100, 99),
    (8, 9): Limits(1536, 100, 99),
    (9, 0): Limits(2048, 228, 227),
    (10, 0): Limits(2048, 228, 227),
    (12, 0): Limits(1536, 100, 99),
}


def gpu_row(capability: tuple[int, int], name: str = "") -> Gpu:
    """The row of a card by what the driver calls it; a compute capability between two rows counts as the lower one."""
    known = max((gpu.capability for gpu in GPUS if gpu.capability <= capability), default=GPUS[0].capability)
    rows = [gpu for gpu in GPUS if gpu.capability == known]
    return next((gpu for gpu in rows if re.search(rf"\b{gpu.name}\b", name)), rows[0])


#: the card whose rates count where there is no profile: matmuls are then worth the bytes that it moves meanwhile
NOMINAL = gpu_row((9, 0))
