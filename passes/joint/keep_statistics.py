"""Keep the mean and the inverse deviation of a norm in fp32 on their way to its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES, is_eligible
from amp_fx.passes.base import JOINT, Pass, PassContext
from amp_fx.placement.layout import CAST

__all__ = ["KeepStatistics"]


@dataclass(frozen=True)
class KeepStatistics(Pass):
    """Runs on Inductor's joint graph (forward and backward together).

    Torch's decompositions of ``native_layer_norm`` (for CPU) and ``native_group_norm`` compute mean and inverse
    deviation in fp32, and round them to the dtype of the input for the backward. All rows then have nearly the same
    error, and so has the whole gradient: of BERT under policy ``fast`` it was a fifth of the squared error. Kept in
    fp32 they take two bytes more per row. Only what a decomposition rounds is changed, never a cast of the program.

    Before::

        low = torch.ops.prims.convert_element_type.default(rsqrt, torch.bfloat16)       # bf16[8, 32, 1]
        share = torch.ops.aten.div.Tensor(low, 64)                                      # bf16[8, 32, 1], backward
        mul = torch.ops.aten.mul.Tensor(share, sub)                                     # f32[8, 32, 64]

    After::

        share = torch.ops.aten.div.Tensor(rsqrt, 64)                                    # f32[8, 32, 1], backward
        mul = torch.ops.aten.mul.Tensor(share, sub)                                     # f32[8, 32, 64]
    """

    name: ClassVar[str] = "keep-statistics"
    needs: ClassVar[frozenset[str]] = frozenset({JOINT})

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        kept = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            if not _rounds_a_statistic(cast) or (low := _low_readers(cast)) is None:
                continue
            cast.replace_all_uses_with(cast.all_input_nodes[0])
            gm.graph.erase_node(cast)
            for node in (node for node in gm.graph.nodes if node in low):
                node.meta["val"] = run_fake(node)
            kept += 1
        return f"{kept} statistics of norms stay in fp32"


def _rounds_a_statistic(cast: fx.Node) -> bool:
    before, after = cast.all_input_nodes[0].meta.get("val"), cast.meta["val"]
    if (
        not has_trait(cast.meta.get("original_aten"), Trait.NORM)
        or after.dtype not in LOW_DTYPES
        or not is_eligible(before)
    ):
        return False
    return before.dtype is torch.float32 and any(_is_backward(user) for user in cast.users)


def _low_readers(cast: fx.Node) -> set[fx.Node] | None:
    """What is low because the statistic is; None where not all of it belongs to the backward of a norm."""
    found: set[fx.Node] = set()
    stack = [cast]
    while stack:
        for user in stack.pop().users:
            if not (_is_backward(user) or has_trait(user, Trait.RESHAPES)):
                return None
            if user.meta["val"].dtype in LOW_DTYPES and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _is_backward(node: fx.Node) -> bool:
    if has_trait(node, Trait.RESHAPES):
        return any(map(_is_backward, node.users))
    return has_trait(node.meta.get("original_aten"), Trait.NORM_BACKWARD)
