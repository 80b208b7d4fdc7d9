"""What a step should take by a device's rates, to put beside what it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from amp_fx._torch import Lowered
from amp_fx.graphs.facts import is_eligible, is_matmul, matmul_flops, tensors
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.plan import dtype_name

__all__ = ["seconds"]


def seconds(graphs: Sequence[Lowered], profile: DeviceProfile) -> float:
    """Forward and backward without the optimizer: a roofline of three lines.

    Bytes take their time at the device's bandwidth, matmuls at the rate of the dtype they read; kernels start one
    after the other, which takes long only where it takes longer than all they do.

    Args:
        graphs: as Inductor would compile them.
        profile: rates.
    """
    total = 0.0
    for lowered in graphs:
        work = profile.bytes_seconds(lowered.bytes_moved)
        work += sum(
            profile.matmul_seconds(matmul_flops(node), dtype)
            for node in lowered.before.graph.nodes
            if node.op == "call_function" and is_matmul(node)
            if (dtype := _operands(node)) in profile.peak
        )
        kernels = lowered.extern_kernels + len(lowered.generated)
        total += max(work, kernels * profile.launch)
    return total


def _operands(node: fx.Node) -> str:
    found = [v for source in node.all_input_nodes for v in tensors(source.meta.get("val")) if is_eligible(v)]
    return dtype_name(found[-1].dtype) if found else ""
