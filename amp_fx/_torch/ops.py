"""The ops that torch and its extensions have registered."""

# what is called here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch

__all__ = ["registered_ops"]


def registered_ops() -> frozenset[str]:
    """Every overload by name, ``"aten::softmax.int"``; a default overload is its op's name alone."""
    return frozenset(torch._C._dispatch_get_all_op_names())
