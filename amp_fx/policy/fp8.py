"""How matmuls run in fp8: recipes by name. All scale by the values at hand, in every call.

rowwise: torchao's ``Float8LinearRecipeName.ROWWISE``, rowwise_gw_hp: its ``ROWWISE_WITH_GW_HP``, tensorwise: its
``TENSORWISE``. Which element types: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433. mxfp8: Recipes for
Pre-training LLMs with MXFP8, https://arxiv.org/abs/2506.08027; torchao's ``MXFP8_RCEIL``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AUTO", "FORWARD", "GRAIN", "INPUT", "RECIPES", "ROLES", "WEIGHT", "Recipe"]

#: what a matmul is to a call of the forward: itself, or what gives the gradient of its first or second operand
ROLES = FORWARD, INPUT, WEIGHT = "forward", "gradient of its input", "gradient of its weight"

#: library kernels take sizes that are multiples of it
GRAIN = 16


@dataclass(frozen=True)
class Recipe:
    """What one scale stands for, and which dtypes hold what.

    Attributes:
        name: the key in :data:`RECIPES`.
        by_row: each row that a matmul contracts has a scale; else there is one for the whole value.
        powers: scales are powers of two, so that scaling itself rounds nothing.
        gradient: dtype of gradients; everything else is e4m3.
        weight_gradients: False where the matmuls that give gradients of weights stay in the low dtype.
        block: so many elements of a row have a scale of their own, in one byte (e8m0); None: the row has one.
    """

    name: str
    by_row: bool
    powers: bool
    gradient: torch.dtype = torch.float8_e4m3fn
    weight_gradients: bool = True
    block: int | None = None


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("rowwise", by_row=True, powers=True),
        Recipe("tensorwise", by_row=False, powers=False, gradient=torch.float8_e5m2),
        Recipe("rowwise_gw_hp", by_row=True, powers=True, weight_gradients=False),
        Recipe("mxfp8", by_row=True, powers=True, block=32),
    )
}

#: the option that leaves the recipe to the device
AUTO = "auto"
