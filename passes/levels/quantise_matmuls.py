"""Convert what matmuls below 16 bits read, once for all of them, and multiply with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from amp_fx.graphs.keys import LEVEL
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.levels.captured_matmuls import captured_matmul
from amp_fx.passes.levels.joint_matmuls import joint_matmuls
from amp_fx.passes.levels.quantiser import CapturedQuantiser, Quantiser

__all__ = ["QuantiseMatmuls"]


@dataclass(frozen=True)
class QuantiseMatmuls(Pass):
    """Runs after :class:`PlaceLevels` has chosen, on the same graph; a captured one stays one that every runtime runs.

    A value is converted where the first matmul reads it, and all that read it in the same dtype, layout and scaling
    share the copy, forward and backward, unless somebody writes to it. Library kernels take the rows of the first
    operand and the columns of the second in one piece each: a copy that lies otherwise is written that way. Cases:

    1. by row: largest magnitude, scale and copy are those of the matrix as the matmul reads it. Or of each block of a
       row: then scales are bytes, see :func:`amp_fx.policy.scaled.block_scales`.
    2. whole: there is one scale and one copy of the value, and one more copy for who reads it transposed; of a weight,
       the backward makes that again.
    3. without gradients, what a value is multiplied by has a scale for each column of the result whatever the level: it
       may be made once and kept.
    4. a weight that is fp32 in memory is read as it is, not as it is cast for a low matmul.
    5. a value with an infinity or NaN has a scale of zero or NaN: everything that depends on the scale becomes NaN,
       which a loss scaler sees as it does the infinity.

    Before, with ``w`` of 512 rows::

        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        w_t = torch.ops.aten.permute.default(w_16, [1, 0])
        mm = torch.ops.aten.mm.default(x, w_t)                                          # bf16[8192, 512]

    After, by row, and likewise for ``x``::

        amax = torch.ops.aten.amax.default(torch.ops.aten.abs.default(w), [1], True)    # f32[512, 1]
        scale = exp2(floor(log2(448 / clamp_min(amax, 2**-100))))
        w_8 = torch.ops.prims.convert_element_type.default(clamp(w * scale), torch.float8_e4m3fn)
        mm = torch.ops.aten._scaled_mm.default(x_8, w_8.t(), 1 / x_scale, 1 / scale, None, None, torch.bfloat16, True)

    Attributes:
        joint: False on a captured graph.
    """

    name: ClassVar[str] = "quantise-matmuls"
    needs: ClassVar[frozenset[str]] = frozenset({"levels-placed"})

    joint: bool = True

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        if self.joint:
            work = Quantiser(gm.graph)
            matmuls = joint_matmuls(gm)
        else:
            work = CapturedQuantiser(gm.graph)
            matmuls = [
                found for node in gm.graph.nodes if (found := captured_matmul(node, context)) is not None
            ]
        chosen = [(matmul, level) for matmul in matmuls if (level := LEVEL.of(matmul.node)) is not None]
        for matmul, level in chosen:
            work.multiply(matmul, level)
        if chosen:
            work.tidy()
        return PassResult(len(chosen), f"{len(chosen)} scaled matmuls read {len(work.copies)} copies")
