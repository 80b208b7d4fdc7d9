"""Each guard gives one answer to all spellings of one program, which hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from amp_fx.passes import Constrain
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.policy import OpClass
from support.tracing.captured_graphs import rewrite, run_until

Spelling = Callable[..., Any]

FREQUENCIES = 1 / 10_000 ** (torch.arange(8) / 8)
#: beyond what bf16 holds exactly
FAR = 66_000
X, W = torch.randn(4, 4), torch.randn(4, 4)
MASK = torch.rand(4, 4) > 0.5
drawn = hypothesis.settings(
    max_examples=15,
    phases=[hypothesis.Phase.generate],
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)

#: the last 40 positions in front of FAR, as the program makes them
COUNTED: Mapping[str, Callable[[], Tensor]] = {
    "integers": lambda: torch.arange(FAR - 40, FAR),
    "floats": lambda: torch.arange(FAR - 40, FAR, dtype=torch.float32),
    "slice": lambda: torch.arange(FAR)[-40:],
    "offset": lambda: torch.arange(40) + (FAR - 40),
    "sum of ones": lambda: torch.ones(40, dtype=torch.int64).cumsum(0) + (FAR - 41),
    "sum of floating ones": lambda: torch.ones(40).cumsum(0) + (FAR - 41),
    "linspace": lambda: torch.linspace(FAR - 40, FAR - 1, 40),
    "mesh": lambda: torch.meshgrid(torch.arange(FAR - 40, FAR), torch.arange(2), indexing="ij")[0][:, 0],
    "written": lambda: torch.zeros(40).copy_(torch.arange(FAR - 40, FAR)),
    "written in parts": lambda: _halves(torch.empty(40), torch.arange(FAR - 40, FAR)),
    "out": lambda: torch.arange(FAR - 40, FAR, out=torch.empty(40)),
}
#: each on 40 positions of any shape and dtype
STEPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda t: t[None],
    "unsqueeze": lambda t: t.unsqueeze(0),
    "view": lambda t: t.view(1, -1),
    "expand": lambda t: t.reshape(-1)[None].expand(2, -1)[1:],
    "float": lambda t: t.float(),
    "to": lambda t: t.to(torch.float32),
    "int": lambda t: t.int(),
    "double": lambda t: t.double(),
    "copy": lambda t: t.clone(),
    "there and back": lambda t: t.reshape(-1).flip(0).flip(0),
    "add": lambda t: (t + 1) - 1,
    "in place": lambda t: t.clone().add_(3).sub_(3),
    "picked": lambda t: t.reshape(-1)[torch.arange(40)],
    "stacked": lambda t: torch.stack([t, t])[0],
    "chosen": lambda t: torch.where(t >= 0, t, torch.zeros_like(t)),
}
#: how angles are multiplied
PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda t, f: t[:, None] @ f[None],
    "turned": lambda t, f: (f[:, None] @ t[None, :]).transpose(0, 1),
    "bmm": lambda t, f: torch.bmm(t[None, :, None], f[None, None, :])[0],
    "linear": lambda t, f: torch.nn.functional.linear(t[:, None], f[:, None]),
    "added": lambda t, f: torch.addmm(torch.zeros(8, dtype=t.dtype), t[:, None], f[None]),
}


def _halves(into: Tensor, values: Tensor) -> Tensor:
    into[:20] = values[:20]
    into[20:] = values[20:]
    return into


@drawn
@hypothesis.given(
    st.sampled_from([*COUNTED, "input"]),
    st.lists(st.sampled_from([*STEPS]), max_size=4),
    st.sampled_from([*PRODUCTS]),
)
def test_positions_are_found_however_they_are_spelled(source: str, steps: list[str], product: str) -> None:
    def program(freqs: Tensor, given: Tensor) -> Tensor:
        t = given if source == "input" else COUNTED[source]()
        for step in steps:
            t = STEPS[step](t)
        return PRODUCTS[product](t.reshape(-1).to(freqs.dtype), freqs).cos()

    given = torch.arange(FAR - 40, FAR)
    torch._dynamo.reset()
    rewritten = rewrite(program, FREQUENCIES, given)
    [row] = [row for row in rewritten.plan.nodes if row.is_because(ReasonKind.POSITIONS)]
    assert row.dtype is torch.float32
    exact = program(FREQUENCIES.double(), given)
    error = (rewritten.outputs - exact).abs().max()
    assert error <= 1.25 * (program(FREQUENCIES, given) - exact).abs().max() + 1e-6


VALUES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mask of integers": lambda x, w, ids: (x * (ids > 1).long()[:, None].float()) @ w,
    "integers given": lambda x, w, ids: (x * ids[:, None].float()) @ w,
    "matrix of integers": lambda x, w, ids: ids.expand(4, 4).float() @ w,
    "one of each": lambda x, w, ids: torch.nn.functional.one_hot(ids, 4).float() @ w,
    "one of counted": lambda x, w, ids: torch.nn.functional.one_hot(torch.arange(4), 4).float() @ w,
    "rows": lambda x, w, ids: torch.nn.functional.embedding(ids, x) @ w,
    "gathered": lambda x, w, ids: x.gather(0, ids[:, None].expand(4, 4)) @ w,
    "counted rows": lambda x, w, ids: x.index_select(0, torch.arange(4)) @ w,
    "joined": lambda x, w, ids: torch.cat([x[:, :3], torch.linspace(0, 1, 4)[:, None]], 1) @ w,
    "joined in place": lambda x, w, ids: _joined(x) @ w,
    "running mean": lambda x, w, ids: (x.cumsum(0) / torch.arange(1, 5)[:, None].expand(4, 4)) @ w,
    "triangle": lambda x, w, ids: torch.ones(4, 4).tril() @ w,
    "decay": lambda x, w, ids: 0.9 ** torch.arange(16).view(4, 4).float() @ w,
    "largest": lambda x, w, ids: x.topk(4)[0] @ w,
    "bias by distance": lambda x, w, ids: torch.addmm(torch.arange(16.0).view(4, 4), x, w),
    "sine table": lambda x, w, ids: (torch.arange(4)[:, None] / w[0]).sin() @ w,
}


def _joined(x: Tensor) -> Tensor:
    into = torch.empty(4, 4)
    into[:, :3] = x[:, :3]
    into[:, 3] = torch.linspace(0, 1, 4)
    return into


@pytest.mark.parametrize("program", VALUES.values(), ids=VALUES)
def test_values_beside_integers_stay_low(program: Spelling) -> None:
    rewritten = run_until(Constrain, program, X, W, torch.tensor([0, 3, 1, 2]))
    assert [row.op_class for row in rewritten.plan.nodes if row.op_class is OpClass.LOW]
    assert not any(row.is_because(ReasonKind.POSITIONS) for row in rewritten.plan.nodes)


HUGE = 1e6
#: ways to write 1e6 over all of a product, or over the rows of it that a mask picks
WRITES: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda h, big: h.copy_(big),
    "part": lambda h, big: h[:, :2].copy_(big[:, :2]),
    "slice": lambda h, big: h.__setitem__(slice(0, 2), big[:2]),
    "turned": lambda h, big: h.mT[1].copy_(big[0]),
    "scatter": lambda h, big: h.scatter_(0, torch.zeros(4, 4, dtype=torch.int64), big),
    "index_copy": lambda h, big: h.index_copy_(0, torch.tensor([1]), big[:1]),
    "index_put": lambda h, big: h.index_put_((torch.tensor([1]),), big[:1]),
    "masked_scatter": lambda h, big: h.masked_scatter_(MASK, big),
    "add": lambda h, big: h.add_(MASK * big),
    "subtract": lambda h, big: h[1:].sub_(big[1:]),
    "where": lambda h, big: h.copy_(torch.where(MASK, h, big)),
    "where out": lambda h, big: torch.where(MASK, h, big, out=h),
    "fill": lambda h, big: h.fill_(HUGE),
    "fill by a tensor": lambda h, big: h.fill_(torch.tensor(HUGE)),
    "masked_fill": lambda h, big: h.masked_fill_(MASK, HUGE),
    "index_fill": lambda h, big: h.index_fill_(0, torch.tensor([1]), HUGE),
    "lerp": lambda h, big: h.lerp_(big, 0.5),
}
CONSTANTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "full_like": lambda h: torch.full_like(h, HUGE),
    "full": lambda h: torch.full((4, 4), HUGE),
    "new_full": lambda h: h.new_full((4, 4), HUGE),
    "ones": lambda h: torch.ones(4, 4) * HUGE,
    "expanded": lambda h: torch.full((1, 4), HUGE).expand(4, 4),
    "filled": lambda h: torch.empty(4, 4).fill_(HUGE),
    "cast": lambda h: torch.full((4, 4), HUGE, dtype=torch.float64).float(),
    "integers": lambda h: torch.full((4, 4), 1_000_000).float(),
}


@drawn
@hypothesis.given(st.sampled_from([*WRITES]), st.sampled_from([*CONSTANTS]))
def test_a_constant_that_is_written_in_place_stays_finite(write: str, constant: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        WRITES[write](h, CONSTANTS[constant](h).to(h.dtype))
        return (h / HUGE).sum(-1)

    torch._dynamo.reset()
    rewritten = rewrite(program, X, W, options={"dtype": "float16"})
    assert rewritten.dtypes("matmul") == ["float16"]
    torch.testing.assert_close(
        rewritten.outputs, program(X.double(), W.double()).float(), rtol=1e-3, atol=1e-3
    )


#: a norm of a product whose first row is zero, and an eps; what is divided by it has to be finite
DIVISORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda n: n + 1e-8,
    "turned sum": lambda n: 1e-8 + n,
    "in place": lambda n: n.add_(1e-8),
    "in place, then read": lambda n: (n.add_(1e-8), n)[1],
    "through a view": lambda n: (n.view(-1).add_(1e-8), n)[1],
    "tensor": lambda n: n + torch.tensor(1e-8),
    "tensor in place": lambda n: n.add_(torch.full_like(n, 1e-8)),
    "bound": lambda n: n.clamp(min=1e-8),
    "bound in place": lambda n: (n.clamp_(min=1e-8), n)[1],
    "maximum": lambda n: torch.maximum(n, torch.tensor(1e-8)),
}
BETWEEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda n: n,
    "view": lambda n: n.view(4, 1),
    "expand": lambda n: n.expand(4, 4),
    "cast": lambda n: n.to(torch.float64).to(torch.float32),
    "copy": lambda n: n.clone(),
}


@drawn
@hypothesis.given(st.sampled_from([*DIVISORS]), st.sampled_from([*BETWEEN]), st.booleans())
def test_an_eps_is_found_however_it_is_spelled(divisor: str, between: str, in_place: bool) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        n = BETWEEN[between](DIVISORS[divisor](h.abs().amax(-1, keepdim=True)))
        return h.div_(n) if in_place else h / n

    torch._dynamo.reset()
    x = torch.cat([torch.zeros(1, 4), X[1:]])
    outputs = rewrite(program, x, W, options={"dtype": "float16"}).outputs
    torch.testing.assert_close(outputs, program(x.double(), W.double()).float(), rtol=1e-2, atol=1e-2)


EXPONENTIALS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda h: h.exp().sum(-1),
    "in place": lambda h: (h.exp_(), h.sum(-1))[1],
    "through a view": lambda h: (h.view(-1).exp_(), h.sum(-1))[1],
    "copied": lambda h: h.exp().clone().sum(-1),
    "cast": lambda h: h.exp().double().sum(-1).float(),
    "masked": lambda h: (h.exp() * MASK).sum(-1),
    "running": lambda h: h.exp().cumsum(-1)[:, -1],
    "turned": lambda h: h.exp().mT.sum(0),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("spelling", EXPONENTIALS.values(), ids=EXPONENTIALS)
def test_exponentials_that_are_summed_are_found(spelling: Spelling, dtype: str) -> None:
    rewritten = rewrite(lambda x, w: spelling(torch.matmul(x, w)), X, W, options={"dtype": dtype})
    exps = [row for row in rewritten.plan.nodes if row.op.partition(".")[0].rstrip("_") == "exp"]
    assert [row.dtype for row in exps] == [torch.float32]
