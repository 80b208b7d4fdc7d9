"""Where a call stands in the user's program: source line and module."""

from __future__ import annotations

import re
from pathlib import Path

import torch.fx as fx

from amp_fx.state import cache_results

__all__ = ["class_name", "module_path", "short_source", "source_line", "where"]

#: Dynamo writes a module's path as Python source: L['self'].encoder._modules['layer']._modules['0']
_FRAME_LOCAL = re.compile(r"^[LG]\['\w+'\]")
_INDEXED = re.compile(r"(?:\._modules)?\['?([^'\]]+)'?\]")


def source_line(node: fx.Node) -> str:
    """The user's innermost source line, as ``file:line: code``, or an empty string."""
    trace = node.meta.get("stack_trace")
    # passes on Inductor's graphs see none
    return _innermost_line(trace) if isinstance(trace, str) else ""


def where(node: fx.Node) -> str:
    """Where an error is, in words: the user's source line; in a module of torch that is called directly, its path."""
    path = module_path(node)
    return source_line(node) or (f"module {path}" if path else "no source line")


def module_path(node: fx.Node) -> str:
    """Dotted path of the module the node belongs to, ``"encoder.layer.0"``; empty outside any module."""
    # in a backward graph, that of the forward
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _FRAME_LOCAL.sub("", str(list(stack.values())[-1][0]))
    return _INDEXED.sub(r".\1", path).lstrip(".")


def short_source(source: str) -> str:
    """``train.py:7: y = f(x)`` for a source line with its whole path; at most 60 characters."""
    path, colon, rest = source.partition(":")
    return f"{Path(path).name}{colon}{rest}"[:60]


def class_name(kind: type | str) -> str:
    """The class of a module in ``nn_module_stack``, as torch.export writes it."""
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


@cache_results(4096)  # repeated layers have the same lines
def _innermost_line(trace: str) -> str:
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("File "):
            path, number = lines[index].split('"')[1], lines[index].split("line ")[1].split(",")[0]
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{path}:{number}: {code}"
    return ""
