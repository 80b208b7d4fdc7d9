"""What ``Rewriter`` adds to a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_fx._torch import make_fx
from amp_fx.graphs.rewriter import Rewriter

CAST = torch.ops.prims.convert_element_type.default


def test_a_traced_function_takes_any_sizes_and_inherits_from_the_node_where_it_stands() -> None:
    gm = make_fx(torch.sin, tracing_mode="symbolic")(torch.randn(3, 4))
    (x,) = gm.graph.find_nodes(op="placeholder")
    (sin,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.meta["partitioner_tag"] = "is_backward"

    def function(value: Tensor, *, offset: float) -> tuple[Tensor, list[Tensor]]:
        seen = torch.arange(value.shape[0], device=value.device) > 0
        return value.flatten() + offset, [value.bfloat16().masked_fill(~seen[:, None], 0)]

    write = Rewriter(gm.graph, captured=False)
    with write.before(sin):
        _, (masked,) = write.trace(function, x, offset=2.0)
    write.replace(sin, masked)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert {node.meta["partitioner_tag"] for node in write.added} == {"is_backward"}
    assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")
    # as Inductor's graphs have it
    assert gm.graph.find_nodes(op="call_function", target=CAST)
    value = torch.randn(5, 2)
    wanted = torch.cat([torch.zeros(1, 2), value[1:]]).bfloat16()
    assert torch.equal(gm(value), wanted)
