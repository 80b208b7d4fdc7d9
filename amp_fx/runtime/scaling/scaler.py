"""``amp_fx.GradScaler``: loss scaling whose arithmetic is inside the compiled backward.

A graph compiled with ``options={"dtype": "float16", "scaler": "default"}`` multiplies the gradients that enter its
backward by the scale of the scaler called "default", and divides those that leave it. So ``scale`` returns the loss
as it is, and what is left is to look for inf and nan in the gradients that an optimizer is about to use, whoever made
or changed them: hooks, clipping, DistributedDataParallel, the user. What is written after ``unscale_`` is the user's.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_fx._torch import BEFORE_STEP, UNTRACED, after_closure, update_scale
from amp_fx.errors import ScalerError, did_you_mean
from amp_fx.runtime.scaling.findings import ScaledStep, ScalerState, any_of, look, names_of, parameters_of


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for graphs of amp_fx; without such a graph it does what ``torch.amp.GradScaler`` does.

    The loop is that of torch: ``scale(loss).backward()``, perhaps ``unscale_(optimizer)`` and clipping,
    ``step(optimizer)``, ``update()``. The state dict has torch's keys, and loads both ways.

    Gradients are true to scale as soon as ``backward`` returns. Eager parts of the model are not scaled, once a
    graph uses this scaler; those in fp16 of their own need a scaler of their own.

    Each optimizer step reads every gradient once, 4 bytes per parameter, to look for inf and nan; torch's scaler
    reads and writes them, 8 bytes. Nothing cheaper is safe: a write through ``p.grad.data`` leaves no trace.

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
        process_group: the processes that step together; None for the default group.

    Raises:
        ScalerError: a bad device, name or ``min_scale``.
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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not _is_device(device):
            raise ScalerError(
                f"device must be a type that torch has, such as 'cuda' or 'cpu'; got {device!r}. It comes first: "
                "GradScaler('cuda', init_scale=65536.0)."
            )
        if not isinstance(name, str) or not name:
            raise ScalerError(f"name must be a text; got {name!r}. Graphs find the scaler by it.")
        if not 0.0 <= min_scale <= init_scale:
            raise ScalerError(f"min_scale must be between 0 and init_scale ({init_scale}); got {min_scale}.")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._name = name
        self._min_scale = min_scale
        self._here = ScalerState(process_group)
        _register(self, replace=True)

    @property
    def name(self) -> str:
        """The name by which graphs find the scaler."""
        return self._name

    # ---- what compiled graphs ask ----

    def enter_graph(self, names: Iterable[str], leaves: Sequence[Tensor], device: torch.device) -> Tensor:
        """The scale for one call of a compiled graph with these parameters: fp32, 0-d, on the graph's device."""
        if not self._enabled:
            return torch.ones((), dtype=torch.float32, device=device)
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        self._here.in_graph = True
        self._here.now.enter(names, leaves)
        if self._here.scaled_outside:
            return torch.ones((), dtype=torch.float32, device=device)
        # The backward may come after an update, with another network in flight. It multiplies and divides by the
        # value of that moment, so nothing is wrong with it; .data keeps autograd's version check out of it.
        scale = self._scale.data
        return scale if scale.device == device else scale.to(device, non_blocking=True)

    # ---- the loop ----

    def scale(self, outputs: Any) -> Any:
        """Returns losses as they are if a compiled graph uses this scaler, else as ``torch.amp.GradScaler`` does.

        ValueError for outputs that hold another value than tensors.
        """
        if not self._by_graphs:
            self._here.scaled_outside = self._enabled
            return super().scale(outputs)
        if isinstance(outputs, Tensor):
            return outputs
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Reads the gradients of an optimizer's parameters, before they are clipped; else as in torch.

        Raises:
            RuntimeError: a second time without ``update``, or after ``step``.
            ScalerError: a parameter is fp16 itself.
        """
        if not self._by_graphs or self._stage(optimizer) is not OptState.READY:
            return super().unscale_(optimizer)
        assert self._scale is not None
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = self._look(optimizer, torch.zeros_like(self._scale))
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps, unless one of the optimizer's own parameters has a gradient with inf or nan; returns what that does.

        Fused optimizers of ``torch.optim`` find out on the device; for others the host waits once.

        Raises:
            RuntimeError: a closure; or a second step without ``update``.
            ScalerError: a parameter is fp16 itself; or graphs of another scaler have scaled the gradients.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        others = _scalers_of(optimizer)
        if others and self not in others:
            _refuse(others[0], f"amp_fx.GradScaler {self._name!r}")
        if self._by_graphs:
            if args and callable(args[0]):
                kwargs["closure"], args = args[0], args[1:]
            if "closure" not in kwargs and self._stage(optimizer) is OptState.READY:
                # before torch's step, which would otherwise tell a fused optimizer to unscale
                self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if found and self._scale is not None:
            here = self._here
            skipped = here.found[optimizer] = any_of([*found.values()], self._scale.device)
            here.skipped = skipped if here.skipped is None else here.skipped + skipped
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps found, on its device; ``new_scale`` sets it instead, as in torch."""
        if not self._enabled:
            return
        here, found = self._here, self._all_found()
        if found:
            here.last_found = any_of(found, found[0].device)
        if new_scale is None and found:
            scale, growth_tracker = self._check_scale_growth_tracker("update")
            factors = self._growth_factor, self._backoff_factor
            update_scale(scale, growth_tracker, any_of(found, scale.device), *factors, self._growth_interval)
            scale.clamp_(min=self._min_scale)
            self._per_optimizer_states.clear()
        else:
            super().update(new_scale)
        here.scaled_outside = False
        here.now.leaves.clear()
        here.now, here.last = ScaledStep(), here.now

    # ---- what torch's methods ask ----

    @property
    def _by_graphs(self) -> bool:
        return self._enabled and self._here.in_graph and not self._here.scaled_outside

    def _stage(self, optimizer: Optimizer) -> OptState:
        return self._per_optimizer_states[id(optimizer)]["stage"]

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Looks, and unscales nothing, where gradients come from compiled graphs."""
        if not self._by_graphs:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return self._look(optimizer, found_inf)

    def _look(self, optimizer: Optimizer, found: Tensor) -> dict[torch.device, Tensor]:
        here, parameters = self._here, [p for p in parameters_of(optimizer) if p.grad is not None]
        if low := [p for p in parameters if p.dtype is torch.float16]:
            names = {**names_of(optimizer), **here.now.names}
            listed = ", ".join(names[id(p)] for p in low[:5]) + (", ..." if len(low) > 5 else "")
            raise ScalerError(
                f"Attempting to unscale FP16 gradients: {len(low)} parameters are float16 themselves: {listed}. "
                "Keep them in float32, model.float(): amp_fx casts them where that is fast."
            )
        here.now.looks.append((weakref.ref(optimizer), look(parameters, found)))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(here.process_group) > 1:
            # one process may have none of the parameters
            dist.all_reduce(found, dist.ReduceOp.MAX, here.process_group)
        elif not parameters:
            return {}
        return {found.device: found}

    # ---- what happened ----

    def _all_found(self) -> list[Tensor]:
        states = self._per_optimizer_states.values()
        return [value for state in states for value in state["found_inf_per_device"].values()]

    @property
    def last_found_inf(self) -> Tensor:
        """1.0 if the step in progress, or else the last one, has found inf or nan; fp32, 0-d, on the device."""
        found = self._all_found() if self._enabled else []
        last = any_of(found, found[0].device) if found else self._here.last_found
        return torch.zeros((), dtype=torch.float32) if last is None else last

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped since the scaler was made. Reading it waits for the device."""
        return 0 if self._here.skipped is None else int(self._here.skipped.item())

    def step_taken(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's last ``step`` was taken; waits for the device.

        A scheduler of the learning rate should advance only then::

            scaler.step(optimizer)
            scaler.update()
            if scaler.step_taken(optimizer):
                scheduler.step()
        """
        if not self._enabled:
            return True
        found = self._here.found.get(optimizer)
        return found is not None and not found.item()

    def first_nonfinite(self) -> list[str]:
        """Names of the parameters with inf or nan in the gradients of the last step, nearest to the loss first.

        The step in progress, or the last one if there is none; what this process found, not what others did.
        Between ``backward`` and ``unscale_`` or ``step``, gradients are looked at here. Waits for the device.
        """
        now = self._here.now
        return (now if now.looks or now.leaves else self._here.last).nonfinite()

    # ---- checkpoints ----

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_here"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._here = ScalerState()
        # a copy does not take the place of the living
        _register(self, replace=False)


def _is_device(device: object) -> bool:
    try:
        return isinstance(device, str) and bool(torch.device(device).type)
    except RuntimeError:
        return False


_lock = threading.Lock()
#: the living scalers in the order in which they were made
_scalers: weakref.WeakValueDictionary[int, GradScaler] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _register(scaler: GradScaler, *, replace: bool) -> None:
    """Makes a scaler findable by its name while it lives; ``replace``: in the place of a living one of that name."""
    UNTRACED.install()
    with _lock:
        if replace or scaler.name not in {other.name for other in list(_scalers.values())}:
            _scalers[next(_numbers)] = scaler
    BEFORE_STEP.listen(_check_step)  # now: a step's closure may be the first that calls a graph


def find_scaler(name: str) -> GradScaler:
    """The living scaler that was made last under a name; ScalerError if there is none."""
    living = dict(sorted(_scalers.items())).values()
    if (scaler := next((each for each in reversed(living) if each.name == name), None)) is None:
        known = sorted({each.name for each in living})
        raise ScalerError(
            f"No amp_fx.GradScaler is called {name!r}; known: {', '.join(map(repr, known)) or 'none'}."
            f"{did_you_mean(name, known)} Make one before the first forward, and keep it: "
            f"scaler = amp_fx.GradScaler(device, name={name!r})."
        )
    return scaler


def _scalers_of(optimizer: Optimizer) -> list[GradScaler]:
    """The living scalers whose graphs were called with parameters of the optimizer since their last ``update``."""
    keys = set(map(id, parameters_of(optimizer)))
    return [scaler for scaler in list(_scalers.values()) if not keys.isdisjoint(scaler._here.now.leaves)]


def _check_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Checks before a step, and once more after its closure, if it has one: that makes the gradients anew."""
    _check(optimizer)
    if all(scaler._here.is_asked for scaler in list(_scalers.values()) if scaler.is_enabled()):
        BEFORE_STEP.leave(_check_step)
        return None
    return after_closure(args, kwargs, lambda: _check(optimizer))


def _check(optimizer: Optimizer) -> None:
    """Before the first step of what a scaler's graphs have scaled: that scaler has to have looked at the gradients."""
    scalers = _scalers_of(optimizer)
    waiting = [scaler for scaler in scalers if not scaler._here.is_asked]
    states = [scaler._per_optimizer_states.get(id(optimizer)) for scaler in scalers]
    if waiting and not any(state and state["found_inf_per_device"] for state in states):
        _refuse(waiting[0], "something else, another scaler or the loop itself,")
    for scaler in waiting:
        scaler._here.is_asked = True


def _refuse(scaler: GradScaler, stepping: str) -> NoReturn:
    name = scaler.name
    raise ScalerError(
        f"The gradients of an optimizer are scaled inside the compiled backward by amp_fx.GradScaler {name!r}, and "
        f"{stepping} steps it: the loss is scaled twice, or steps with inf or nan are not skipped and the scale never "
        f"adapts. Each graph has one scaler, the last one that was made with its name: scale, step and update with "
        f"that one, or take another name in the options of the model, or leave 'scaler' out of them. A loop that "
        f"steps by itself calls scaler.unscale_(optimizer) first."
    )
