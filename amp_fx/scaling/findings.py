"""Looking for inf and nan in gradients: all of them are read, and none is changed.

Nothing less would do. A gradient can be changed, between the backward and the step, in ways that PyTorch does not
tell: ``p.grad.data.mul_(x)`` moves no version, nor does numpy. So what the backward itself could say of its results
does not judge them.

On a GPU, one pass of multi-tensor kernels reads 4 bytes per parameter and leaves the largest magnitude of each
gradient, which is inf or nan if an element is; nobody waits. On a CPU the kernel of ``torch.amp.GradScaler`` is faster
for the many small gradients of a model: it reads 4 bytes, writes them back as they were, and the host looks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_fx._torch import find_nonfinite_, is_wrapper, largest_magnitudes, wrapped_tensors

__all__ = ["Finding", "look"]

#: devices whose values the host reads without waiting
_AT_HAND = {"cpu"}


@dataclass
class Finding:
    """What was found in the gradients of some parameters. It holds none of them: whoever asks has them.

    Attributes:
        found: 1.0 if a gradient has inf or nan, else 0.0; fp32, 0-d.
        parameters: ids of those with gradients.
        marks: for each gradient a number that is inf or nan if the gradient has one; 0-d.
    """

    found: Tensor
    parameters: Sequence[int]
    marks: Sequence[Tensor]

    def nonfinite(self) -> set[int]:
        """The parameters with a bad gradient; waits for the device."""
        return {key for key, mark in zip(self.parameters, self.marks, strict=True) if not mark.isfinite()}


def look(parameters: Sequence[Tensor], found: Tensor) -> Finding:
    """Reads the gradients of parameters.

    Args:
        parameters: on any devices. Their gradients are dense, sparse, sharded or None.
        found: 0.0 in fp32, 0-d; becomes 1.0 if inf or nan is found.
    """
    owners, grads = list[int](), list[Tensor]()
    for parameter in parameters:
        for part in _plain(parameter.grad):
            owners.append(id(parameter))
            grads.append(part)
    kinds = [(grad.device, grad.dtype) for grad in grads]
    if kinds.count((found.device, torch.float32)) == len(kinds):
        return Finding(found, owners, _marks(grads, found))
    marks = list[Tensor](grads)
    for kind in set(kinds):
        positions = [position for position, other in enumerate(kinds) if other == kind]
        here = torch.zeros((), device=kind[0])
        for position, mark in zip(positions, _marks([grads[p] for p in positions], here), strict=True):
            marks[position] = mark
        found += here.to(found.device, non_blocking=True)
    return Finding(found.clamp_(max=1.0), owners, marks)


def _plain(grad: Tensor | None) -> Sequence[Tensor]:
    """The dense real tensors that a gradient consists of on this process, for autograd to ignore; none is empty."""
    if grad is None:
        return ()
    grad = grad.data
    if type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point():
        if not grad.is_contiguous() and 0 in grad.stride():
            # expanded: its elements cannot be written one by one
            grad = grad.contiguous()
        return (grad,) if grad.numel() else ()
    if is_wrapper(grad):
        return [plain for part in wrapped_tensors(grad) for plain in _plain(part)]
    if grad.layout is torch.sparse_coo:
        # as an optimizer adds them up: duplicates may overflow together
        return _plain(grad.coalesce().values())
    if grad.layout is not torch.strided:
        return _plain(grad.values())
    if grad.is_complex():
        return _plain(torch.view_as_real(grad))
    return _plain(grad.as_subclass(Tensor)) if grad.is_floating_point() else ()


def _marks(grads: Sequence[Tensor], found: Tensor) -> list[Tensor]:
    """One number for each gradient of a device; ``found`` becomes 1.0 if one of them is inf or nan."""
    if not grads:
        return []
    if found.device.type not in _AT_HAND:
        marks = largest_magnitudes(grads)
        find_nonfinite_(marks, found)
        return marks
    # the kernel writes what it has read
    find_nonfinite_(grads, found)
    if found.item():
        return [found / 0 if not grad.isfinite().all() else torch.zeros_like(found) for grad in grads]
    return [found] * len(grads)
