"""Linears that read one value are one call of oneDNN where that changes nothing for who reads their results.

Nor does what is folded or packed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_fx.compiler.compiling
from amp_fx._torch import LINEAR, LINEAR_INT8, is_faster_as_convolution
from support.checks.held_memory import Held
from support.models.small import Parts, near_autocast
from support.tracing.captured_graphs import DEFAULTS, autocast_in


@pytest.fixture(name="products")
def _products(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each graph that Inductor gets, how many columns its products by packed weights have; -64: 64 channels."""
    ops = {str(LINEAR): -1, str(LINEAR_INT8): -1, "amp_fx.packed_convolution.default": 1}
    found, original = list[list[int]](), amp_fx.compiler.compiling.compile_with_inductor

    def note(gm: torch.fx.GraphModule, *args: Any) -> Any:
        found.append(
            [-at * node.meta["val"].shape[at] for node in gm.graph.nodes if (at := ops.get(str(node.target)))]
        )
        return original(gm, *args)

    monkeypatch.setattr(amp_fx.compiler.compiling, "compile_with_inductor", note)
    return found


def heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (linear(x).view(2, -1, 2, 32).transpose(1, 2) for linear in (m.q, m.k, m.v))
    return q, k, v


@torch.library.custom_op("amp_fx_tests::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.clone()


rows.register_fake(torch.empty_like)


def branches(m: Any, x: Tensor) -> Tensor:
    q, k = m.q(x).view(2, -1, 64), m.k(x).view(2, -1, 64)
    return torch.cond(
        x.sum() > 0, lambda a, b: a.view(-1, 8) * b.view(-1, 8), lambda a, b: a.view(-1, 8).exp(), (q, k)
    )


def attend(m: Any, x: Tensor) -> Tensor:
    return m.out(F.scaled_dot_product_attention(*heads(m, x)).transpose(1, 2).flatten(2))


def returns_keys(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = heads(m, x)
    return F.scaled_dot_product_attention(q, k, v), k, v.transpose(1, 2)


def writes(m: Any, x: Tensor) -> Tensor:
    q, k, v = heads(m, x)
    k[:, :, :1] = 0
    return F.scaled_dot_product_attention(q, k, v)


def writes_between(m: Any, x: Tensor) -> Tensor:
    k = m.k(x := x + 1).view(2, -1, 64)
    x[:, :8] = 1
    return k * m.v(x).view(2, -1, 64)


def rotates(m: Any, x: Tensor) -> Tensor:
    q, k, v = heads(m, x)
    # views that rows with gaps have not
    q, k = (torch.view_as_real(torch.view_as_complex(each.float().unflatten(-1, (-1, 2)))) for each in (q, k))
    return F.scaled_dot_product_attention(q.flatten(-2), k.flatten(-2), v.float())


#: what is computed, and the columns of its products
JOINED: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "attention": (attend, [192, 64]),
    "keys and values that are returned": (returns_keys, [192]),
    "keys that are written to": (writes, [192]),
    "what is multiplied is written to": (writes_between, [64, 64]),
    "keys that are complex": (rotates, [192]),
    "what another library reads": (lambda m, x: rows(m.q(x).view(2, -1, 64)) * m.k(x).view(2, -1, 64), [128]),
    "what a branch reads": (branches, [128]),
    "what oneDNN does with each": (lambda m, x: F.silu(m.q(x)) * m.v(F.gelu(m.k(x))), [64, 64, 64]),
    "views of the whole memory": (lambda m, x: m.q(x).view(-1, 4).sin() + m.k(x).view(-1, 4), [128]),
}


def new_net(call: Callable[..., Any], **kwargs: Any) -> nn.Module:
    return Parts(call, **{name: nn.Linear(64, 64, **kwargs) for name in ("q", "k", "v", "out")}).eval()


@pytest.mark.bf16
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("case", JOINED)
@pytest.mark.parametrize("form", ["low results", "any length", "convolutions"])
def test_products_are_joined_where_nobody_sees_it(case: str, form: str, products: Any) -> None:
    call, columns = JOINED[case]
    dynamic, is_convolved = form == "any length", form == "convolutions"
    choice = mock.patch("amp_fx.runtime.weights.patterns.is_faster_as_convolution", return_value=is_convolved)
    net, x = new_net(call), torch.randn(2, 168, 64)
    run = torch.compile(net, backend="amp_fx", options={**DEFAULTS, "strict": True}, dynamic=dynamic)
    with choice, torch.inference_mode(), autocast_in(None if dynamic else torch.bfloat16):
        for _ in range(2):
            got, expected = (y if isinstance(y, tuple) else (y,) for y in (run(x), net(x)))
            assert near_autocast(got[0].float(), net, x, most=1.3)
            for one, other in zip(got, expected, strict=True):
                assert (one.dtype, one.stride()) == (other.dtype, other.stride())
                # nothing else is kept alive with it
                assert one.untyped_storage().nbytes() == one.nbytes
            net.get_parameter("k.weight").data.mul_(1.5)
    assert products == [[-each if is_convolved else each for each in columns]]


@pytest.mark.bf16
@pytest.mark.parametrize("time", [0.8, 0.9])
def test_products_are_timed_where_threads_may_be_idle(
    time: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    monkeypatch.setattr("timeit.repeat", lambda call, **_: [time if call().ndim == 4 else 1.0])
    sizes = 512, 768, 768
    assert is_faster_as_convolution(sizes, torch.bfloat16, 2) is (time < 0.85)
    for given in ((sizes, torch.bfloat16, 1), (sizes, torch.float32, 2), ((16, 768, 768), torch.bfloat16, 2)):
        assert not is_faster_as_convolution(*given)


#: in int8: three matrices with sums and factors of their columns, and the last linear
HELD = {"int8": 3 * 64 * (64 + 4 + 4 + 4) + 2 * 64 * 64, "autocast": 2 * 4 * 64 * 64}


@pytest.mark.bf16
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("policy", [pytest.param("int8", marks=pytest.mark.int8), "autocast"])
def test_joined_weights_are_held_once(policy: str, held: Held, products: list[list[int]]) -> None:
    net = new_net(attend, bias=False)
    run = torch.compile(net, backend="amp_fx", options={**DEFAULTS, "policy": policy}, dynamic=False)
    with torch.inference_mode():
        for x in (torch.randn(2, 16, 64), torch.randn(2, 1, 64)):
            assert 0 < (run(x) - net(x)).norm() / net(x).norm() < 0.03
    assert [columns[:1] for columns in products] == [[192], [192]]
    assert held.bytes() == HELD[policy]


# ---- in fp32, on any CPU ----


def packing(net: nn.Module) -> Callable[..., Any]:
    return torch.compile(net, backend="amp_fx", options={"weights": "cache", "strict": True})


#: ways to write to ``x``, which ``y`` is a view of
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "through a view": lambda x, y: x.view(-1)[::2].add_(3.0),
    "through another input": lambda x, y: y.add_(3.0),
    "in a body": lambda x, y: checkpoint(lambda given: given.add_(3.0).sum(), x, use_reentrant=False),
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("way", WRITES)
def test_what_is_folded_or_joined_does_not_overtake_a_write(way: str) -> None:
    def call(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        convolved, first = m.conv(x), m.q(x)
        WRITES[way](x, y)
        return m.norm(convolved), first.flatten() * m.k(x).flatten()

    linears = {name: nn.Linear(4, 4) for name in ("q", "k")}
    net = Parts(call, conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4), **linears).eval()
    run, x = packing(net), torch.randn(2, 4, 5, 4)
    with torch.inference_mode():
        got, wanted = (f(given := x.clone(), given.view(-1)) for f in (run, net))
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("convolve", [nn.functional.conv2d, nn.functional.conv_transpose2d])
def test_a_bias_that_does_not_lie_in_one_piece_is_read_as_it_is(convolve: Callable[..., Tensor]) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        return convolve(x, m.weight, m.biases[:, 1]).relu() + m.bias.expand(4)[:, None, None]

    net, x = Parts(call), torch.randn(2, 4, 5, 5)
    for name, shape in {"weight": (4, 4, 3, 3), "biases": (4, 5), "bias": (1,)}.items():
        net.register_parameter(name, nn.Parameter(torch.randn(shape)))
    with torch.inference_mode():
        torch.testing.assert_close(packing(net)(x), net(x), rtol=1e-2, atol=1e-2)
