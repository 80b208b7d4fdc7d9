"""For the site only: what docstrings say in roles of Sphinx is plain code there."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Roles"]

#: ``:func:`~amp_fx.explain```
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):(`)~?")


class Roles(griffe.Extension):
    """Takes them out of each docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"\1", obj.docstring.value)
