"""The user's own autocast as facts, and around, or inside, what amp_fx places otherwise than autocast would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amp_fx import Plan
from amp_fx._torch import enable_autocast
from amp_fx.graphs.regions import Region, ambient_regions, node_regions
from support.checks.whole_program import agree
from support.models.small import Parts
from support.tracing.captured_graphs import dynamo_graph, rewrite

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OURS = Region(True, BF16, by_user=False)

#: what a user gets who names no option: matmuls as small as these stay in fp32
NO_OPTION: Mapping[str, Any] = {"profile": "auto", "strict": False}


def tensor(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, requires_grad=True)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (tensor(4, 8),)),
    # what copies a dtype has the one that autocast gives where nothing is cast
    "linear, its dtype copied": (
        lambda x, w: (torch.zeros_like(h := F.linear(x, w)), h.float()), (tensor(4, 8), tensor(8, 8))
    ),
    "conv1d": (nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), (tensor(2, 2, 8),)),
    "conv2d": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), (tensor(2, 2, 6, 6),)),
    "conv_transpose2d": (nn.Sequential(nn.ConvTranspose2d(2, 4, 3), nn.ReLU()), (tensor(2, 2, 6, 6),)),
    "bmm": (lambda x: torch.bmm(x, x).relu(), (tensor(2, 4, 4),)),
    "baddbmm": (lambda x, y, z: torch.baddbmm(x, y, z), (tensor(2, 4, 4), tensor(2, 4, 4), tensor(2, 4, 4))),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (tensor(2, 4, 4), tensor(2, 4, 4))),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tuple(tensor(1, 2, 4, 8) for _ in "qkv")
    ),
}  # fmt: skip


def rule(op: str, precision: str) -> dict[str, Any]:
    return {"policy": {"rules": [{"op": op, "precision": precision}]}}


def dtypes(plans: list[Plan], op: str) -> list[torch.dtype | None]:
    return [row.dtype for plan in plans for row in plan.nodes if row.op.partition(".")[0] == op]


@pytest.mark.parametrize("ambient", [BF16, FP16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_too_small_to_gain_stays_in_fp32_and_returns_what_autocast_returns(
    name: str, ambient: torch.dtype
) -> None:
    program, inputs = PROGRAMS[name]
    plans = agree(program, *inputs, options=NO_OPTION, ambient=ambient)
    assert FP32 in dtypes(plans, name.partition(",")[0])


def test_a_call_with_several_results_returns_what_autocast_returns() -> None:
    weights = [weight.detach() for weight in nn.LSTM(4, 4).parameters()]

    def program(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        # nn.LSTM itself is a graph break
        return torch.lstm(x, (h, c), weights, True, 1, 0.0, False, False, False)

    # Dynamo's fake LSTM is fp32 for what requires a gradient, whatever eager autocast returns
    given = (torch.randn(3, 2, 4), torch.randn(1, 2, 4), torch.randn(1, 2, 4))
    rewritten = rewrite(program, *given, options=rule("lstm", "fp32"), ambient=BF16)
    assert rewritten.one("lstm").dtype is FP32
    assert [value.dtype for value in rewritten.outputs] == [BF16] * 3


@pytest.mark.parametrize("ambient", [None, BF16])
def test_regions_inside_the_model_and_islands_in_them(ambient: torch.dtype | None) -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        a = m.outside(x)
        with torch.autocast("cpu", BF16):
            b = m.region(a)
            with torch.autocast("cpu", enabled=False):
                c = m.island(b.float())
                with torch.autocast("cpu", BF16):
                    d = m.nested(c)
        return a, b, c, d

    net = Parts(forward, **{name: nn.Linear(8, 8) for name in ("outside", "region", "island", "nested")})
    plans = agree(net, tensor(4, 8), options=NO_OPTION, ambient=ambient, reference=FP32, tolerance=2e-2)
    assert dtypes(plans, "linear") == [FP32] * 4


def softmax() -> nn.Module:
    """A listed fp32 op on CUDA, between two linears."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(m.first(x), -1)
        return m.second(probabilities), probabilities

    return Parts(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))


def test_a_rule_may_keep_in_fp32_what_the_ambient_autocast_lowers() -> None:
    plans = agree(softmax(), tensor(4, 8), options=rule("linear", "fp32"), ambient=BF16)
    assert set(dtypes(plans, "linear")) == {FP32}


@pytest.mark.parametrize("options", [rule("softmax", "low"), {"policy": "fast"}], ids=["rule", "fast"])
def test_a_policy_may_lower_what_the_ambient_autocast_keeps_in_fp32(options: Mapping[str, Any]) -> None:
    rewritten = rewrite(softmax(), tensor(4, 8), device="cuda", options=options, ambient=BF16)
    assert rewritten.one("softmax").dtype is BF16
    (call,) = [node for node in rewritten.gm.graph.nodes if "softmax" in str(node.target)]
    assert call.meta["val"].dtype is BF16
    # autocast has returned it in fp32
    returned = [node.meta["val"].dtype for node in rewritten.gm.graph.output_node().all_input_nodes]
    assert returned == [BF16, FP32]


# ---- facts about nodes ----


def test_devices_have_regions_of_their_own_and_one_that_is_disabled_is_no_autocast() -> None:
    with enable_autocast("cuda", True, FP16):
        found = ambient_regions({"cpu": BF16, "cuda": BF16})
    assert found == {"cpu": OURS, "cuda": Region(True, FP16, by_user=True)}
    with torch.autocast("cpu", enabled=False):
        assert ambient_regions({"cpu": BF16}) == {"cpu": OURS}


def test_a_region_without_a_dtype_has_the_devices_autocast_dtype() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return torch.matmul(x, w)

    gm = dynamo_graph(program, torch.randn(4, 4), torch.randn(4, 4))
    found = node_regions(gm.graph.nodes, {"cpu": Region(True, FP16, by_user=False)})
    (matmul,) = gm.graph.find_nodes(op="call_function", target=torch.matmul)
    assert found[matmul] == {"cpu": Region(True, BF16, by_user=True)}


def test_a_region_of_another_device_leaves_this_one_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    mode = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cuda", FP16, True, None))
    product = graph.call_function(torch.matmul, (x, x))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
    graph.output(product)
    found = node_regions(graph.nodes, {"cpu": OURS})
    assert found[product] == {"cpu": OURS, "cuda": Region(True, FP16, by_user=True)}
