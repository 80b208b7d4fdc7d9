"""The pass that keeps what is returned apart from what the graph reads, on what AOTAutograd hands to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import amp_fx.compiling
from amp_fx.notices import only_looking
from graphs import op_by_op

ROWS, CLASSES = 12, 40
X, W = torch.randn(ROWS, 16), torch.randn(16, CLASSES) / 4
LABELS = torch.arange(ROWS)


def compiled(
    program: Callable[..., Sequence[Tensor]], **options: Any
) -> tuple[list[fx.GraphModule], list[Tensor]]:
    """Graphs after partitioning; and results and gradients of the last one's sum, computed op by op."""
    torch._dynamo.reset()
    leaves = [arg.clone().requires_grad_() for arg in (X, W)]
    settings = {"profile": "off", "strict": True, **options}
    with op_by_op() as found, only_looking():
        results = torch.compile(program, backend="amp_fx", options=settings)(*leaves)
        results[-1].sum().backward()
    return found, [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def logits_and_loss(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w
    return logits, F.cross_entropy(logits, LABELS)


def saved(forward: fx.GraphModule) -> list[torch.dtype]:
    """Dtypes of what a forward graph returns and is as large as the logits: they, and what is kept for the backward."""
    values = [node.meta["val"] for node in forward.graph.output_node().all_input_nodes]
    return [value.dtype for value in values if value.numel() == ROWS * CLASSES]


@pytest.mark.parametrize("numerics", ["compiled", "eager"])
def test_a_loss_reads_the_low_logits_and_so_does_the_backward(
    numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forward, backward), results = compiled(logits_and_loss, numerics=numerics)
    assert saved(forward) == [torch.float32, torch.bfloat16]
    assert not any(
        node.meta["val"].numel() == ROWS * CLASSES and node.meta["val"].dtype is torch.float32
        for node in backward.graph.find_nodes(op="placeholder")
        if "tangents" not in node.name
    )
    monkeypatch.setattr(amp_fx.compiling, "joint_passes", lambda *_args, **_given: ())
    (forward, _), before = compiled(logits_and_loss, numerics=numerics)
    assert saved(forward) == [torch.float32]
    for ours, theirs in zip(results, before, strict=True):
        assert torch.equal(ours, theirs)


def test_a_matmul_in_fp32_reads_what_is_returned() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w
        return hidden, torch.addmm(X[:, :1], hidden, w.t())

    rules = {"rules": [{"op": "addmm", "precision": "fp32"}]}
    (forward, _), _ = compiled(program, policy=rules)
    assert saved(forward) == [torch.float32]


def test_results_that_share_memory_still_do() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ w
        return logits, logits.view(-1, 2), F.cross_entropy(logits, LABELS)

    (forward, _), (logits, pairs, *_) = compiled(program)
    assert logits.untyped_storage().data_ptr() == pairs.untyped_storage().data_ptr()
    # nor is the memory written twice
    casts = forward.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
    wide = [cast.meta["val"] for cast in casts if cast.meta["val"].dtype is torch.float32]
    assert [value.numel() for value in wide].count(ROWS * CLASSES) == 1
