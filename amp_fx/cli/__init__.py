"""The command line: ``amp-fx COMMAND`` and ``python -m amp_fx COMMAND``.

Here: one file for each group of commands, and how a model is named on the command line.
Not here: anything that a Python user would miss; commands only call the public functions.
Open ``entry.py`` first.
"""

from __future__ import annotations

from amp_fx.cli.entry import main

__all__ = ["main"]
