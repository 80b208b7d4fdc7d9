"""Weights that live across calls, in small models with no option but ``weights``, or with none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from amp_fx.runtime.weights import touch
from support.checks.below_16_bits import INT8_CPU, error, exact
from support.checks.held_memory import Compiles, Held
from support.checks.weight_writes import WRITES, new_layer
from support.models.small import Parts, first, near_autocast


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="amp_fx", options=options)


#: at most a little further from fp64 than eager autocast
is_right = functools.partial(near_autocast, most=1.2, least=0.0)


def scale(model: nn.Module) -> None:
    """Writes to all weights."""
    for weight in model.parameters():
        weight.data.mul_(1.5)


# ---- linears that gain nothing from 16 bits ----


def test_linears_in_fp32_are_packed_and_follow(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    compiles = Compiles(monkeypatch)
    run = compiled(net, weights="cache")
    with torch.no_grad():
        for rows in (4, 16, 3):
            x = torch.randn(rows, 16)
            assert is_right(run(x), net, x)
            scale(net)
            assert is_right(run(x), net, x)
    # of four rows, and of any number
    assert compiles.count == 2
    # MKL takes eight megabytes for each matrix
    assert 0 < held.bytes() < 100_000


def test_convolutions_in_fp32_are_packed_by_default_with_their_norms_and_linears_are_not(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the CPU: the profile leaves all in fp32."""
    monkeypatch.setattr("amp_fx.precision.placement.devices.builtin", lambda _: INT8_CPU)
    linear = nn.Linear(576, 512)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), linear)
    net(torch.randn(8, 3, 8, 8))
    run, x = compiled(net.eval(), cpp_wrapper=False), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        run(x)
    assert held.bytes() == 0
    with torch.inference_mode():
        got, codes = run_and_get_code(run, x)
        assert error([got], [exact(net, x)]) < 1e-5
        scale(net)
        net.get_buffer("1.running_mean").add_(0.5)
        assert error([run(x)], [exact(net, x)]) < 1e-5
    [code] = codes
    assert "convolution_pointwise" in code
    assert "rsqrt" not in code
    # a convolution's weights, perhaps padded, and its bias; not the linear's
    assert 3 * 16 * 9 * 4 <= held.bytes() < 100_000 < linear.weight.nbytes


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("rows", [1, 2])
def test_one_row_in_fp32_is_left_to_mkl_with_one_thread(rows: int, held: Held) -> None:
    run = compiled(nn.Linear(16, 64).eval(), weights="cache")
    with torch.inference_mode():
        run(torch.randn(rows, 16))
    is_left = rows == torch.get_num_threads() == 1 and torch.backends.mkl.is_available()
    assert (held.bytes() == 0) is is_left


@pytest.mark.usefixtures("op_by_op")
def test_a_matrix_that_is_joined_from_weights_is_packed() -> None:
    matrices = {name: nn.Linear(64, 64, bias=False) for name in ("one", "other")}
    net = Parts(lambda m, x: x @ torch.cat([m.one.weight, m.other.weight, m.one.weight], 1), **matrices)
    x = torch.randn(16, 64)
    run = compiled(net)
    with torch.inference_mode():
        assert is_right(run(x), net, x)
        scale(net)
        assert is_right(run(x), net, x)


# ---- weights with several readers ----


def two_linears(tie: Callable[[nn.Parameter], nn.Parameter], *, returns: bool = False) -> nn.Module:
    """A low and an fp32 linear; ``returns``: also a view of the weight, whose memory a caller may write to."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.wide(F.gelu(m.low(x)))
        return (x, m.low.weight.t()) if returns else x

    low, wide = nn.Linear(64, 64), nn.Linear(64, 64)
    wide.weight = tie(low.get_parameter("weight"))
    return Parts(forward, low=low, wide=wide)


def of_both() -> nn.Module:
    """A convolution, and a linear that reads a view of its weight."""
    low = nn.Conv2d(64, 64, 1)
    return Parts(lambda m, x: F.linear(m.low(x).relu().mean((2, 3)), m.low.weight.flatten(1)), low=low)


WIDE = {"profile": "off", "policy": {"rules": [{"module": "wide", "op": "linear", "precision": "fp32"}]}}

#: models with a low and an fp32 reader of one weight, the shape of a row, and their options
READERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "a convolution and a linear": (of_both, (64, 4, 4), {}),
    "two linears": (lambda: two_linears(lambda weight: weight), (64,), WIDE),
    "two parameters": (lambda: two_linears(lambda weight: nn.Parameter(weight.data)), (64,), WIDE),
    "its user": (lambda: two_linears(lambda weight: weight, returns=True), (64,), WIDE),
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("readers", READERS)
def test_a_weight_read_low_and_in_fp32_is_followed(readers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, row, options = READERS[readers]
    net, compiles = make().eval(), Compiles(monkeypatch)
    run = compiled(net, **options)
    with torch.inference_mode():
        for rows in (4, 16):
            x = torch.randn(rows, *row)
            for _ in range(2):
                got = run(x)
                assert is_right(first(got), net, x)
                if isinstance(got, tuple):
                    assert got[1].data_ptr() == net.get_parameter("low.weight").data_ptr()
                scale(net)
    assert compiles.count == 2


def gives(m: Any, x: Tensor, *, low: bool) -> tuple[Tensor, ...]:
    """What follows from weights alone: rows of a table, and with it a weight in low if asked to."""
    found = m.head(x), m.table(torch.arange(8))
    return (*found, m.head.weight.bfloat16()) if low else found


@pytest.mark.parametrize(
    ("low", "options"),
    [(False, {}), (True, {}), (True, {"numerics": "eager", "profile": "off"})],
    ids=["folded", "packed as well", "copies"],
)
@pytest.mark.usefixtures("op_by_op")
def test_what_was_returned_stays_as_it_was_when_weights_change(low: bool, options: dict[str, Any]) -> None:
    parts = {"table": nn.Embedding(16, 64), "head": nn.Linear(64, 64)}
    net, x = Parts(functools.partial(gives, low=low), **parts).eval(), torch.randn(16, 64)
    run = compiled(net, **options)
    with torch.inference_mode():
        before = run(x)
        kept = [value.clone() for value in before]
        scale(net)
        after = run(x)
        assert all(map(torch.equal, before, kept))
        assert is_right(first(after), net, x)
        assert all(map(torch.equal, after[1:], net(x)[1:]))


@pytest.mark.parametrize(
    "options", [{"weights": "cache"}, {"numerics": "eager", "profile": "off"}], ids=["made", "cast"]
)
@pytest.mark.parametrize(
    "view",
    [
        lambda w, x: w[: x.shape[0] - 8],
        lambda w, x: w.view_as(x),
        lambda w, x: w.expand_as(x),
        lambda w, x: torch.broadcast_tensors(w, x.to(w.dtype))[0],
        lambda w, x: torch.meshgrid(w[0], x[0].to(w.dtype), indexing="ij")[0],
    ],
    ids=["slice", "view_as", "expand_as", "broadcast_tensors", "meshgrid"],
)
@pytest.mark.usefixtures("op_by_op")
def test_who_writes_to_what_was_returned_does_not_write_to_what_is_kept(
    view: Any, options: dict[str, Any]
) -> None:
    def call(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = m.table.weight.bfloat16() if "numerics" in options else m.table.weight.cos()
        return m.head(x), view(kept, x)

    net, x = Parts(call, table=nn.Embedding(64, 16), head=nn.Linear(16, 16)).eval(), torch.randn(64, 16)
    run = torch.compile(net, backend="amp_fx", options=options, dynamic=True)
    with torch.inference_mode():
        # what repeats elements cannot be written to in place
        run(x)[1].data.as_strided((16,), (1,)).zero_()
        assert torch.equal(run(x)[1], net(x)[1])


@pytest.mark.parametrize("options", [{"weights": "cache"}, {"profile": "off"}], ids=["fp32", "low"])
@pytest.mark.usefixtures("op_by_op")
def test_an_op_of_another_library_is_called_in_each_call(options: dict[str, Any]) -> None:
    factors = [1.0]

    @torch.library.custom_op("tests::adapted", mutates_args=())
    def adapted(weight: Tensor) -> Tensor:
        return weight * factors[-1]

    adapted.register_fake(torch.empty_like)
    net = Parts(lambda m, x: F.linear(x, adapted(m.low.weight), m.low.bias), low=nn.Linear(64, 64)).eval()
    run, x = compiled(net, **options), torch.randn(16, 64)
    with torch.inference_mode():
        assert is_right(run(x), net, x)
        factors.append(-2.0)
        assert is_right(run(x), net, x)


@pytest.mark.parametrize("weights", ["auto", "freeze"])
@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w[:4].mul_(2)], ids=["whole", "view"])
@pytest.mark.usefixtures("op_by_op")
def test_a_cast_of_a_weight_that_the_program_writes_to_is_not_kept(write: Any, weights: str) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        write(doubled := m.head.weight.bfloat16())
        return m.head(x) + x.bfloat16() @ doubled.t()

    net, x = Parts(call, head=nn.Linear(16, 16)).eval(), torch.randn(64, 16)
    run = compiled(net, profile="off", weights=weights)
    with torch.inference_mode():
        for _ in range(2):
            assert is_right(run(x), net, x)


# ---- writes ----


@pytest.mark.bf16
@pytest.mark.usefixtures("op_by_op")
def test_a_compiled_model_sees_writes_by_the_rule() -> None:
    @torch.compile(backend="amp_fx")
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    x, broken = torch.randn(32, 64), list[str]()
    with torch.inference_mode():
        for way, (write, is_seen) in WRITES.items():
            with torch.inference_mode(False):
                layer = new_layer()
            was_right = is_right(run(layer, x), layer, x)
            with torch.inference_mode(False):
                before = layer.weight.detach().clone()
                write(layer)
            expected = is_seen or torch.equal(layer.weight, before)
            if not was_right or is_right(run(layer, x), layer, x) != expected:
                broken.append(way)
            touch(layer.weight)
            if not is_right(run(layer, x), layer, x):
                broken.append(f"{way}, after touch")
    assert not broken


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()


def computed(norm: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    return nn.Sequential(norm(nn.Linear(64, 64))).eval()


#: what else of a model changes: the model, and how
CHANGES: dict[str, tuple[Callable[[], nn.Sequential], Callable[[nn.Sequential], object]]] = {
    "statistics of a BatchNorm, by numpy": (
        normed, lambda net: net[1].get_buffer("running_mean").numpy().__iadd__(1.0)
    ),
    "a module": (linears, lambda net: net.__setitem__(0, nn.Linear(64, 64))),
    "a parametrization": (
        linears, lambda net: register_parametrization(net[0], "weight", Parts(lambda m, weight: 2 * weight))
    ),
    "a weight that is computed by a norm": (lambda: computed(weight_norm), scale),
    "a weight that is computed by a spectral norm": (
        lambda: computed(spectral_norm),
        lambda net: net[0].get_parameter("parametrizations.weight.original").data.copy_(torch.randn(64, 64)),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("change", CHANGES)
def test_what_else_of_a_model_changes_is_seen(change: str) -> None:
    make, write = CHANGES[change]
    net, x = make(), torch.randn((2, 8, 8, 8) if make is normed else (16, 64))
    run = compiled(net, profile="off")
    for do in (write, id):
        with torch.inference_mode():
            assert is_right(run(x), net, x)
        do(net)
