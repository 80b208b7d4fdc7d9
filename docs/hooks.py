"""For the site only: links that lead out of ``docs`` name their file instead, since the site has no such page."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``[the program](../examples/x.cpp)`` becomes ``the program (`examples/x.cpp` in the repository)``."""

    def named(found: re.Match[str]) -> str:
        text, path = found.groups()
        return f"`{path}`" if text == path else f"{text} (`{path}` in the repository)"

    return _OUTSIDE.sub(named, markdown)
