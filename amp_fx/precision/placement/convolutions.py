"""What convolutions take on the machine that compiles: timed once, as rates of products do not tell.

With AMX, torch 2.13.0 and two threads, 128 windows of 64 over 1,024 channels take 680 ms in bf16 and 142 in fp32, where
the rates promise an eighth: oneDNN's kernel is slow as soon as 64 of its windows exceed the second-level cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch
import torch.fx as fx

from amp_fx._torch import convolution_seconds, onednn_packs
from amp_fx.graphs.calls import args_of, convolves
from amp_fx.graphs.convolutions import packed_form
from amp_fx.graphs.fake_runs import matmul_flops
from amp_fx.graphs.values import numel
from amp_fx.precision.placement.profile import DeviceProfile

logger = logging.getLogger(__name__)

#: seconds that a convolution takes in fp32 by the profile, from which on it is timed: what others lose is little
_WORTH_TIMING = 1e-3
#: seconds for the convolutions of a graph, longest first; those that are left out are priced by the profile
BUDGET = 2.0


def convolution_times(
    graph: fx.Graph, profile: DeviceProfile, low: torch.dtype, weights: Collection[str]
) -> dict[fx.Node, tuple[float, float]]:
    """Seconds in fp32 and in the low dtype of the convolutions of a graph that compute for long.

    None where oneDNN does not compute in the low dtype.

    Args:
        graph: captured, without gradients, on a CPU.
        profile: of this machine.
        low: dtype.
        weights: names of the inputs that are packed once.
    """
    if not onednn_packs(low):
        return {}
    expected = {
        node: max(matmul_flops(node) / profile.peak["float32"], _nbytes(node) / profile.bandwidth)
        for node in graph.nodes
        if convolves(node) and args_of(node)[1].name in weights and _is_batch_of_known_sizes(node)
    }
    found, started = dict[fx.Node, tuple[float, float]](), time.perf_counter()
    for node in sorted(expected, key=lambda node: -expected[node]):
        if expected[node] < _WORTH_TIMING or time.perf_counter() - started > BUDGET:
            break
        form, threads = packed_form(node), torch.get_num_threads()
        wide, narrow = (convolution_seconds(form, dtype, threads) for dtype in (torch.float32, low))
        logger.debug("%s: %.2f ms in fp32, %.2f ms in %s", node, 1e3 * wide, 1e3 * narrow, low)
        found[node] = wide, narrow
    return found


def _is_batch_of_known_sizes(convolution: fx.Node) -> bool:
    x, weight, *_ = args_of(convolution)
    is_batch = x.meta["val"].ndim == weight.meta["val"].ndim
    return is_batch and packed_form(convolution).sizes is not None


def _nbytes(convolution: fx.Node) -> int:
    """Bytes in fp32 that it reads and writes."""
    tensors = (*convolution.all_input_nodes, convolution)
    return sum(numel(node.meta["val"]) for node in tensors) * torch.float32.itemsize
