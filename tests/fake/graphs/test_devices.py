"""Which device a graph or a call is about, graphs on devices without a profile (all fake), and what a CPU lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx._torch import OpByOp, lowering
from amp_fx.compiler.rewriting import rewrite
from amp_fx.compiler.settings import Options
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import call_device, graph_device, graph_devices
from amp_fx.instruments.targets.tracing import move
from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.profile import ProfileError
from amp_fx.precision.policy.table import DEVICES, lookup
from support.tracing.captured_graphs import dynamo_graph

aten = torch.ops.aten

OTHERS = sorted({*DEVICES} - {"cpu", "cuda"})


def graph(device: str) -> fx.GraphModule:
    """Two Linears around a norm, as Dynamo makes it, on a device."""
    net = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512))
    return move(dynamo_graph(net.requires_grad_(False), torch.randn(256, 512)), torch.device(device, 0))


def rewritten(gm: fx.GraphModule, *devices: str, **options: Any) -> Any:
    parsed = Options.parse(None, {"dtype": "float16", "weights": "cast", **options})
    with torch.no_grad():
        return rewrite(gm, ambient_regions(dict.fromkeys(devices, torch.float16)), parsed, training=False)


def with_number(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its result multiplied by a 0-d CPU tensor, and raised to its power."""
    (result,) = gm.graph.output_node().all_input_nodes
    like = result.meta["example_value"]
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        number = gm.graph.placeholder("number")
    with like.fake_mode:
        number.meta["example_value"] = torch.empty(())
    for target in (torch.mul, torch.pow):
        with gm.graph.inserting_before(gm.graph.output_node()):
            call = gm.graph.call_function(target, (number, result))
        call.meta["example_value"], result = like, call
    gm.graph.output_node().args = ((result,),)
    gm.recompile()
    return gm


@pytest.mark.parametrize("device", OTHERS)
def test_listed_ops_go_low_and_a_number_on_the_cpu_changes_neither_rates_nor_lists(device: str) -> None:
    gm = with_number(graph(device))
    gm, plan = rewritten(gm, *graph_devices(gm))[:2]
    for op, dtype in ((aten.linear.default, torch.float16), (aten.layer_norm.default, torch.float32)):
        calls = gm.graph.find_nodes(op="call_function", target=op)
        assert {node.meta["val"].dtype for node in calls} == {dtype}
    assert plan.profile == ""
    power = lookup(aten.pow.Tensor_Tensor, device)
    assert power is not None
    assert [row.op_class for row in plan.nodes if row.op == "pow.Tensor_Tensor"] == [power.op_class]


def test_a_profile_of_another_device_is_an_error(tmp_path: Any) -> None:
    builtin("cpu").save(tmp_path / "cpu.json")
    with pytest.raises(ProfileError, match=r"'xpu'.*'cpu', 'cuda'"):
        rewritten(graph("xpu"), "xpu", profile=str(tmp_path / "cpu.json"))


def test_each_call_of_a_graph_on_two_devices_has_the_lists_of_its_own() -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    returned = []
    for device in ("cpu", "cuda"):
        x, w = (graph.placeholder(f"{name}_{device}") for name in "xw")
        with mode:
            for node in (x, w):
                node.meta["example_value"] = torch.empty(64, 64, device=device)
        returned.append(graph.call_function(F.layer_norm, (graph.call_function(F.linear, (x, w)), (64,))))
    graph.output(tuple(returned))
    with torch.no_grad():
        gm, _ = rewrite(
            fx.GraphModule({}, graph),
            ambient_regions({"cpu": torch.bfloat16, "cuda": torch.float16}),
            Options.parse(None, {"profile": "off", "weights": "cast", "strict": True}),
            training=False,
        )[:2]
    found = [
        (node.target, node.meta["val"].device.type, node.meta["val"].dtype)
        for node in gm.graph.nodes
        if node.target in (aten.linear.default, aten.layer_norm.default)
    ]
    # layer_norm is on CUDA's list of fp32, and not on the CPU's
    assert found == [
        (aten.linear.default, "cpu", torch.bfloat16),
        (aten.layer_norm.default, "cpu", torch.bfloat16),
        (aten.linear.default, "cuda", torch.float16),
        (aten.layer_norm.default, "cuda", torch.float32),
    ]
    assert {node.meta["val"].dtype for node in gm.graph.output_node().all_input_nodes} == {torch.float32}


# ---- which device a graph is about ----


def of_values(*given: tuple[str, str, tuple[int, ...]]) -> fx.GraphModule:
    """A graph whose nodes have one value each: op, device and shape."""
    made, mode = fx.Graph(), FakeTensorMode()
    for position, (op, device, shape) in enumerate(given):
        node = made.create_node(op, f"x{position}" if op == "placeholder" else torch.relu, ())
        with mode:
            node.meta["example_value"] = torch.empty(shape, device=device)
    made.output(())
    return fx.GraphModule({}, made)


@pytest.mark.parametrize("device", ["xpu", "mps", "mtia", "cuda"])
def test_a_number_on_the_cpu_says_nothing_about_the_device(device: str) -> None:
    gm = of_values(("placeholder", "cpu", ()), ("placeholder", device, (8,)), ("call_function", device, (8,)))
    assert graph_devices(gm) == {device}
    assert graph_device(gm, {"cpu", device}) == device
    # unless there are numbers alone
    assert graph_devices(of_values(("placeholder", "cpu", ()), ("call_function", "cpu", ()))) == {"cpu"}


@pytest.mark.parametrize(("large", "small"), [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "xpu")])
def test_a_graph_is_about_the_device_that_computes_most(large: str, small: str) -> None:
    calls = ("call_function", large, (64,)), ("call_function", small, (4,))
    gm = of_values(("placeholder", small, (512,)), *calls)
    assert graph_devices(gm) == {large, small}
    assert graph_device(gm, {large, small}) == large
    # one that computes nothing is about one of its devices
    gm = of_values(("placeholder", "cpu", (8,)), ("placeholder", "xpu", (8,)))
    assert graph_device(gm, {"cpu", "xpu"}) == "xpu"
    assert graph_device(gm, ()) == "cpu"


def test_a_call_is_on_the_device_of_what_is_more_than_a_number() -> None:
    with FakeTensorMode():
        number, x = torch.empty(()), torch.empty(8, device="cuda")
    assert call_device([number, x], ("cpu", "cuda")) == "cuda"
    assert call_device([number], ("cpu", "cuda")) == "cpu"
    assert call_device([number, x], ("cpu",)) == "cpu"
    assert call_device([x], ("cpu",)) is None


class _Products(TorchDispatchMode):
    """Notes the dtypes in which products run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] = next(value.dtype for value in args if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_a_cpu_cannot_multiply_in_16_bits_a_graph_run_op_by_op_does_so_in_fp32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(image: Tensor, kernel: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        y = aten.convolution(image, kernel, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
        gradients = aten.convolution_backward(
            y, image, kernel, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False)
        )
        rows = y.flatten(2)[0]
        return (
            y,
            *gradients[:2],
            aten.mm(rows, rows.t()),
            aten.addmm(bias, rows, rows.t()),
            aten.bmm(y[0], y[0]),
        )

    args = torch.randn(1, 4, 8, 8), torch.randn(16, 4, 3, 3) / 6, torch.randn(16)
    graph = make_fx(program)(*(value.to(dtype) for value in args))
    monkeypatch.setattr(lowering, "onednn_computes", lambda _: False)
    with _Products() as products:
        got = OpByOp(graph).run(*(value.to(dtype) for value in args))
    right = program(*(value.to(dtype).double() for value in args))
    assert {value.dtype for value in got} == {dtype}
    assert all(name in products.seen for name in ("aten.mm.default", "aten.convolution_backward.default"))
    named = {name: seen for name, seen in products.seen.items() if "mm" in name or "conv" in name}
    assert set(named.values()) == {torch.float32}
    for one, exact in zip(got, right, strict=True):
        # what was computed from was rounded, too
        assert (one.double() - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()
