"""Models that are called with batches of several lengths; they differ in what is made of their weights.

Each is made of the width of its values, and is given ``inputs(rows, length)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models.small import Parts

_WIDTH = 32


@dataclass(frozen=True)
class Sized:
    """A model, and the shapes of what it takes."""

    make: Callable[[], Parts]
    inputs: Callable[[int, int], tuple[Tensor, ...]]


def _linears(*names: str, columns: int = _WIDTH) -> dict[str, nn.Module]:
    return {name: nn.Linear(_WIDTH, columns) for name in names}


def _rows(rows: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, length, _WIDTH),)


def _heads(x: Tensor) -> Tensor:
    """Views with sizes spelled out, as most models have them."""
    rows, length, _ = x.shape
    return x.view(rows, length, -1, 8).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def grouped(m: Any, x: Tensor) -> Tensor:
    """Queries in groups read one key and one value."""
    q, k, v = (_heads(linear(x)) for linear in (m.q, m.k, m.v))
    rows, heads, length, width = k.shape
    k, v = (y[:, :, None].expand(rows, heads, 2, length, width).reshape(q.shape) for y in (k, v))
    return x + m.out(_merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def gated(m: Any, x: Tensor) -> Tensor:
    """Two linears of one value, as rows of a matrix, and sizes that are numbers in a sum."""
    rows, length, width = x.shape
    flat = x.reshape(rows * length, width)
    y = m.down(m.gate(flat).view(-1, width) * m.up(flat).view(-1, width)).view(x.shape)
    return y + x.shape[1] / 8


def learned_queries(m: Any, x: Tensor) -> Tensor:
    """Queries are weights, attend to each other, and then to what is given."""
    rows, queries = len(x), m.queries.weight
    q, k, v = (_heads(linear(queries)[None]) for linear in (m.own_q, m.own_k, m.own_v))
    own = m.norm(_merged(F.scaled_dot_product_attention(q, k, v))[0]) + queries
    q, k, v = _heads(m.q(own)[None]).expand(rows, -1, -1, -1), _heads(m.k(x)), _heads(m.v(x))
    return m.out(_merged(F.scaled_dot_product_attention(q, k, v)))


def queries_of_a_batch(m: Any, x: Tensor) -> Tensor:
    """Queries that are expanded to the batch before they are multiplied."""
    queries = m.queries.weight[None].expand(len(x), -1, -1) + 0.5
    return (_heads(m.k(queries)) * _heads(m.v(queries))).sum(2).flatten(1) + m.q(x).mean(1)


def positions(m: Any, x: Tensor) -> Tensor:
    """As many rows of a table as the input has; keys of them and of the input are added."""
    table = m.table.weight[: x.shape[1]]
    scores = torch.einsum("btc,bsc->bts", m.q(x), m.k(x) + m.own_k(table))
    return m.out(scores.softmax(-1) @ (m.v(x) + m.own_v(table)))


def cached_keys(m: Any, x: Tensor, at: Tensor) -> Tensor:
    """Keys and values are written to buffers."""
    q, k, v = (_heads(linear(x)) for linear in (m.q, m.k, m.v))
    keys, values = m.keys[: len(x)], m.values[: len(x)]
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    mask = torch.arange(keys.shape[2]) <= at[:, None]
    return m.out(_merged(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)))


def tied(m: Any, ids: Tensor) -> Tensor:
    """A table that is also the last weight."""
    x = m.table(ids)
    return m.head(x + _merged(_heads(m.q(x)) * _heads(m.k(x))))


def convolutions(m: Any, x: Tensor) -> Tensor:
    """Convolutions with norms, over images and backwards, and two linears of pixels."""
    x = F.max_pool2d(F.relu(m.norm(m.first(x))), 2)
    x = (m.last_norm(m.up(x)) + F.interpolate(x, scale_factor=2.0)).flatten(2).mT
    return m.q(x) * m.k(x).view(*x.shape[:2], -1)


def experts(m: Any, x: Tensor) -> Tensor:
    """A slice of a weight for each expert, beside two linears that all rows go through."""
    flat = x.reshape(-1, _WIDTH)
    up, down = m.own.weight.view(2, 4, -1, _WIDTH)
    found = torch.bmm(F.silu(torch.bmm(flat.expand(4, -1, -1), up.mT)), down)
    mixed = torch.einsum("te,etc->tc", m.router(flat).softmax(-1), found)
    return (mixed + m.q(flat) * m.k(flat)).view(x.shape)


def memory(m: Any, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """What is multiplied has a length of its own; keys are returned, too."""
    k, v = _heads(m.k(others)), _heads(m.v(others))
    return m.out(_merged(F.scaled_dot_product_attention(_heads(m.q(x)), k, v))), k


def _convolutions() -> Parts:
    parts = {"first": nn.Conv2d(4, _WIDTH, 3, padding="same"), "norm": nn.BatchNorm2d(_WIDTH)}
    parts |= {"up": nn.ConvTranspose2d(_WIDTH, _WIDTH, 2, 2), "last_norm": nn.BatchNorm2d(_WIDTH)}
    return Parts(convolutions, **parts, **_linears("q", "k"))


def _tied() -> Parts:
    table, head = nn.Embedding(64, _WIDTH), nn.Linear(_WIDTH, 64, bias=False)
    head.weight = table.weight
    return Parts(tied, table=table, head=head, **_linears("q", "k"))


def _cached() -> Parts:
    keys, values = torch.zeros(8, 4, 32, 8), torch.zeros(8, 4, 32, 8)
    return Parts(cached_keys, keys=keys, values=values, **_linears("q", "k", "v", "out"))


_ATTENTION = ("q", "k", "v", "out")

SIZED: dict[str, Sized] = {
    "grouped": Sized(
        lambda: Parts(grouped, **_linears("q", "out"), **_linears("k", "v", columns=_WIDTH // 2)), _rows
    ),
    "gated": Sized(lambda: Parts(gated, **_linears("gate", "up", "down")), _rows),
    "learned queries": Sized(
        lambda: Parts(
            learned_queries,
            queries=nn.Embedding(6, _WIDTH),
            norm=nn.BatchNorm1d(_WIDTH),
            **_linears("own_q", "own_k", "own_v", *_ATTENTION),
        ),
        _rows,
    ),
    "queries of a batch": Sized(
        lambda: Parts(queries_of_a_batch, queries=nn.Embedding(6, _WIDTH), **_linears("q", "k", "v")), _rows
    ),
    "positions": Sized(
        lambda: Parts(positions, table=nn.Embedding(64, _WIDTH), **_linears("own_k", "own_v", *_ATTENTION)),
        _rows,
    ),
    "cached keys": Sized(_cached, lambda rows, length: (*_rows(rows, length), torch.arange(length))),
    "tied": Sized(_tied, lambda rows, length: (torch.randint(64, (rows, length)),)),
    "convolutions": Sized(_convolutions, lambda rows, length: (torch.randn(rows, 4, 2 * length, 8),)),
    "experts": Sized(
        lambda: Parts(
            experts, own=nn.Linear(_WIDTH, 256, bias=False), router=nn.Linear(_WIDTH, 4), **_linears("q", "k")
        ),
        _rows,
    ),
    "memory": Sized(
        lambda: Parts(memory, **_linears(*_ATTENTION)),
        lambda rows, length: (*_rows(rows, length), torch.randn(rows, 2 * length + 1, _WIDTH)),
    ),
}


def make(name: str) -> Parts:
    """A model of :data:`SIZED` in evaluation mode, with the same weights each time; norms have statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SIZED[name].make().eval()
        for norm in model.modules():
            if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
                for value in (norm.running_mean, norm.running_var):
                    assert value is not None
                    value.uniform_(0.5, 1.5)
    return model
