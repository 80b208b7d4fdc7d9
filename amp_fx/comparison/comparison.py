"""What a comparison found, as data; its words are in ``text.py``."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amp_fx.comparison import text
from amp_fx.comparison.comparison_data import ComparisonData
from amp_fx.plans.files import write_text
from amp_fx.reports.report import Report

__all__ = ["Comparison"]

#: bumped when the JSON form changes incompatibly
_VERSION = 1


@dataclass(frozen=True)
class Comparison(ComparisonData):
    """What :func:`amp_fx.compare` found.

    Attributes:
        title: name of the model.
        against: what the run was compared with.
        worst: the modules, largest error of result or gradient first.
        calls: every call, likewise, of a run that hands out all of them; empty unless asked for.
        first_nonfinite: path of the module that computes the first value, or else the first gradient, with an inf or
            nan that the reference has not; None where all are finite. What only the culprit has inside counts, too,
            as a run op by op finds it.
        culprit: path of the module at which the error grows, or that is the first to leave what is finite; None where
            nothing is wrong.
        culprit_call: in that module, of a run op by op; None where a gradient is wrong, or nothing.
        healthy: True where nothing is wrong.
        verdict: what is wrong, in one sentence.
        remedy: options that mend it, found by running the model op by op with them; empty where none are known.
        result_error: relative L2 error of the gradients of all parameters, or without a loss of what the model returns,
            in a run that hands out nothing.
        disturbance: how far the results of the run are from those of one that hands out nothing; 0.0 where taking the
            values changed no number.
        calls_disturbance: the same of the run that hands out the result of every call.
        loss_scale: at which gradients were computed.
        left_out: graphs that are not compared, and why.
        plans: of the graphs.
        errors: graph -> call -> error; what pictures are coloured by.
    """

    def __str__(self) -> str:
        return text.screen(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form, without the plans; an infinite error is None."""
        own = {key: value for key, value in vars(self).items() if key not in ("plans", "errors")}
        rows = {key: [_finite(asdict(row)) for row in own[key]] for key in ("worst", "calls")}
        call = None if self.culprit_call is None else _finite(asdict(self.culprit_call))
        return {
            "version": _VERSION,
            **_finite(own),
            **rows,
            "culprit_call": call,
            "left_out": list(self.left_out),
        }

    def to_json(self) -> str:
        """The same as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, or the graphs coloured by error as ``.html``, ``.svg``, ``.png`` or ``.dot``.

        Raises:
            AmpFxError: another suffix, or Graphviz's ``dot`` is missing for ``.svg`` and ``.png``.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() == ".json":
            write_text(path, self.to_json() + "\n")
            return path
        picture = _Picture(list(self.plans), self.title, sensitivities=self.errors, measured="error")
        picture.screen = str(self)
        return picture.save(path)


class _Picture(Report):
    """The picture of the plans with the text of the comparison."""

    screen = ""

    def __str__(self) -> str:
        return self.screen


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and math.isinf(value) else value for key, value in row.items()
    }
