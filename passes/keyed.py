"""What passes on Inductor's graphs may read of a node: what the keys of the compile caches hold.

AOTAutograd and Inductor find what they have compiled by a graph's code, the metadata of its inputs, their options and
the uuids of passes. ``node.meta`` is in none of these: two graphs that differ there alone are one to them, and the
second gets what was compiled for the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

import torch.fx as fx

from amp_fx.errors import PassError
from amp_fx.graphs.keys import MARK, RESULT_MARK

__all__ = ["CUSTOM", "mark", "marked", "only_keyed"]

#: node.meta key of what AOTAutograd hands on to all that a call becomes, backward included
CUSTOM = "custom"

#: node.meta keys that tracing makes of a graph's code and inputs, and of nothing else
_KEYED = frozenset({"desc", "original_aten", "partitioner_tag", "val"})


def mark(node: fx.Node, key: str, name: str) -> None:
    """Marks a captured call.

    Args:
        node: the call.
        key: :data:`MARK` or :data:`RESULT_MARK`.
        name: of the call in the plan.
    """
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), key: name}


def marked(node: fx.Node, key: str = MARK) -> str | None:
    """The name in the plan of the call that a node comes from, if that has such a mark."""
    return (node.meta.get(CUSTOM) or {}).get(key)


@contextlib.contextmanager
def only_keyed(gm: fx.GraphModule, marks: Collection[str]) -> Iterator[None]:
    """Inside, what no cache key holds can be handed from node to node, but not read.

    Args:
        gm: a graph on its way through Inductor.
        marks: names of marked calls that are in the uuid of what runs inside; other marks are not there.
    """
    for node in gm.graph.nodes:
        node.meta = {key: _shown(key, value, marks) for key, value in node.meta.items()}
    try:
        yield
    finally:
        for node in gm.graph.nodes:
            node.meta = {
                key: value.whole if isinstance(value, (_Unread, _Custom)) else value
                for key, value in node.meta.items()
            }


def _shown(key: str, value: Any, marks: Collection[str]) -> Any:
    if key == CUSTOM and isinstance(value, dict):
        return _Custom(value, marks)
    return value if key in _KEYED else _Unread(key, value)


class _Custom(dict[str, Any]):
    """Of what is in ``node.meta["custom"]``, the marks that are in a uuid."""

    def __init__(self, whole: dict[str, Any], marks: Collection[str]) -> None:
        super().__init__({key: whole[key] for key in (MARK, RESULT_MARK) if whole.get(key) in marks})
        self.whole = whole


class _Unread:
    """Stands for a value of ``node.meta`` in a pass that may not depend on it."""

    def __init__(self, key: str, whole: Any) -> None:
        self.key, self.whole = key, whole

    def _refuse(self, *_: object) -> NoReturn:
        raise PassError(
            f"a pass reads node.meta[{self.key!r}], which is in no key of the compile caches: what it depends on "
            "belongs into its fields"
        )

    __bool__ = __contains__ = __eq__ = __getitem__ = __hash__ = __iter__ = __len__ = __str__ = _refuse  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()
