"""The picture as one HTML file: no server, no network, opened by a double click."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

from amp_fx.viz import beside
from amp_fx.viz.schema import BITS, SHORT, Drawing
from amp_fx.viz.style import CLASSES, DARK, DTYPES, HEAT, LIGHT, heat_samples
from amp_fx.viz.view import DEPTH

__all__ = ["render"]

#: the page's own code, in the order in which it runs
_SCRIPTS = ("visible.js", "words.js", "layout.js", "drawing.js", "viewer.js", "page.js")


def render(model: Drawing) -> str:
    """The page of a drawing, as text.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
    """
    style = {
        "dtypes": list(DTYPES),
        "short": SHORT,
        "bits": BITS,
        "classes": {name: [border.meaning, border.dashes, border.width] for name, border in CLASSES.items()},
        "heat": [colour for _, colour in HEAT],
        "heatSamples": heat_samples(model),
        "depth": DEPTH,
    }
    parts = {
        "title": escape(f"{model['title']}: cast placement"),
        "light": beside.variables(LIGHT),
        "dark": beside.variables(DARK),
        "style": _asset("viewer.css") + beside.STYLE,
        "beside": beside.drawn(model),
        "licence": _asset("vendor/dagre.LICENSE"),
        "layout": _asset("vendor/dagre.min.js"),
        "data": _json({**model, "style": style}),
        "script": '"use strict";\n(() => {\n' + "\n".join(map(_asset, _SCRIPTS)) + "})();\n",
    }
    # one pass over the template: what is put in is never searched for placeholders
    head, *rest = _asset("viewer.html").split("{{")
    pieces = [head]
    for piece in rest:
        name, text = piece.split("}}", 1)
        pieces += [parts[name], text]
    return "".join(pieces)


def _asset(name: str) -> str:
    return resources.files("amp_fx.viz").joinpath(name).read_text(encoding="utf-8")


def _json(data: dict[str, Any]) -> str:
    """JSON inside a script element: nothing in it may look like the element's end or like a comment."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
