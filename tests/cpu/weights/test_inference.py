"""Graphs without gradients: their low weights live across calls, and are never out of date."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import amp_fx.compiler.compiling
from amp_fx import WeightsError
from amp_fx.precision.placement.profile import DeviceProfile
from support.checks.held_memory import Compiles, Held
from support.models.small import Parts, near_autocast
from support.tracing.captured_graphs import DEFAULTS


def new_net() -> Any:
    """A convolution with BatchNorm, and an embedding tied to the head."""
    table, conv, norm = nn.Embedding(24, 16), nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16)
    head = nn.Linear(16, 24, bias=False)
    head.weight, norm.running_mean = table.weight, torch.randn(16)

    def call(m: Any, tokens: Tensor) -> Tensor:
        x = m.table(tokens).transpose(1, 2)
        return m.head(m.norm(m.conv(x)).relu().transpose(1, 2))

    return Parts(call, table=table, conv=conv, norm=norm, head=head).eval()


def compiled(model: Callable[..., Any], mode: str, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(model, backend="amp_fx", options={**DEFAULTS, "weights": mode, **options})


def tokens(rows: int = 2) -> Tensor:
    return torch.arange(rows * 8).reshape(rows, 8) % 24


#: BatchNorm that is folded into low weights and biases is rounded elsewhere, as by autocast with Inductor's freezing
FOLDED = 1.3


@pytest.mark.bf16
@pytest.mark.usefixtures("op_by_op")
def test_by_default_copies_live_across_calls_under_inference_mode_only(held: Held) -> None:
    net, x = new_net(), tokens()
    run = compiled(net, "auto")
    with torch.no_grad(), amp_fx.record() as recording:
        within = run(x)
    assert held.bytes() == 0
    assert not recording.reports[0].held
    with torch.inference_mode(), amp_fx.record() as recording:
        across = run(x)
        low = 2 * (16 * 16 * 3 + 16 + 24 * 16)
        assert sum(given.bytes for given in recording.reports[0].held) == low
        # the convolution, the table, and that as the head has it: packed, and filled up to whole blocks
        assert low < held.bytes() <= low + 2 * 64 * 64
        net.table.weight.data.mul_(2.0)
        assert near_autocast(run(x), net, x, FOLDED)
        # folding rounds elsewhere
        net.table.weight.data.mul_(0.5)
        assert torch.equal(run(x), across)
    with torch.no_grad():
        assert torch.equal(run(x), within)
    assert torch.allclose(across, within, rtol=0.1, atol=0.1)


@pytest.mark.usefixtures("op_by_op")
def test_each_mode_is_compiled_once_and_graphs_and_models_share_what_is_packed(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in sizes that oneDNN does not pad
    nets = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128)).eval() for _ in range(2)]
    low_copies = 2 * (64 * 64 + 64 + 64 * 128 + 128)
    compiles = Compiles(monkeypatch)

    @torch.compile(backend="amp_fx", options=dict(DEFAULTS))
    def run(net: nn.Module, x: Tensor) -> Tensor:
        return net(x)

    x = torch.randn(16, 64)
    with torch.inference_mode():
        assert near_autocast(run(nets[0], x), nets[0], x)
    assert (compiles.count, held.bytes()) == (1, low_copies)
    with torch.no_grad():
        assert near_autocast(run(nets[0], x), nets[0], x)
    assert (compiles.count, held.bytes()) == (2, low_copies)
    with torch.inference_mode():
        # of another batch size, and with it of any
        for rows in (3, 5):
            x = torch.randn(rows, 64)
            assert near_autocast(run(nets[0], x), nets[0], x)
        assert (compiles.count, held.bytes()) == (3, low_copies)
        assert near_autocast(run(nets[1], x), nets[1], x)
        assert (compiles.count, held.bytes()) == (3, 2 * low_copies)
        for net in nets:
            next(net.parameters()).data.mul_(1.5)
            for rows in (16, 3):
                x = torch.randn(rows, 64)
                assert near_autocast(run(net, x), net, x)
    assert (compiles.count, held.bytes()) == (3, 2 * low_copies)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("mode", ["auto", "freeze"])
def test_what_a_batch_makes_larger_than_the_weights_is_not_kept(held: Held, mode: str) -> None:
    # the same rows of a table for each element of a batch
    parts = {"table": nn.Embedding(16, 64), "head": nn.Linear(64, 64), "ids": torch.arange(8).unsqueeze(0)}
    net = Parts(lambda m, x: m.head(x + m.table(m.ids.expand(len(x), -1))), **parts).eval()
    x = torch.randn(32, 8, 64)
    run = compiled(net, mode)
    with torch.inference_mode():
        assert near_autocast(run(x), net, x)
    # for each batch size it would be eight times a low copy
    assert 0 < held.bytes() <= 1.1 * sum(2 * p.numel() for p in net.parameters())


@pytest.mark.usefixtures("op_by_op")
def test_by_default_weights_of_matmuls_in_fp32_are_not_kept(held: Held) -> None:
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128)).eval(), torch.randn(16, 64)
    policy = {"rules": [{"module": r"^0$", "op": "linear", "precision": "fp32"}]}
    run = compiled(net, "auto", policy=policy)
    with torch.inference_mode():
        assert torch.allclose(run(x), net(x), atol=0.1)
    assert held.bytes() == 2 * (64 * 128 + 128)
    net, nothing = nn.Linear(64, 64), {"rules": [{"op": "linear", "precision": "fp32"}]}
    run = compiled(net, "auto", policy=nothing)
    with torch.inference_mode():
        assert torch.allclose(run(x), net(x), rtol=1e-5, atol=1e-5)
    assert held.bytes() == 0
    # a graph without weights has nothing to keep
    for mode in ("cache", "freeze"):
        product = compiled(lambda x: (x @ x.T).tanh(), mode)
        with torch.inference_mode():
            assert torch.allclose(product(x), (x @ x.T).tanh(), atol=0.1)
        assert held.bytes() == 0


@pytest.mark.usefixtures("op_by_op")
def test_train_evaluate_train() -> None:
    net, x = new_net(), tokens()
    run = compiled(net, "cache")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        net.train()
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            assert near_autocast(run(x), net, x, FOLDED)


@pytest.mark.usefixtures("op_by_op")
def test_with_strict_a_change_of_frozen_weights_is_an_error() -> None:
    net, x = new_net(), tokens()
    run = compiled(net, "freeze", strict=True)
    with torch.inference_mode():
        assert near_autocast(run(x), net, x, FOLDED)
    # somebody else's step does not matter
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters()).step()
    with torch.inference_mode():
        run(x)
        net.conv.weight.data.mul_(2.0)
        with pytest.raises(WeightsError, match="weights='cache'"):
            run(x)
    # other memory, and what was there is gone: no less, and not only once
    net.conv.weight.data = net.conv.weight.data / 2
    for _ in range(2):
        with torch.inference_mode(), pytest.raises(WeightsError, match="weights='cache'"):
            run(x)


@pytest.mark.usefixtures("op_by_op")
def test_frozen_graphs_of_any_size_are_frozen_again() -> None:
    net = new_net()
    options = {**DEFAULTS, "weights": "freeze", "strict": False}
    run = torch.compile(net, backend="amp_fx", dynamic=True, options=options)
    with torch.inference_mode():
        for rows in (2, 3):
            assert near_autocast(run(tokens(rows)), net, tokens(rows), FOLDED)
        net.table.weight.data.mul_(2.0)
        for rows in (2, 3, 5):
            assert near_autocast(run(tokens(rows)), net, tokens(rows), FOLDED)


@pytest.mark.bf16
def test_packed_weights_follow_without_compiling(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 64)).eval()
    x = torch.randn(16, 256)
    # of other tests, whose graphs may be garbage and still be there
    others = packed()
    run, compiles = compiled(net, "cache"), Compiles(monkeypatch)
    with torch.inference_mode():
        assert near_autocast(run(x), net, x)
        # the matrices and the biases, not the fp32 weights of the norm
        assert held.bytes() == 2 * (256 * 256 + 256 + 256 * 64 + 64)
    for weight in net.parameters():
        weight.data = weight.data * 1.5
        with torch.inference_mode():
            assert near_autocast(run(x), net, x)
    assert compiles.count == 1
    assert max(value.numel() for value in packed(others)) == 256 * 256
    dropped = weakref.ref(net[0].weight)
    del net, weight, run
    gc.collect()
    assert dropped() is None
    assert held.bytes() == 0
    assert all(value.numel() == 1 for value in packed(others))


@pytest.mark.bf16
def test_batch_norm_is_folded_into_the_convolution_before_it() -> None:
    conv, norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
    net, x = nn.Sequential(conv, norm, nn.ReLU(), nn.Conv2d(16, 8, 1)).eval(), torch.randn(2, 8, 8, 8)
    run = compiled(net, "cache")
    with torch.inference_mode():
        _, [code] = run_and_get_code(run, x)
        assert "batch_norm" not in code
        for statistics in (norm.get_buffer("running_mean"), norm.get_buffer("running_var")):
            statistics.data.add_(1.0)
            assert near_autocast(run(x), net, x)
    scale = norm.weight.double() / (norm.get_buffer("running_var").double() + norm.eps).sqrt()
    exact = (conv.weight.double() * scale[:, None, None, None]).bfloat16()
    folded = next(value for value in packed() if value.shape == exact.shape).to_dense(torch.bfloat16)
    # rounded from fp32, once: where a low copy is scaled and rounded again, a quarter differs
    assert (folded != exact).double().mean() < 0.01


def test_with_eager_numerics_nothing_is_folded(held: Held) -> None:
    net, x = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)).eval(), torch.randn(2, 8, 8, 8)
    run = compiled(net, "cache", numerics="eager")
    with torch.inference_mode():
        assert "batch_norm" in "".join(run_and_get_code(lambda: run(x))[1])
    assert held.bytes() == 2 * (16 * 8 * 3 * 3 + 16)


def packed(others: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors that oneDNN has packed, but for some others."""
    gc.collect()
    known = {*map(id, others or ())}
    found = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and value.is_mkldnn]
    return [value for value in found if id(value) not in known]


@pytest.mark.usefixtures("op_by_op")
def test_constants_that_stay_in_the_code_are_frozen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp_fx.compiler.compiling, "tunes_kernels", lambda _: True)
    net, x = new_net(), tokens()
    run, compiles = compiled(net, "cache"), Compiles(monkeypatch)
    with torch.inference_mode():
        for _ in range(2):
            assert near_autocast(run(x), net, x, FOLDED)
            net.conv.weight.data.mul_(2.0)
    assert compiles.count == 2


@pytest.mark.slow
def test_weights_that_max_autotune_packs_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(64, 256)
    run = compiled(net, "cache", max_autotune=True, max_autotune_gemm_backends="CPP")
    compiles = Compiles(monkeypatch)
    with torch.inference_mode():
        for _ in range(2):
            assert near_autocast(run(x), net, x)
            next(net.parameters()).data.mul_(2.0)
    # Inductor makes those while it generates code, so it has to do that again
    assert compiles.count == 2


def test_threads_may_call_while_weights_change() -> None:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).eval(), torch.randn(16, 256)
    run, errors = compiled(net, "cache"), []
    original = [weight.detach().clone() for weight in net.parameters()]

    def serve() -> None:
        with torch.inference_mode():
            for _ in range(200):
                # twice the weights of two layers without negative biases: between one and four times the output
                got = run(x).norm()
                errors.extend([got] if not 0.9 * low < got < 1.1 * high else [])

    with torch.inference_mode():
        low = run(x).norm()
        for weight in net.parameters():
            weight.data.mul_(2.0)
        high = run(x).norm()
    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for factor in (1.0, 2.0):
            for weight, value in zip(net.parameters(), original, strict=True):
                weight.data.copy_(value * factor)
    assert not errors
    for weight in net.parameters():
        weight.data.mul_(1.5)
    with torch.inference_mode():
        assert near_autocast(run(x), net, x)


@pytest.mark.usefixtures("op_by_op")
def test_a_matmul_that_loses_by_a_cast_per_call_is_low_only_where_copies_live(tmp_path: Path) -> None:
    # the time of a row times a matrix is the matrix's way through memory
    slow_memory = DeviceProfile("slow memory", "cpu", {"float32": 1e12, "bfloat16": 2e12}, 1e9, 1e-9)
    path = tmp_path / "profile.json"
    path.write_text(slow_memory.to_json())
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(1, 64)
    run = compiled(net, "auto", profile=str(path))
    with torch.no_grad():
        assert torch.allclose(run(x), net(x), rtol=1e-5)
    with torch.inference_mode():
        assert near_autocast(run(x), net, x)
