"""The ops that torch and its extensions have registered."""

# what is called here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch

__all__ = ["quantised_ops", "registered_ops"]


def quantised_ops() -> Any:
    """The ops of quantised models as PyTorch exports them, ``dequantize_per_channel`` and others."""
    # registers them; Inductor's patterns need them too
    import torch.ao.quantization.fx._decomposed

    return torch.ops.quantized_decomposed


def registered_ops() -> frozenset[str]:
    """Every overload by name, ``"aten::softmax.int"``; a default overload is its op's name alone."""
    return frozenset(torch._C._dispatch_get_all_op_names())
