"""For the site only: links that lead out of ``docs`` name their file instead, and roles of Sphinx in docstrings go."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")

#: ``:func:`amp_fx.explain` ``, once it is HTML
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):(<code>)~?")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``[the program](../examples/x.cpp)`` becomes ``the program (`examples/x.cpp` in the repository)``."""

    def named(found: re.Match[str]) -> str:
        text, path = found.groups()
        return f"`{path}`" if text == path else f"{text} (`{path}` in the repository)"

    return _OUTSIDE.sub(named, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """``:func:<code>amp_fx.explain</code>`` becomes ``<code>amp_fx.explain</code>``."""
    return _ROLE.sub(r"\1", html)
