"""Looking for inf and nan in gradients: all of them are read, and none is changed.

Nothing less would do. A gradient can be changed, between the backward and the step, in ways that PyTorch does not
tell: ``p.grad.data.mul_(x)`` moves no version, nor does numpy. So what the backward itself could say of its results
does not judge them.

On a GPU, one pass of multi-tensor kernels reads 4 bytes per parameter and leaves the largest magnitude of each
gradient, which is inf or nan if an element is; nobody waits. On a CPU the kernel of ``torch.amp.GradScaler`` is faster
for the many small gradients of a model: it reads 4 bytes, writes them back as they were, and the host looks at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from amp_fx._torch import find_nonfinite_, is_wrapper, largest_magnitudes, wrapped_tensors

#: devices whose values the host reads without waiting
AT_HAND = {"cpu"}
#: the id of a parameter, and a number that is inf or nan if its gradient has one; 0-d, on the gradient's device
Marks = list[tuple[int, Tensor]]


@dataclass
class ScaledStep:
    """The findings of a scaler between two updates."""

    #: of the parameters of its graphs by id, in the order in which the graphs were called
    names: dict[int, str] = field(default_factory=dict)
    #: these parameters by id. Neither they nor graphs live longer for being scaled: kept until the update
    leaves: dict[int, Tensor] = field(default_factory=dict)
    #: whose gradients were looked at, and what was found
    looks: list[tuple[weakref.ref[Optimizer], Marks]] = field(default_factory=list)

    def enter(self, names: Iterable[str], leaves: Sequence[Tensor]) -> None:
        """A graph is called with these parameters."""
        self.leaves.update((id(leaf), leaf) for leaf in leaves)
        self.names.update(zip(map(id, leaves), names, strict=True))

    def nonfinite(self) -> list[str]:
        """Names of the parameters with inf or nan in their gradients, nearest to the loss first; waits for the device.

        Of optimizers that are alive, and so are their parameters: the ids are theirs.
        """
        names, bad = dict(self.names), set[int]()
        if self.leaves and not self.looks:
            leaves = list(self.leaves.values())
            bad = bad_of(look(leaves, torch.zeros((), dtype=torch.float32, device=leaves[0].device)))
        for ref, marks in self.looks:
            if (optimizer := ref()) is not None:
                own = names_of(optimizer)
                bad |= bad_of(marks) & own.keys()
                names |= {key: name for key, name in own.items() if key not in names}
        return list(dict.fromkeys(name for key, name in reversed(names.items()) if key in bad))


@dataclass
class ScalerState:
    """State of a scaler that is in no checkpoint: a copy and a pickle begin it anew."""

    process_group: dist.ProcessGroup | None = None
    now: ScaledStep = field(default_factory=ScaledStep)
    last: ScaledStep = field(default_factory=ScaledStep)
    #: a graph uses this scaler; for good, as in-graph and outside scaling must not change sides in a step
    in_graph: bool = False
    #: a loss of this step was scaled before any graph used the scaler: the step goes on as it began
    scaled_outside: bool = False
    #: one has stepped what its graphs have scaled, and asked it before
    is_asked: bool = False
    #: what the last step of each optimizer found, and the last step in all; how many steps were skipped
    found: weakref.WeakKeyDictionary[Optimizer, Tensor] = field(default_factory=weakref.WeakKeyDictionary)
    last_found: Tensor | None = None
    skipped: Tensor | None = None


def bad_of(marks: Marks) -> set[int]:
    """The ids of parameters whose gradients have inf or nan."""
    return {key for key, mark in marks if not mark.isfinite()}


def any_of(found: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if one of the values is, else 0.0; may be one of them."""
    if len(found) == 1:
        return found[0].to(device, non_blocking=True)
    return torch.stack([value.to(device, non_blocking=True) for value in found]).amax()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(optimizer: Optimizer) -> dict[int, str]:
    """The labels of an optimizer's parameters: their names, where it was given names, else their places."""
    return {
        id(p): group["param_names"][i] if "param_names" in group else f"parameter {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }


def look(parameters: Sequence[Tensor], found: Tensor) -> Marks:
    """Reads the gradients of parameters on any devices: dense, sparse, sharded or None.

    ``found``, 0.0 in fp32 and 0-d, becomes 1.0 if inf or nan is found.
    """
    parts = [(id(parameter), part) for parameter in parameters for part in _plain(parameter.grad)]
    owners, grads = [owner for owner, _ in parts], [part for _, part in parts]
    kinds = [(grad.device, grad.dtype) for grad in grads]
    if kinds.count((found.device, torch.float32)) == len(kinds):
        return list(zip(owners, _marks(grads, found), strict=True))
    marks = list[Tensor](grads)
    for kind in set(kinds):
        positions = [position for position, other in enumerate(kinds) if other == kind]
        here = torch.zeros((), dtype=torch.float32, device=kind[0])
        for position, mark in zip(positions, _marks([grads[p] for p in positions], here), strict=True):
            marks[position] = mark
        found += here.to(found.device, non_blocking=True)
    found.clamp_(max=1.0)
    return list(zip(owners, marks, strict=True))


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
    if found.device.type not in AT_HAND:
        marks = largest_magnitudes(grads)
        find_nonfinite_(marks, found)
        return marks
    # the kernel writes what it has read
    find_nonfinite_(grads, found)
    if found.item():
        return [found / 0 if not grad.isfinite().all() else torch.zeros_like(found) for grad in grads]
    return [found] * len(grads)
