"""``amp_fx.GradScaler``: loss scaling whose arithmetic is inside the compiled backward.

A graph compiled with ``options={"dtype": "float16", "scaler": "default"}`` multiplies the gradients that enter its
backward by the scale of the scaler called "default", divides those that leave it, and looks for inf and nan in the
same kernels. So the scaler has nothing to do to gradients: ``scale`` returns the loss as it is, ``unscale_`` and
``step`` only read one flag per parameter, and ``update`` adapts the scale on its device.

Flags say what the compiled backwards found. A parameter is judged by its flag only where that is the whole truth;
otherwise its gradient is read, once, by the kernel that torch.amp.GradScaler uses:

* no backward of a compiled graph has run for it since the last ``update``;
* the loss also depends on it through eager code. ``scale`` sees that by walking the autograd graph of the loss,
  the eager part of it; without a ``scale`` nothing is known, and all gradients are read;
* something else wrote into the gradient, as its version counter tells: clipping without ``unscale_`` before it,
  ``zero_grad(set_to_none=False)``, DistributedDataParallel's averaging.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from amp_fx._torch import update_scale
from amp_fx.errors import ScalerError, did_you_mean

__all__ = ["FlaggedGraph", "GradScaler", "find_scaler"]

_lock = threading.Lock()
_scalers: weakref.WeakValueDictionary[str, GradScaler] = weakref.WeakValueDictionary()


def find_scaler(name: str) -> GradScaler:
    """The living scaler that was made last under a name.

    Raises:
        ScalerError: there is none.
    """
    scaler = _scalers.get(name)
    if scaler is None:
        known = sorted(_scalers.keys())
        raise ScalerError(
            f"No amp_fx.GradScaler is called {name!r}; known: {', '.join(map(repr, known)) or 'none'}."
            f"{did_you_mean(name, known)} Make one before the first forward, and keep it: "
            f"scaler = amp_fx.GradScaler(device, name={name!r})."
        )
    return scaler


class FlaggedGraph(Protocol):
    """What a scaler knows of a compiled graph that asks it for a scale and flags."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the graph's parameters."""
        ...

    @property
    def device(self) -> torch.device:
        """Where scale and flags live."""
        ...


@dataclass(eq=False)
class _Use:
    """One graph with one set of parameters: models of one class share their graphs.

    Attributes:
        leaves: the parameters, weakly.
        names: of the parameters.
        flags: zeros, fp32, an input of the graph; its gradient says how often a parameter's gradient was bad.
        scale: with ``per_graph``, the graph's own scale: fp32, 0-d.
        growth_tracker: with ``per_graph``, as torch's: int32, 0-d.
    """

    leaves: tuple[weakref.ref[nn.Parameter], ...]
    names: tuple[str, ...]
    flags: Tensor
    scale: Tensor | None = None
    growth_tracker: Tensor | None = None
    _indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def is_of(self, leaves: Sequence[nn.Parameter]) -> bool:
        return all(ref() is leaf for ref, leaf in zip(self.leaves, leaves, strict=True))

    def found(self, mine: Sequence[int]) -> Tensor:
        """1.0 or more if one of these parameters has a bad gradient."""
        grad = self.flags.grad
        assert grad is not None
        if len(mine) < len(self.leaves):
            key = tuple(mine)
            if key not in self._indices:
                self._indices[key] = torch.tensor(key, device=grad.device)
            grad = grad[self._indices[key]]
        return grad.amax()


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for graphs of amp_fx; where there is none, ``torch.amp.GradScaler`` itself.

    The loop is that of torch: ``scale(loss).backward()``, perhaps ``unscale_(optimizer)`` and clipping,
    ``step(optimizer)``, ``update()``. The state dict has torch's keys, and loads both ways.

    Gradients are true to scale as soon as ``backward`` returns. Eager parts of the model are not scaled, once a
    graph uses this scaler; those in fp16 of their own need a scaler of their own.

    With more than one process, what was found is combined over ``process_group`` by one reduction of 4 bytes in
    each ``unscale_`` or ``step``, so every process of the group has to step the same optimizers.

    Args:
        device: device type, as in torch.
        init_scale: the first scale.
        growth_factor: as in torch.
        backoff_factor: as in torch.
        growth_interval: steps without inf or nan after which the scale grows.
        enabled: as in torch. Graphs compiled for a disabled scaler do not scale.
        name: what graphs find it by. A later scaler of the same name takes the earlier one's place.
        min_scale: ``update`` never backs off below it. The default is out of reach in training that can still be
            saved: 40 bad steps in a row from 2**16.
        per_graph: every compiled graph, with every set of parameters, has a scale of its own, which its own
            gradients move. ``get_scale`` and checkpoints have the one scale that moves for all of them.
        process_group: the processes that step together; None for the default group.

    Raises:
        ScalerError: a bad name or ``min_scale``.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        name: str = "default",
        min_scale: float = 2.0**-24,
        per_graph: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ScalerError(f"name must be a text; got {name!r}. Graphs find the scaler by it.")
        if not 0.0 <= min_scale <= init_scale:
            raise ScalerError(f"min_scale must be between 0 and init_scale ({init_scale}); got {min_scale}.")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._name = name
        self._min_scale = min_scale
        self._per_graph = per_graph
        self._process_group = process_group
        self._forget()
        with _lock:
            _scalers[name] = self

    def _forget(self) -> None:
        """State that no checkpoint has."""
        self._uses: weakref.WeakKeyDictionary[FlaggedGraph, list[_Use]] = weakref.WeakKeyDictionary()
        #: a graph uses this scaler; for good, as in-graph and outside scaling must not change sides in a step
        self._in_graph = False
        #: a loss of this step was scaled before any graph used the scaler: the step goes on as it began
        self._scaled_outside = False
        #: a loss of this step was walked
        self._walked = False
        #: parameters that a loss of this step depends on through eager code
        self._eager: dict[int, Tensor] = {}
        self._found: weakref.WeakKeyDictionary[torch.optim.Optimizer, Tensor] = weakref.WeakKeyDictionary()
        self._last_found: Tensor | None = None
        self._last_flags: list[tuple[tuple[str, ...], Tensor]] = []
        self._last_read: dict[str, weakref.ref[Tensor]] = {}
        self._skipped: Tensor | None = None

    @property
    def name(self) -> str:
        """What graphs find the scaler by."""
        return self._name

    # ---- what compiled graphs ask ----

    def enter_graph(self, graph: FlaggedGraph, leaves: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """The scale and the flags for one call of a compiled graph.

        Args:
            graph: the graph.
            leaves: its parameters in this call.

        Returns:
            fp32, 0-d; and fp32 zeros that require a gradient, one per parameter.
        """
        if not self._enabled:
            return torch.ones((), device=graph.device), torch.zeros(
                len(leaves), device=graph.device, requires_grad=True
            )
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(graph.device)
        assert self._scale is not None
        self._in_graph = True
        use = self._use(graph, leaves)
        if self._scaled_outside:
            return torch.ones((), device=graph.device), use.flags
        scale = self._scale if use.scale is None else use.scale
        # The backward may come after an update, with another network in flight. It multiplies and divides by the
        # value of that moment, so nothing is wrong with it; .data keeps autograd's version check out of it.
        return scale.data.to(graph.device, non_blocking=True), use.flags

    def _use(self, graph: FlaggedGraph, leaves: Sequence[nn.Parameter]) -> _Use:
        with _lock:
            uses = self._uses.setdefault(graph, [])
            use = next((use for use in uses if use.is_of(leaves)), None)
            if use is None:
                uses[:] = [use for use in uses if all(ref() is not None for ref in use.leaves)]
                flags = torch.zeros(len(leaves), device=graph.device, requires_grad=True)
                use = _Use(tuple(weakref.ref(leaf) for leaf in leaves), graph.names, flags)
                if self._per_graph and self._scale is not None and self._growth_tracker is not None:
                    use.scale = self._scale.to(graph.device, copy=True)
                    use.growth_tracker = self._growth_tracker.to(graph.device, copy=True)
                uses.append(use)
            elif use.flags.grad is not None and all(leaf.grad is None for leaf in leaves):
                # gradients were dropped without an update: so are the findings about them
                use.flags.grad = None
            return use

    def _all_uses(self) -> Iterator[_Use]:
        for uses in list(self._uses.values()):
            yield from uses

    def _active_uses(self) -> Iterator[_Use]:
        """Those that a backward ran for since the last update."""
        return (use for use in self._all_uses() if use.flags.grad is not None)

    # ---- the loop ----

    def scale(self, outputs: Any) -> Any:
        """Returns losses as they are if a compiled graph uses this scaler, else as ``torch.amp.GradScaler`` does.

        Args:
            outputs: a tensor, or a nested iterable of tensors.

        Raises:
            ValueError: neither.
        """
        if not self._enabled or not self._in_graph or self._scaled_outside:
            self._scaled_outside = self._enabled
            return super().scale(outputs)
        if isinstance(outputs, Tensor):
            self._walk(outputs)
            return outputs
        if isinstance(outputs, Iterable):
            walked = map(self.scale, outputs)
            return type(outputs)(walked) if isinstance(outputs, (list, tuple)) else walked
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def _walk(self, loss: Tensor) -> None:
        """Notes the parameters that a loss depends on through anything but compiled graphs of this scaler."""
        self._walked = True
        flags = {id(use.flags) for use in self._all_uses()}
        seen: set[Any] = set()
        stack = [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            below = [child for child, _ in node.next_functions if child is not None]
            # only the nodes that add a gradient to a leaf know a variable
            variables = [getattr(child, "variable", None) for child in below]
            compiled = any(id(variable) in flags for variable in variables)
            for child, variable in zip(below, variables, strict=True):
                if variable is None:
                    stack.append(child)
                elif not compiled:
                    self._eager[id(variable)] = variable

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps, unless one of the optimizer's own parameters has a gradient with inf or nan.

        Fused optimizers of ``torch.optim`` find out on the device; for others the host waits once.

        Args:
            optimizer: whose ``step`` is called.
            args: passed on.
            kwargs: passed on.

        Returns:
            What the optimizer's step returns.

        Raises:
            RuntimeError: a closure; or a second step without ``update``.
            ScalerError: a parameter is fp16 itself.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if self._by_flags:
            if args and callable(args[0]):
                kwargs["closure"], args = args[0], args[1:]
            if "closure" not in kwargs and self._stage(optimizer) is OptState.READY:
                # before torch's step, which would otherwise tell a fused optimizer to unscale
                self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        self._note(optimizer)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps found, on its device.

        Args:
            new_scale: sets the scale instead, as in torch.
        """
        if not self._enabled:
            return
        by_flags = self._by_flags
        found = self._combined()
        super().update(new_scale)
        assert self._scale is not None
        if new_scale is None:
            self._scale.clamp_(min=self._min_scale)
        self._last_found = found
        self._scaled_outside = self._walked = False
        self._eager = {}
        if not by_flags:
            return
        self._last_flags = []
        for use in self._all_uses():
            if use.scale is not None:
                self._update_own_scale(use, new_scale)
            if use.flags.grad is not None:
                self._last_flags.append((use.names, use.flags.grad))
                use.flags.grad = None

    def _update_own_scale(self, use: _Use, new_scale: float | Tensor | None) -> None:
        assert use.scale is not None
        assert use.growth_tracker is not None
        if new_scale is not None:
            use.scale.fill_(new_scale)
        elif use.flags.grad is not None:
            update_scale(
                use.scale,
                use.growth_tracker,
                use.flags.grad.amax(),
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
            use.scale.clamp_(min=self._min_scale)

    # ---- what torch's methods ask ----

    @property
    def _by_flags(self) -> bool:
        return self._enabled and self._in_graph and not self._scaled_outside

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        return self._per_optimizer_states[id(optimizer)]["stage"]

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Finds out, and unscales nothing, where gradients come from compiled graphs."""
        if not self._by_flags:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        params = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        self._refuse_fp16(optimizer, params)
        judged = self._judged_by_flags(params)
        found = [found_inf]
        for use in self._active_uses():
            mine = [i for i, ref in enumerate(use.leaves) if id(ref()) in judged]
            if mine:
                found.append(use.found(mine))
        read = [p for key, p in params.items() if key not in judged]
        if read:
            # as torch reads an optimizer's gradients, DTensors and sparse ones included
            part: Any = SimpleNamespace(param_groups=[{"params": read}])
            found += super()._unscale_grads_(part, torch.ones_like(inv_scale), found_inf, True).values()
        alone = not self._is_distributed()
        if alone and not params:
            return {}
        combined = _any_of(found, found_inf.device)
        if not alone:
            # gradients are inf everywhere once they are averaged, but flags were found before
            dist.all_reduce(combined, dist.ReduceOp.MAX, self._process_group)
        names = _names_of(optimizer)
        self._last_read.update({self._name_of(p, names): weakref.ref(p) for p in read})
        return {combined.device: combined}

    def _judged_by_flags(self, params: Mapping[int, Tensor]) -> set[int]:
        """Ids of the parameters whose flags are the whole truth; see the module."""
        if not self._walked:
            return set()
        writes: Counter[int] = Counter()
        for use in self._active_uses():
            assert use.flags.grad is not None
            # the first gradient of a leaf is kept as it is, the later ones are added in place: flags tell how often
            count = use.flags.grad._version + 1
            writes.update({id(ref()): count for ref in use.leaves})
        # DistributedDataParallel writes the average back; what was bad in any process, all will know
        allowed = 2 if self._is_distributed() else 1
        return {
            key
            for key, p in params.items()
            if key not in self._eager and p.grad is not None and p.grad._version < allowed * writes[key]
        }

    def _refuse_fp16(self, optimizer: torch.optim.Optimizer, params: Mapping[int, Tensor]) -> None:
        low = [p for p in params.values() if p.dtype is torch.float16]
        if low:
            names = _names_of(optimizer)
            listed = ", ".join(self._name_of(p, names) for p in low[:5]) + (", ..." if len(low) > 5 else "")
            raise ScalerError(
                f"Attempting to unscale FP16 gradients: {len(low)} parameters are float16 themselves: {listed}. "
                "Keep them in float32, model.float(): amp_fx casts them where that is fast."
            )

    def _is_distributed(self) -> bool:
        if not dist.is_available() or not dist.is_initialized():
            return False
        return dist.get_world_size(self._process_group) > 1

    # ---- what happened ----

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Remembers, on the device, whether a step was skipped."""
        found = list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if not found or self._scale is None:
            return
        self._found[optimizer] = _any_of(found, self._scale.device)
        skipped = self._found[optimizer]
        self._skipped = skipped if self._skipped is None else self._skipped + skipped

    def _combined(self) -> Tensor | None:
        found = [
            value
            for state in self._per_optimizer_states.values()
            for value in state["found_inf_per_device"].values()
        ]
        return _any_of(found, found[0].device) if found else self._last_found

    @property
    def last_found_inf(self) -> Tensor:
        """1.0 if the step in progress, or else the last one, has found inf or nan; fp32, 0-d, on the device."""
        found = self._combined() if self._enabled else None
        return torch.zeros(()) if found is None else found

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped since the scaler was made. Reading it waits for the device."""
        return 0 if self._skipped is None else int(self._skipped.item())

    def step_taken(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's last ``step`` was taken; waits for the device.

        A scheduler of the learning rate should advance only then::

            scaler.step(optimizer)
            scaler.update()
            if scaler.step_taken(optimizer):
                scheduler.step()
        """
        if not self._enabled:
            return True
        found = self._found.get(optimizer)
        return found is not None and not found.item()

    def first_nonfinite(self) -> list[str]:
        """Names of the parameters with inf or nan in the gradients of the last step, nearest to the loss first.

        The step in progress, or the last one if there is none; what this process found, not what others did.
        Gradients that were read, not flagged, are named while they last: before ``zero_grad``. Waits for the
        device.
        """
        flags = [(use.names, use.flags.grad) for use in self._active_uses() if use.flags.grad is not None]
        found = [
            name
            for names, grad in reversed(flags or self._last_flags)
            for name, bad in reversed(list(zip(names, grad.tolist(), strict=True)))
            if bad
        ]
        for name, ref in reversed(self._last_read.items()):
            p = ref()
            if p is not None and p.grad is not None and not _is_finite(p.grad):
                found.append(name)
        return list(dict.fromkeys(found))

    @property
    def graph_scales(self) -> list[tuple[str, float]]:
        """With ``per_graph``, the first parameter and the scale of every graph; waits for the device."""
        return [
            (use.names[0] if use.names else "", use.scale.item())
            for use in self._all_uses()
            if use.scale is not None
        ]

    def _name_of(self, parameter: Tensor, names: Mapping[int, str]) -> str:
        for use in self._all_uses():
            for ref, name in zip(use.leaves, use.names, strict=True):
                if ref() is parameter:
                    return name
        return names[id(parameter)]

    # ---- checkpoints ----

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what any ``torch.amp.GradScaler`` saved; with ``per_graph`` all graphs begin at its scale."""
        super().load_state_dict(state_dict)
        if self._enabled:
            for use in self._all_uses():
                if use.scale is not None and use.growth_tracker is not None:
                    use.scale.fill_(state_dict["scale"])
                    use.growth_tracker.fill_(state_dict["_growth_tracker"])

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # what _forget makes: about this process alone
        return {key: value for key, value in state.items() if key not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process_group = None
        self._forget()
        with _lock:
            # a copy does not take the place of the living
            _scalers.setdefault(self._name, self)


_OF_THIS_PROCESS = {
    "_eager",
    "_found",
    "_in_graph",
    "_last_flags",
    "_last_found",
    "_last_read",
    "_process_group",
    "_scaled_outside",
    "_skipped",
    "_uses",
    "_walked",
}


def _any_of(found: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if one of the values is not zero, else 0.0; always a new tensor."""
    return torch.stack([value.to(device, non_blocking=True) for value in found]).amax().ne(0).float()


def _is_finite(grad: Tensor) -> bool:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return bool(torch.isfinite(values).all())


def _names_of(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """What an optimizer calls its parameters: their names, where it was given names, else their places."""
    return {
        id(p): group["param_names"][i] if "param_names" in group else f"parameter {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
