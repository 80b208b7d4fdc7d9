"""When a backward may add to the gradients that are there, and autograd would not notice.

By itself, autograd hands what a backward returns to a node for each leaf, which adds it to ``.grad`` in place. A
backward that has added already, and returns nothing, leaves the same bits only if nobody else has a say: no hook is to
see the gradient, nothing else is to be added to it first, the leaf's node is to run at all, and what is written is
nobody else's. What cannot be known counts as no.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from amp_fx._torch import (
    accumulated,
    has_node_hooks,
    in_nested_transform,
    on_default_stream,
    running_backward,
    will_run,
)
from amp_fx.accumulation.sharing import Sharing

__all__ = ["gradients_to_add_to", "leaves_of"]


def leaves_of(node: Any) -> list[Tensor | None]:
    """The leaves that a node of autograd's hands its gradients to directly; None for other inputs."""
    return [accumulated(after) for after, _ in node.next_functions]


def gradients_to_add_to(
    node: Any, positions: Sequence[int], args: Sequence[Any], sharing: Sharing
) -> list[Tensor] | None:
    """The gradients of some leaves, if the node may add to them; else None.

    Args:
        node: of autograd's, which runs now.
        positions: of the leaves among its inputs.
        args: what the backward reads.
        sharing: who else hands gradients to the leaves.
    """
    nodes = [node.next_functions[position][0] for position in positions]
    pairs = _leaves_and_gradients(nodes)
    # nearly always the only question: the first micro-batch finds none
    if not pairs or torch.is_anomaly_enabled() or in_nested_transform():
        return None
    leaves, grads = [leaf for leaf, _ in pairs], [grad for _, grad in pairs]
    if not all(map(_is_plain, leaves, grads)) or not all(map(_is_in_order, leaves)):
        return None
    if not _are_apart(grads, args):
        return None
    if any(map(_has_hooks, leaves)) or any(map(has_node_hooks, nodes)):
        return None
    call = running_backward()
    if call is None or not call.accumulates or call.keeps_graph:
        return None
    if call.inputs and not all(map(will_run, nodes)):
        return None
    return grads if sharing.is_alone(call.roots, node, leaves) else None


def _leaves_and_gradients(nodes: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """The leaves behind some nodes, each with its gradient; nothing where one has none, or is no leaf."""
    pairs = list[tuple[Tensor, Tensor]]()
    for node in nodes:
        leaf = accumulated(node)
        if leaf is None or leaf.grad is None:
            return []
        pairs.append((leaf, leaf.grad))
    return pairs


def _is_plain(leaf: Tensor, grad: Tensor) -> bool:
    """True where autograd would add in place, in fp32, to memory that lies as the compiled code has it."""
    return (
        type(leaf) in (nn.Parameter, Tensor)
        and type(grad) is Tensor
        and leaf.requires_grad
        and leaf.is_leaf
        and grad.layout is torch.strided
        and grad.dtype is leaf.dtype is getattr(leaf, "grad_dtype", torch.float32) is torch.float32
        and grad.device == leaf.device
        and grad.shape == leaf.shape
        and _strides(grad) == _strides(leaf)
        and not grad.requires_grad
        and not grad.is_inference()
        and not grad.is_neg()
    )


def _is_in_order(leaf: Tensor) -> bool:
    """False on a stream of the program's own: autograd orders streams by what a backward returns."""
    if leaf.device.type == "cuda":
        return on_default_stream(leaf.device)
    return leaf.device.type == "cpu"


def _strides(value: Tensor) -> list[int]:
    """Of the dimensions in which there is more than one element: those of others mean nothing."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]


def _has_hooks(leaf: Tensor) -> bool:
    return bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def _are_apart(grads: Sequence[Tensor], args: Iterable[Any]) -> bool:
    """True where no gradient shares memory with another, or with what the backward reads."""
    written = sorted(map(_span, grads))
    if any(first[1] > second[0] for first, second in pairwise(written)):
        return False
    # among those that are read, what overlaps does not matter
    read = sorted(_span(arg) for arg in args if isinstance(arg, Tensor))
    position = 0
    for start, end in written:
        while position < len(read) and read[position][1] <= start:
            position += 1
        if any(other[0] < end and other[1] > start for other in read[position:]):
            return False
    return True


def _span(value: Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the first one after it."""
    start, size = value.data_ptr(), value.element_size()
    if not value.numel():
        return start, start
    return start, start + size * (
        1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    )
