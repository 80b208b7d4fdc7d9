"""Every op of the lists and autocast's own answer, on CPU and on fake CUDA tensors; arguments: ``op_arguments.py``.

CUDA's autocast kernels answer on a machine without a GPU: fake tensors on ``device="cuda"`` go through the
real AutocastCUDA dispatch key. CPU autocast is asked with real tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from amp_fx._torch import enable_autocast, onednn_computes
from amp_fx.precision.policy import table
from amp_fx.precision.policy.classes import OpGroup
from support.ops.op_arguments import Call, arguments, each, overload, t
from support.torch_versions import UP_TO_2_12

__all__ = ["Call", "arguments", "overload", "t"]

LOW = {"cpu": torch.bfloat16, "cuda": torch.float16, "mps": torch.float16}


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def cast(name: str, call: Call, dtypes: Iterator[torch.dtype], keep: tuple[str, ...] = ()) -> Call:
    """Casts the floating arguments in order, each to the next dtype, but for the slots named in ``keep``."""
    names = [argument.name for argument in overload(name)._schema.arguments]

    def to_next(value: Any) -> Any:
        return value.to(next(dtypes)) if is_float(value) else value

    args, kwargs = call
    return (
        tuple(a if slot in keep else tree_map(to_next, a) for slot, a in zip(names, args, strict=False)),
        {slot: a if slot in keep else tree_map(to_next, a) for slot, a in kwargs.items()},
    )


def repeat(first: torch.dtype, rest: torch.dtype) -> Iterator[torch.dtype]:
    yield first
    while True:
        yield rest


def run(name: str, call: Call) -> Any:
    args, kwargs = call
    with warnings.catch_warnings():
        # deprecated ops (cholesky, chain_matmul ...) are on the lists and warn
        warnings.simplefilter("ignore")
        return overload(name)(*args, **kwargs)


@functools.cache
def _fake() -> FakeTensorMode:
    """One for all calls: making it takes longer than a call."""
    return FakeTensorMode()


def on_device(value: Any, device: str) -> Any:
    """The same with uninitialised tensors of a device."""
    return tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device), value
    )


def under_autocast(device: str, name: str, call: Call) -> Any:
    if device == "cpu":
        with torch.autocast("cpu", LOW["cpu"]):
            return run(name, call)
    # torch.autocast("cuda") refuses to start without CUDA; its dispatch key does not
    with _fake(), enable_autocast(device, True, LOW[device]):
        return run(name, on_device(call, device))


def first_dtype(result: Any) -> torch.dtype | None:
    """The dtype of the first floating or complex output; None when there is none (masks, positions)."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.dtype
    return None


def floats_in(name: str) -> int:
    return sum(map(is_float, tree_leaves(arguments(name))))


def row(device: str, name: str) -> OpGroup:
    group = table.lookup(overload(name), device)
    assert group is not None
    return group


# ---- What cannot be asked here, or is answered otherwise on purpose.

NO_CUDA = "its CUDA code path needs a GPU build"
NO_MPS = "its MPS code path needs a build for it"
NO_DRIVER = "a CUDA build asks the driver about cudnn, even for fake tensors"
NO_META = "no meta kernel, so fake tensors cannot run it"
NO_LSTM = "oneDNN has no such kernel for this CPU, and autocast raises"
BF16 = "fake tensors have no result in fp16 but where amp_fx is used"
DATA = "the shape of its result depends on values"
_OLD = "_convolution _convolution.deprecated _transformer_encoder_layer_fwd" if UP_TO_2_12 else ""
_NO_DRIVER = torch.version.cuda and not torch.cuda.is_available()

#: Everything else in the lists must have arguments, run and answer.
NOT_ASKED: dict[str, dict[str, str]] = {
    "cuda": {
        **each("_thnn_fused_gru_cell ctc_loss.IntList ctc_loss.Tensor geqrf gru.input gru_cell", NO_META),
        **each(_OLD, NO_META),
        **each("combinations linalg_lstsq masked_select narrow.Tensor nonzero", DATA),
        **each("batch_norm cudnn_convolution cudnn_convolution_transpose grid_sampler", NO_CUDA),
        **each("grid_sampler_2d im2col instance_norm native_batch_norm", NO_CUDA),
        "tensor_split.tensor_indices_or_sections": "takes CPU indices only",
        "_grouped_mm": BF16,
        **each("lstm.input rnn_relu.input rnn_tanh.input" if _NO_DRIVER else "", NO_DRIVER),
    },
    "mps": {
        **each("_thnn_fused_gru_cell geqrf " + _OLD, NO_META),
        **each("combinations linalg_lstsq masked_select narrow.Tensor nonzero", DATA),
        **each("ctc_loss.IntList ctc_loss.Tensor", DATA),
        **each("batch_norm grid_sampler grid_sampler_2d im2col instance_norm native_batch_norm", NO_MPS),
        "scaled_dot_product_attention": NO_MPS,
        "_grouped_mm": BF16,
        "_mps_convolution": "has no arguments in these tables: its kernel is in MPS builds alone",
        "tensor_split.tensor_indices_or_sections": "takes CPU indices only",
    },
    "cpu": each("" if onednn_computes(LOW["cpu"]) else "lstm.input mkldnn_rnn_layer", NO_LSTM),
}

#: Where the lists differ from what autocast does, on purpose.
DIFFERS: dict[tuple[str, str], str] = {
    ("cpu", "_transformer_encoder_layer_fwd"): "its inner products are low, and its result is",
    ("cpu", "affine_grid_generator"): "an inner bmm computes the sampling grid in low precision",
    **dict.fromkeys(
        [("cpu", f"linalg_pinv{overload}") for overload in ("", ".atol_rtol_float", ".atol_rtol_tensor")],
        "an inner matmul rounds the inverse",
    ),
}


EVERY_ROW = [(device, name) for device in LOW for name in table.rows_of(device)]
ASKED = [(device, name) for device, name in EVERY_ROW if name not in NOT_ASKED[device]]
