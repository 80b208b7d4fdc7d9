"""The pass that keeps statistics of norms in fp32, on what AOTAutograd hands to Inductor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import amp_fx.compiling
from amp_fx.notices import only_looking
from graphs import op_by_op

LOWS = torch.bfloat16, torch.float16
ROWS = 12


def graphs(
    program: Callable[..., Tensor], *args: Tensor, dtype: str = "bfloat16"
) -> tuple[list[fx.GraphModule], list[Tensor]]:
    """Forward and backward after partitioning, under policy ``fast``; and the gradients, computed op by op."""
    options = {"policy": "fast", "profile": "off", "strict": True, "dtype": dtype}
    leaves = [arg.clone().requires_grad_() for arg in args]
    with op_by_op() as found, only_looking():
        torch.compile(program, backend="amp_fx", options=options)(*leaves).float().square().sum().backward()
    return found, [leaf.grad for leaf in leaves if leaf.grad is not None]


def statistics(gm: fx.GraphModule) -> list[torch.dtype]:
    """Dtypes of what a forward returns and has a number a row: all that is kept of a norm beside its input."""
    returned = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    return [value.dtype for value in returned if value.numel() == ROWS]


def layer_norm(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x @ w, (16,), scale, None) @ w


def group_norm(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.group_norm((x @ w).unflatten(0, (3, 4)), 4, scale[:4], None).flatten(0, 1) @ w


ARGS = torch.randn(ROWS, 16), torch.randn(16, 16) / 4, torch.rand(16) + 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("program", [layer_norm, group_norm])
def test_a_low_norm_keeps_its_statistics_in_fp32(program: Callable[..., Tensor], dtype: str) -> None:
    (forward, backward), gradients = graphs(program, *ARGS, dtype=dtype)
    kept = statistics(forward)
    assert len(kept) == 2
    assert set(kept) == {torch.float32}
    forward.graph.lint()
    backward.graph.lint()
    # the norm itself did run low
    assert any(
        "convert" in str(node.target) and node.meta["val"].dtype in LOWS and node.meta["val"].numel() > ROWS
        for node in forward.graph.nodes
    )
    exact = [arg.double().requires_grad_() for arg in ARGS]
    program(*exact).square().sum().backward()
    for found, true in zip(gradients, exact, strict=True):
        assert true.grad is not None
        assert (found - true.grad).norm() < 0.02 * true.grad.norm()


def test_without_the_pass_the_statistics_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp_fx.compiling, "joint_passes", lambda *_args, **_given: ())
    (forward, _), _ = graphs(layer_norm, *ARGS)
    assert set(statistics(forward)) == {torch.bfloat16}


def test_a_statistic_that_the_program_rounds_itself_stays_rounded() -> None:
    def by_hand(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        h = layer_norm(x, w, scale)
        mean = h.mean(-1, keepdim=True).to(torch.bfloat16)
        return (h - mean) * mean

    (forward, _), _ = graphs(by_hand, *ARGS)
    assert sorted(map(str, statistics(forward))) == ["torch.bfloat16", "torch.float32", "torch.float32"]
