"""Calls that a kernel refuses in a 16-bit dtype, or computes wrongly; the hazard is in ``hazards.py``."""

from __future__ import annotations

import torch
import torch.fx as fx

from amp_fx._torch import kernel_rows, onednn_computes
from amp_fx.graphs.calls import argument_value, base_name, convolves
from amp_fx.graphs.convolutions import is_wrong
from amp_fx.graphs.values import is_eligible, tensors
from amp_fx.precision.plans.label import Label
from amp_fx.precision.policy import OpClass


def refusal(node: fx.Node, label: Label, low: torch.dtype) -> str:
    """Why the kernel of a call refuses the low dtype; empty where the kernel takes it."""
    if convolves(node):
        return "oneDNN's, with AMX, returns wrong numbers" if is_wrong(node, low) else ""
    name, results = base_name(node), tensors(node.meta.get("val"))
    if name in ("lstm", "mkldnn_rnn_layer"):
        if not any(value.device.type == "cpu" for value in results):
            return ""
        if low is torch.float16:
            return "Inductor writes an LSTM in float16 out, time step by time step"
        return "" if onednn_computes(low) else "oneDNN has no LSTM for this CPU"
    if name == "_grouped_mm" and label.op_class is OpClass.LOW:
        factors = [value for n in node.all_input_nodes if is_eligible(value := n.meta["val"])]
        fits = kernel_rows(*factors, *results, itemsize=low.itemsize)
        return "" if fits else "its rows are not whole 16 bytes"
    return "it factorises a matrix" if _factorises(node) else ""


def _factorises(node: fx.Node) -> bool:
    """True for a norm by singular values, and for a power that inverts: no device has half kernels for those."""
    base, order, power = base_name(node), argument_value(node, "ord"), argument_value(node, "n")
    if base in ("linalg_matrix_norm", "linalg_norm"):
        dims = argument_value(node, "dim") or range(node.all_input_nodes[0].meta["val"].ndim)
        return order in (2, -2, "nuc") and len(dims) == 2
    return base in ("linalg_matrix_power", "matrix_power") and power < 0
