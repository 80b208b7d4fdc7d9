"""Recurrent layers: an LSTM without gradients is in the graph, others run between two; for this backend alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.variables.builder import VariableBuilder
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import amp_fx
from amp_fx._torch import onednn_computes, take_recurrent, without_onednn
from amp_fx.passes.forward import refusals
from support.checks.whole_program import agree
from support.models.small import Parts, near_autocast
from support.tracing.captured_graphs import plans, rewrite

X = torch.randn(2, 5, 8)
#: of fp32 arithmetic behind roundings to bf16, where torch.autocast raises
ROUNDED = 2e-2


def between(layer: nn.Module, call: Callable[..., Any] = lambda m, x: m.rnn(x)[0]) -> nn.Module:
    """A recurrent layer between two linears."""
    wide = getattr(layer, "proj_size", 0) or 8
    head = nn.Linear(wide * (2 if getattr(layer, "bidirectional", False) else 1), 8)
    return Parts(lambda m, x: m.last(call(m, m.first(x))), first=nn.Linear(8, 8), rnn=layer, last=head)


def lstm(**settings: Any) -> nn.LSTM:
    return nn.LSTM(8, 8, **{"batch_first": True, **settings})


def states(m: Any, x: Tensor) -> Tensor:
    """Reads attributes of the layer, and hands states in and out."""
    first = x.new_ones(m.rnn.num_layers, len(x), m.rnn.hidden_size)
    m.rnn.flatten_parameters()
    y, last = m.rnn(x, (first, first) if isinstance(m.rnn, nn.LSTM) else first)
    return y + (last[1] if isinstance(last, tuple) else last)[-1][:, None] if not m.rnn.bidirectional else y


def forwarded(m: Any, x: Tensor) -> Tensor:
    return m.rnn.forward(x)[0]


def packed(m: Any, x: Tensor) -> Tensor:
    rows = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    return pad_packed_sequence(m.rnn(rows)[0], batch_first=True)[0]


def with_gradients(m: Any, x: Tensor) -> Tensor:
    layer = m.rnn
    with torch.enable_grad():
        return layer(x)[0]


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "alone": lambda: between(lstm()),
    "layers": lambda: between(lstm(num_layers=3)),
    "both directions": lambda: between(lstm(num_layers=2, bidirectional=True)),
    "time first": lambda: between(lstm(batch_first=False)),
    "no bias": lambda: between(lstm(bias=False)),
    "no batch": lambda: between(lstm(), lambda m, x: torch.stack([m.rnn(row)[0] for row in x])),
    "states": lambda: between(lstm(num_layers=2), states),
    "its forward": lambda: between(lstm(), forwarded),
    "in a loop": lambda: Parts(
        lambda m, x: m.last(m.rnns[1](m.rnns[0](x)[0] + x)[0]),
        rnns=nn.ModuleList([lstm(), lstm()]), last=nn.Linear(8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_an_lstm_without_gradients_is_in_the_graph(name: str) -> None:
    with torch.no_grad():
        (plan,) = agree(WHOLE[name](), X, tolerance=ROUNDED)
    low = {onednn_computes(torch.bfloat16)}
    assert {row.dtype is torch.bfloat16 for row in plans(plan, "lstm")} == low
    assert {row.dtype for row in plans(plan, "linear")} == {torch.bfloat16}


@pytest.mark.usefixtures("without_inductor")
def test_its_graph_serves_every_length() -> None:
    model = between(lstm(num_layers=2, bidirectional=True))
    compiled: Any = torch.compile(model, backend="amp_fx", options={"profile": "off", "strict": True})
    with amp_fx.record() as recording, torch.no_grad():
        for length in (5, 6, 31, 2, 200):
            x = torch.randn(3, length, 8)
            torch.testing.assert_close(compiled(x), model(x), atol=ROUNDED, rtol=0)
    assert len(recording.plans) == 2


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("train", [False, True])
def test_dropout_between_its_layers_drops_as_eagerly(train: bool) -> None:
    model, x = between(lstm(num_layers=2, dropout=0.5)).train(train), torch.randn(1, 2, 8).expand(4000, 2, 8)
    compiled: Any = torch.compile(model, backend="amp_fx", options={"strict": True})
    with amp_fx.record() as recording, torch.no_grad():
        found, expected = compiled(x), model(x)
    for statistic in (Tensor.mean, Tensor.std):
        torch.testing.assert_close(statistic(found, 0), statistic(expected, 0), atol=2e-3, rtol=0)
    assert bool(expected.std(0).min() > 1e-3) is train
    assert any(plans(plan, "lstm") for plan in recording.plans) is not train


LEFT: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: between(nn.GRU(8, 8, batch_first=True)),
    "GRU with states": lambda: between(nn.GRU(8, 8, batch_first=True, num_layers=2), states),
    "forward of a GRU": lambda: between(nn.GRU(8, 8, batch_first=True), forwarded),
    "RNN": lambda: between(nn.RNN(8, 8, batch_first=True, bidirectional=True)),
    "projections": lambda: between(lstm(proj_size=4)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "name", [*LEFT, "LSTM", "LSTM with states", "forward of an LSTM", "packed", "gradients"]
)
def test_other_recurrent_layers_run_eagerly_between_graphs(name: str, train: bool) -> None:
    own = {
        "LSTM": lambda: between(lstm()), "LSTM with states": lambda: between(lstm(num_layers=2), states),
        "forward of an LSTM": lambda: between(lstm(), forwarded), "packed": lambda: between(lstm(), packed),
        "gradients": lambda: between(lstm(), with_gradients),
    }  # fmt: skip
    model = (LEFT | own)[name]()
    is_whole = not train and name in ("LSTM", "LSTM with states", "forward of an LSTM")
    with torch.set_grad_enabled(train):
        found = agree(model, X, fullgraph=False, tolerance=ROUNDED)
    forward = [plan for plan in found if plan.phase == "forward"]
    assert len([plan for plan in forward if plans(plan, "linear")]) == (1 if is_whole else 2)
    assert is_whole or not any(row.op.startswith(("lstm", "gru")) for plan in found for row in plan.nodes)


@pytest.mark.usefixtures("without_inductor")
def test_a_subclass_with_a_forward_of_its_own_runs_eagerly() -> None:
    class Own(nn.LSTM):
        def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x * 2)

    model = between(Own(8, 8, batch_first=True))
    with amp_fx.record() as recording, torch.no_grad():
        assert torch.equal(torch.compile(model, backend="amp_fx", options={"strict": True})(X), model(X))
    assert not any(plans(plan, "lstm") for plan in recording.plans)


class Stock(nn.Module):
    """A class of its own: Dynamo gives up code, not a model."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = lstm()

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x * 2)[0]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("where", ["beside", "between graphs", "in another thread"])
def test_another_backend_gives_up_what_it_gives_up_without_amp_fx(where: str) -> None:
    graphs: list[Any] = []

    def count(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    stock = torch.compile(Stock(), backend=count)
    call = torch.compiler.disable(lambda x: stock(x))
    ours: Any = torch.compile(
        between(lstm(), lambda m, x: call(m.rnn(x)[0]) if where == "between graphs" else m.rnn(x)[0]),
        backend="amp_fx",
        options={"strict": True},
    )

    def run() -> None:
        with torch.no_grad():
            stock(X)

    with amp_fx.record() as recording, torch.no_grad():
        ours(X)
        if where == "in another thread":
            (thread := threading.Thread(target=run)).start()
            thread.join()
        run()
    assert any(plans(plan, "lstm") for plan in recording.plans)
    assert graphs == []
    assert torch._dynamo.config.allow_rnn is False


@pytest.mark.usefixtures("without_inductor")
def test_an_lstm_in_16_bits_by_itself_is_left_where_its_kernel_does_not_run() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, x = between(lstm()).to(dtype), X.to(dtype)
        with amp_fx.record() as recording, torch.no_grad():
            result = torch.compile(model, backend="amp_fx", options={"strict": True})(x)
        assert near_autocast(
            result.float(), model.float(), x.float(), most=4.0, least=0.0
        ) or not onednn_computes(dtype)
        is_whole = dtype is torch.bfloat16 and onednn_computes(dtype)
        assert any(plans(plan, "lstm") for plan in recording.plans) == is_whole
        torch._dynamo.reset()


@pytest.mark.usefixtures("without_inductor")
def test_an_lstm_is_left_where_there_is_no_onednn() -> None:
    model = between(lstm())
    with without_onednn(), amp_fx.record() as recording, torch.no_grad():
        assert not torch.backends.mkldnn.enabled
        torch.compile(model, backend="amp_fx", options={"strict": True})(X)
    assert torch.backends.mkldnn.enabled
    assert not any(plans(plan, "lstm") for plan in recording.plans)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_lstm_runs_low_where_that_is_one_kernel(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a CPU with instructions for both; nothing runs
    monkeypatch.setattr(refusals, "onednn_computes", lambda _: True)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        plan = rewrite(between(lstm()), X, options={"dtype": dtype}).plan
    (row,) = plans(plan, "lstm")
    assert row.dtype is (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def test_a_version_that_looks_at_modules_elsewhere_keeps_its_recurrent_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(VariableBuilder, "wrap_module")
    take_recurrent(None)
    assert not hasattr(VariableBuilder, "wrap_module")
