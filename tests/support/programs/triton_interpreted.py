"""A program that runs code which Inductor generated for a GPU on the CPU, with Triton's interpreter.

    TRITON_INTERPRET=1 python triton_interpreted.py STEPS.pt RESULTS.pt

Triton kernels are run as they stand, by Triton's interpreter. Library kernels are emulated as tensor cores compute:
products and sums in fp32, rounded once. Only what no kernel computes is replaced: allocations, streams, devices.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from support.programs.target_code import Code

aten = torch.ops.aten

#: elements of a block at most; small, so that kernels have several blocks and loops several rounds
_BLOCK = {"XBLOCK": 256, "YBLOCK": 32, "ZBLOCK": 8, "R0_BLOCK": 64, "R1_BLOCK": 64}


@dataclass(frozen=True)
class Step:
    forward: Code
    backward: Code | None
    inputs: Sequence[Tensor]  # of the forward; what the code writes to them stays
    tangents: Sequence[Tensor] = ()  # gradients of what the program returns
    returns: int = 1  # how many results are the program's; the others are saved for the backward


def interpret(step: Step) -> tuple[list[Tensor], list[Tensor | None]]:
    """What the program returns, and a gradient or None for each input of the forward."""
    results = _load(step.forward.text)(list(step.inputs))
    returned = list(results[: step.returns])
    if step.backward is None:
        return returned, []
    known = dict(zip(step.forward.outputs, results, strict=True))
    tangents = [name for name in step.backward.inputs if name.startswith("tangents")]
    known |= dict(zip(tangents, step.tangents, strict=True))
    return returned, list(_load(step.backward.text)([known[name] for name in step.backward.inputs]))


def _load(text: str, name: str = "call") -> Any:
    """What code has under a name."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(text), name)


class _Kernel:
    """Stands where Inductor's launcher does: chooses blocks, and interprets the kernel for each."""

    def __init__(self, fn: Any) -> None:
        self._fn = fn

    def run(self, *args: Any, stream: int = 0) -> None:
        given = dict(zip(self._fn.arg_names, args, strict=False))
        sizes = {name[:-5].upper(): size for name, size in given.items() if name.endswith("numel")}
        blocks = {
            block: min(most, 1 << (sizes[block.removesuffix("BLOCK")] - 1).bit_length())
            for block, most in _BLOCK.items()
            if block in self._fn.arg_names
        }
        grid = [-(-sizes[axis] // blocks.get(f"{axis}BLOCK", 1)) for axis in "XYZ" if axis in sizes]
        self._fn[tuple(grid)](*args, **blocks)


# --- what library kernels compute ---


def _mm(a: Tensor, b: Tensor, *, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return out.copy_(a.float() @ b.float())


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1, beta: float = 1, out: Tensor) -> Tensor:
    return out.copy_(beta * bias.float() + alpha * (a.float() @ b.float()))


def _convolution(x: Tensor, weight: Tensor, **settings: Any) -> Tensor:
    bias = settings.pop("bias")
    wide = None if bias is None else bias.float()
    return aten.convolution(x.float(), weight.float(), wide, **settings).to(x.dtype)


_EXTERN = SimpleNamespace(**dict.fromkeys(("mm", "bmm", "mm_dtype", "bmm_dtype"), _mm))
_EXTERN.addmm, _EXTERN.baddbmm, _EXTERN.convolution = _addmm, _addmm, _convolution


# --- attention, as FlashAttention rounds it ---


def _like(value: Tensor) -> Tensor:
    """Empty, batch by length by heads by width in memory."""
    return torch.empty_like(value.transpose(1, 2)).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, float]:
    factor = float(q.shape[-1]) ** -0.5 if scale is None else scale
    scores = factor * (q.float() @ k.float().mT)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, factor


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    scores, _ = _scores(q, k, is_causal, scale)
    summed = scores.logsumexp(-1)
    weights = (scores - summed[..., None]).exp().to(q.dtype)
    seed = torch.zeros(2, dtype=torch.uint64)
    out = _like(q).copy_(weights.float() @ v.float())
    return out, summed, None, None, q.shape[2], k.shape[2], seed, seed[0], torch.empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, summed: Tensor,
    *settings: Any, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores, scale = _scores(q, k, settings[5], scale)
    weights = (scores - summed[..., None]).exp()
    row = (grad.float() * out.float()).sum(-1, keepdim=True)
    inner = (weights * (grad.float() @ v.float().mT - row)).to(q.dtype).float()
    of_q, of_k = scale * (inner @ k.float()), scale * (inner.mT @ q.float())
    of_v = weights.to(q.dtype).float().mT @ grad.float()
    return _like(q).copy_(of_q), _like(k).copy_(of_k), _like(v).copy_(of_v)


# --- what Triton's interpreter lacks ---


def _convert_float(data: np.ndarray, source: Any, target: Any, rounding: object) -> np.ndarray:
    """To the nearest, as GPUs do; Triton's own cuts off."""
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    value = torch.from_numpy(np.ascontiguousarray(data)).view(kinds[source.name]).to(kinds[target.name])
    return value.view(bits[value.element_size()]).numpy().view(f"uint{8 * value.element_size()}")


class _Libdevice:
    """NVIDIA's library of functions, by torch's of the same name."""

    _names: Mapping[str, str] = {"fabs": "abs", "pow": "pow", "rint": "round", "nearbyint": "round"}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, self._names.get(name, name))

        def call(*args: Any) -> Any:
            values = [np.asarray(getattr(a, "handle", SimpleNamespace(data=a)).data) for a in args]
            like = next(a for a in args if hasattr(a, "handle"))
            result = function(*map(torch.from_numpy, values))
            kind = tl.int32 if result.dtype is torch.bool else like.dtype
            data = (result.int() if result.dtype is torch.bool else result).numpy()
            block = tl.block_type(kind, like.type.shape) if like.type.is_block() else kind
            return tl.tensor(TensorHandle(data, kind), block)

        return call


@contextlib.contextmanager
def _on_cpu() -> Any:
    """Inside, code for a GPU is loaded and run here."""
    from torch._inductor import async_compile, select_algorithm
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.runtime import interpreter

    guards = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any, **settings: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, **settings))

        patch(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
        patch(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True)
        patch(torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext())
        patch(torch.cuda, "set_device", lambda device: None)
        patch(async_compile.AsyncCompile, "triton", lambda self, name, source, **_: _load(source, name))
        patch(select_algorithm, "extern_kernels", _EXTERN)
        for name in ("pointwise", "reduction", "persistent_reduction", "split_scan"):
            patch(triton_heuristics, name, lambda **_: _Kernel)
        patch(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch(triton_helpers, "libdevice", _Libdevice())
        patch(interpreter, "_convert_float", _convert_float)
        yield


if __name__ == "__main__":
    steps = torch.load(sys.argv[1], weights_only=False)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CPU")
    with _on_cpu():
        torch.save({name: interpret(step) for name, step in steps.items()}, sys.argv[2])
