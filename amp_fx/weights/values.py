"""The values that one compiled graph is called with, in the order in which it takes them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp_fx.policy.levels import LEVELS
from amp_fx.weights.changes import State, state_of
from amp_fx.weights.derived import Derived, derived_of
from amp_fx.weights.elements import is_dense
from amp_fx.weights.kept import Made
from amp_fx.weights.recipes import Cast, CopyRecipe, Recipe, Scaled

if TYPE_CHECKING:
    from amp_fx.weights.device_copies import DeviceCopies

__all__ = ["Input", "Values", "is_renewed_on_device"]

#: what the kernels that renew copies read, and in which dtypes they write rows with a scale
_RENEWED = (torch.float32, torch.float16, torch.bfloat16)
_RENEWED_ROWS = (torch.float8_e4m3fn,)


class Input(NamedTuple):
    """What a graph takes.

    Attributes:
        value: position of the value.
        part: which of its tensors.
        view: what the graph reads of that; None: all.
    """

    value: int
    part: int = 0
    view: Callable[[Tensor], Tensor] | None = None


class Values:
    """Makes what a graph takes from the weights that it is called with.

    Args:
        recipes: each once, and the positions of the weights that it takes.
        inputs: what the graph takes.
    """

    def __init__(self, recipes: Sequence[tuple[Recipe, Sequence[int]]], inputs: Sequence[Input]) -> None:
        self._recipes, self._inputs = recipes, inputs

    def make(self, weights: Sequence[Tensor], before: Made[list[Tensor]] | None = None) -> Made[list[Tensor]]:
        """What follows from weights, shared with whoever reads the same.

        Args:
            weights: all of them.
            before: what was made of these before.
        """
        found: list[Derived] = []
        states: dict[int, State] = {}
        on_device: list[_Renewed] = []
        for recipe, positions in self._recipes:
            own = [weights[at] for at in positions]
            derived = derived_of(recipe, own)
            if isinstance(recipe, (Cast, Scaled)) and is_renewed_on_device(own[0], recipe):
                of_own = (state_of(own[0], elements=False),)
                derived.place(own[0], recipe)
                on_device.append(_Renewed(own[0], recipe, derived, of_own[0]))
            else:
                derived, of_own = derived.bring(own)
            found.append(derived)
            # of two states the earlier: that one is stale
            states = {**dict(zip(positions, of_own, strict=True)), **states}
        renewed = _renew(on_device, before) if on_device else None
        all_states = [states[at] if at in states else state_of(weight) for at, weight in enumerate(weights)]
        return Made(self._taken([each.tensors for each in found]), all_states, found, renewed)

    def anew(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What follows from weights, made for one call and not kept."""
        # an inference tensor could not be written to outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            made = [recipe.make([weights[at] for at in positions], ()) for recipe, positions in self._recipes]
            return self._taken(made)

    def _taken(self, made: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        parts = [(made[value][part], view) for value, part, view in self._inputs]
        with torch.inference_mode(False), torch.no_grad():
            return [tensor if view is None else view(tensor) for tensor, view in parts]


class _Renewed(NamedTuple):
    """A copy that is renewed on its device."""

    weight: Tensor
    recipe: CopyRecipe
    derived: Derived
    state: State


def _renew(copies: Sequence[_Renewed], before: Made[list[Tensor]] | None) -> DeviceCopies:
    """Copies that are renewed on their device, made; as long as they lie where they did, the same ones."""
    from amp_fx.weights.device_copies import DeviceCopies  # imports triton

    weights, recipes = [copy.weight for copy in copies], [copy.recipe for copy in copies]
    tensors = [copy.derived.tensors for copy in copies]
    renewed = None if before is None else before.renewed
    if renewed is not None and renewed.fits(weights, tensors):
        renewed.renew([copy.derived.states != (copy.state,) for copy in copies])
    else:
        renewed = DeviceCopies(weights, tensors, recipes)
        renewed.make()
    for copy in copies:
        copy.derived.states = (copy.state,)
    return renewed


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_renewed_on_device(weight: Tensor, recipe: CopyRecipe) -> bool:
    """True if a kernel renews such a copy of the weight."""
    if isinstance(recipe, Scaled) and LEVELS[recipe.level].dtype not in _RENEWED_ROWS:
        return False
    return weight.is_cuda and weight.dtype in _RENEWED and is_dense(weight) and _has_triton()
