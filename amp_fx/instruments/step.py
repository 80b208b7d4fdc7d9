"""One measured step of a user's model, after which that is what it was: ``calibrate``, ``compare``, ``histogram``."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map

from amp_fx._torch import GROUPS, RECURRENT, autocast_disabled
from amp_fx.errors import AmpFxError, InputError, OptionsError
from amp_fx.instruments.batches import raised

#: gradients of parameters by name, or outputs by place: fp32, or fp64 where the model is
Results = dict[str, Tensor]

#: size of a gradient, relative to those of all parameters, below which it may be what is left where it cancels
_CANCELLED = 2.0**-14
_NO_GRADIENT = "the loss depends on no parameter that requires a gradient."


@dataclass(frozen=True)
class Step:
    """A model, a call of it, and what is judged: gradients of its parameters, or what it returns."""

    model: nn.Module
    #: positional and keyword arguments
    call: tuple[tuple[Any, ...], dict[str, Any]]
    #: what the model returns -> a loss, a 0-d tensor; of outputs, the tensors that count, in any structure. None: the
    #: loss is returned, or is ``.loss`` of that; of outputs, all floating tensors count
    pick: Callable[[Any], Any] | None = None
    #: of the random numbers that model and loss draw; None: they go on from the caller's
    seed: int | None = 0
    #: True where what is judged is what the model returns
    of_outputs: bool = False
    #: grad mode of a call whose outputs are judged
    grad: bool = False

    def __post_init__(self) -> None:
        if self.pick is not None and not callable(self.pick):
            given = self.pick
            shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
            raise OptionsError(
                f"loss must be a function of what the model returns, or None; got {type(given).__name__}{shape}. "
                "Arguments of the model are one batch: (x, y), or {'x': x, 'y': y}."
            )
        is_differentiated = self.records and self.parameters
        held = (self.model.named_parameters(), self.model.named_buffers()) if is_differentiated else ()
        made = (n for n, t in itertools.chain(*held) if t.is_inference() and t.is_floating_point())
        if (name := next(made, None)) is not None:
            raise InputError(
                f"{name} was made under torch.inference_mode(): autograd keeps no such tensor. Build or load the model "
                "outside of it; call it there afterwards."
            )

    @property
    def records(self) -> bool:
        """True where autograd is on in the call."""
        return self.grad or not self.of_outputs

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def returned(self, program: Callable[..., Any] | None = None) -> Iterator[Any]:
        """The result of a call of the model, or of a model made from it; it may be differentiated inside."""
        with (
            untouched(self.model, *self.call) as (args, kwargs),
            torch.set_grad_enabled(self.records),
        ):
            if self.seed is not None:
                torch.default_generator.manual_seed(self.seed)
                if torch.cuda.is_available():
                    torch.cuda.manual_seed(self.seed)
                random.seed(self.seed)
                np.random.seed(self.seed % 2**32)
            yield (self.model if program is None else program)(*args, **kwargs)

    def judged(self, returned: Any, scale: float = 1.0, beside: Sequence[Tensor] = ()) -> Results:
        """The results to judge, from those that a call has returned; ``scale`` of the loss is taken out again.

        The loss is also differentiated with respect to ``beside``, for the hooks of these tensors. AmpFxError where
        nothing is left to judge.
        """
        if self.of_outputs:
            return {name: _wide(value.detach()) for name, value in self.outputs(returned).items()}
        loss, parameters = loss_of(returned, self.pick), self.parameters
        inputs = [*parameters.values(), *beside]
        with autocast_disabled():
            found = torch.autograd.grad(loss * scale, inputs, allow_unused=True) if inputs else ()
        named = zip(parameters, found, strict=False)
        results = {name: _wide(gradient) / scale for name, gradient in named if gradient is not None}
        if not results:
            raise AmpFxError(_NO_GRADIENT)
        return results

    def outputs(self, returned: Any) -> Results:
        """The floating tensors that count of what a call has returned, by their places; AmpFxError for none."""
        chosen = returned if self.pick is None else _applied(self.pick, returned)
        found = {
            keystr(path): leaf
            for path, leaf in tree_leaves_with_path(plain(chosen))
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()
        }
        if not found:
            how = "the model returned" if self.pick is None else "the function picked"
            raise AmpFxError(
                f"{how} no floating tensor: {type(chosen).__name__}. They may be in tuples, lists, mappings and data "
                "classes. To pick what counts of other results, give calibrate of=function, or compare loss=function."
            )
        return found

    def results(self, program: Callable[..., Any] | None = None, scale: float = 1.0) -> Results:
        """The results to judge, as the model computes them, or a model made from it."""
        with self.returned(program) as returned:
            return self.judged(returned, scale)

    def drawn_results(self) -> tuple[Results, bool]:
        """The results as the model computes them, and whether it draws random numbers for them."""
        before: list[Any] = []

        def program(*args: Any, **kwargs: Any) -> Any:
            before.append(_drawn())
            return self.model(*args, **kwargs)

        with self.returned(program) as returned:
            return self.judged(returned), [_drawn()] != before

    def exact(self) -> Results | None:
        """Results of a copy of the model in fp64; None where the model draws random numbers, which differ in fp64."""
        call = tree_map(
            lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, self.call
        )
        found, draws = replace(self, model=copy.deepcopy(self.model).double(), call=call).drawn_results()
        return None if draws else found

    def error(self, results: Results, reference: Results) -> float:
        """Relative L2 error of all gradients together; of outputs, each weighs the same: root of the mean square."""
        if not self.of_outputs:
            return relative_error(results, reference)
        errors = [relative_error({name: results[name]}, {name: each}) for name, each in reference.items()]
        return math.sqrt(sum(error**2 for error in errors) / max(len(errors), 1))


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, nothing is found that was compiled outside, nor outside what was compiled inside."""
    GROUPS.install()
    RECURRENT.install()
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Relative L2 error over all elements together of what both have.

    Infinite where an element is not finite and not the same in both, as the mask of an attention is.
    """
    far = norm = 0.0
    for name in [name for name in exact if name in found]:
        ours, theirs = found[name], exact[name]
        same = ours == theirs
        far += torch.where(same, 0.0, ours.double() - theirs.double()).square().sum().item()
        norm += torch.where(theirs.isinf() & same, 0.0, theirs.double()).square().sum().item()
    if not far:
        return 0.0
    if not norm and math.isfinite(far):
        return 1.0
    ratio = math.sqrt(far / norm) if norm else math.inf
    return math.inf if math.isnan(ratio) else ratio


def zeroed(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> list[str]:
    """Gradients of zero where the exact ones are more than what rounding leaves of one that cancels."""
    squares = {name: each.double().square().mean().item() for name, each in exact.items() if each.numel()}
    least = _CANCELLED**2 * sum(squares.values()) / max(len(squares), 1)
    return [
        name for name, each in squares.items() if each > least and name in found and not found[name].any()
    ]


def loss_of(result: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """The loss in what a model returned; AmpFxError where there is none, or it depends on no parameter."""
    value = getattr(result, "loss", result) if loss is None else _applied(loss, result)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise AmpFxError(
            f"no loss: it should be a tensor with one element, got {found}. Take a model that returns its loss, or pass"
            " loss, a function that makes it of what the model returns: on the command line, --loss"
            " package.module:callable."
        )
    if not value.requires_grad:
        raise AmpFxError(_NO_GRADIENT)
    return value


def _applied(function: Callable[[Any], Any], returned: Any) -> Any:
    """The result of a user's function for the result of the model."""
    try:
        return function(returned)
    except Exception as error:
        kind = type(returned).__name__
        raise AmpFxError(
            f"the function of what the model returned cannot be called with {kind}: {raised(error)}."
        ) from error


@contextlib.contextmanager
def untouched(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields copies of the arguments; afterwards the model and the random generators are as they were."""
    modules = list(program.modules()) if isinstance(program, nn.Module) else []
    tables: list[dict[str, Any]] = []
    for each in modules:
        # and hooks, which a call may add: transformers observes layers by such, and notes that in the module
        own = (value for value in vars(each).values() if type(value) in (dict, OrderedDict))
        tables += vars(each), *own
    before = [(table, dict(table)) for table in tables]
    # parameters too: spectral norm and the like write to them
    held = dict.fromkeys(v for each in modules for v in (*each.parameters(False), *each.buffers(False)))
    values = [(value, value.detach().clone(), value.grad, value.is_leaf) for value in held]
    python, arrays = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for module in modules:
        # what Module.compile() made runs elsewhere: here every module is as it was before
        vars(module).pop("_compiled_call_impl", None)
    # a reducer that waits for gradients would refuse the next step
    alone = program.no_sync() if isinstance(program, DistributedDataParallel) else contextlib.nullcontext()
    try:
        with torch.random.fork_rng(devices), alone:
            yield tree_map(_copy, (args, dict(kwargs)))
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        for table, entries in before:
            table.clear()
            table.update(entries)
        for value, original, gradient, is_leaf in values:
            # a value that is not equal to itself is not a number: written back, it is what it was
            if not torch.equal(value, original):
                with torch.no_grad():
                    value.copy_(original)
            if is_leaf and not value.is_leaf:
                # a call with gradients has written to a buffer what has gradients
                value.detach_()
            value.grad = gradient


def entry_of(program: Callable[..., Any]) -> Callable[..., Any]:
    """The argument for ``torch.compile`` that compiles a module as its own ``compile`` method does."""
    in_place = getattr(program, "_compiled_call_impl", None) is not None
    return program._call_impl if in_place else program  # pyright: ignore[reportFunctionMemberAccess]


def plain(value: Any) -> Any:
    """A model's results, with dictionaries for mappings and data classes, many of which pytree does not know."""

    def taken_apart(part: Any) -> Any:
        named = _named(part)
        return part if named is None else {name: plain(each) for name, each in named.items()}

    return tree_map(taken_apart, value, is_leaf=lambda part: _named(part) is not None)


def _named(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return None


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    # caches of transformers and other objects that a call may write to
    return copy.deepcopy(value)


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float64 else value.float()


def _drawn() -> list[Any]:
    """The states of the random generators that a program has by default."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return [*(state.tolist() for state in states), random.getstate(), repr(np.random.get_state(legacy=False))]
