"""What Inductor makes of one copy with scales for a target: kernels and bytes; runs in a target's process."""

from __future__ import annotations

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensorMode, lower_with_inductor
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import LEVEL, MARK
from amp_fx.passes import PassContext
from amp_fx.passes.base import CUSTOM
from amp_fx.passes.levels.quantise_matmuls import QuantiseMatmuls
from amp_fx.policy.levels import LEVELS
from amp_fx.targets._torch import compile_contexts, pretended

__all__ = ["counted", "product"]

aten, prims = torch.ops.aten, torch.ops.prims


def product(
    rows: int, columns: int, dtype: torch.dtype, read: str
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(graph, fake input) of a matrix times itself: operands are its ``"rows"``, its ``"columns"``, or one each."""
    graph = fx.Graph()

    def add(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]  # an operator
        node.meta["val"] = run_fake(node)
        return node

    matrix = source = graph.placeholder("x")
    source.meta["val"] = torch.empty(rows, columns, dtype=dtype, device="cuda")
    if dtype is torch.float32:
        matrix = add(prims.convert_element_type.default, source, torch.bfloat16)
    turned = add(aten.permute.default, matrix, [1, 0])
    operands = {"rows": (matrix, turned), "columns": (turned, matrix), "both": (matrix, matrix)}[read]
    graph.output((add(aten.mm.default, *operands),))
    return fx.GraphModule({}, graph), [source.meta["val"]]


def counted(level: str, rows: int, columns: int, dtype: torch.dtype, read: str) -> tuple[int, int]:
    """(kernels, bytes that they read and write) of the copy that a matrix times itself reads."""
    with pretended(), FakeTensorMode() as mode, compile_contexts(mode, "0/0"):
        gm, inputs = product(rows, columns, dtype, read)
        (matmul,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        matmul.meta[CUSTOM] = {MARK: "mm"}
        LEVEL.set(matmul, (LEVELS[level], LEVELS[level].implementations[0], None))
        QuantiseMatmuls().call(gm, PassContext())
        gm.recompile()
        lowered = lower_with_inductor(gm, inputs, is_inference=True)
    return len(lowered.generated), sum(size for _, size in lowered.generated)
