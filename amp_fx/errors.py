"""The errors amp_fx raises, as one small tree.

Every message names the bad value, the valid ones, and what to do::

    AmpFxError
    |-- OptionsError (also ValueError)   the user passed an unknown key, a bad value or a contradiction
    |-- PlanError (also ValueError)      a plan file is wrong, or fits another model
    |-- InputError (also TypeError)      a model is given a batch that it does not take, an exported program a dtype
    |-- ExportError                      an exported file cannot be written, or a runtime refuses it; names the node
    |-- ScalerError (also ValueError)    no scaler of that name, or parameters that cannot be scaled
    |-- TargetError (also ValueError)    no device of that name to compile for, or this machine lacks what it takes
    |-- MissingLibraryError (also ModuleNotFoundError)  an integration's library is not installed
    |-- WeightsError                     frozen weights have changed, and strict forbids to freeze them again
    |-- CaptureError                     the Dynamo graph cannot be turned into pre-dispatch ATen
    `-- PassError                        a pass failed; names it and the passes that ran before it
        `-- VerifyError                  the rewritten graph breaks a dtype contract; names node and line

``CaptureError`` and ``PassError`` reach the user only with ``options={"strict": True}``. Otherwise the graph
is compiled in a plainer way, at last with torch.autocast's semantics, and one :class:`FallbackWarning` says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AmpFxError",
    "CaptureError",
    "ExportError",
    "FallbackWarning",
    "InputError",
    "MissingLibraryError",
    "OptionsError",
    "PassError",
    "PlanError",
    "ScalerError",
    "ScalingWarning",
    "TargetError",
    "VerifyError",
    "WeightsError",
    "did_you_mean",
]


class AmpFxError(Exception):
    """Base of everything amp_fx raises on purpose."""


class OptionsError(AmpFxError, ValueError):
    """The options of ``torch.compile(..., backend="amp_fx")`` are wrong. The user should change them."""


class PlanError(AmpFxError, ValueError):
    """A file or value is not a plan, or the plan was made for another graph."""


class InputError(AmpFxError, TypeError):
    """What a model is called with is none of its arguments, or has another dtype than an exported program takes."""


class ExportError(AmpFxError):
    """A file of an exported program cannot be written, or a runtime refuses it, or it computes something else."""


class ScalerError(AmpFxError, ValueError):
    """A graph finds no :class:`amp_fx.GradScaler` of its name, or a scaler cannot do what it is asked to do."""


class TargetError(AmpFxError, ValueError):
    """There is no device of that name to compile for, or this machine cannot compile for it."""


class MissingLibraryError(AmpFxError, ModuleNotFoundError):
    """``amp_fx.integrations.x`` is imported without the library x."""


class WeightsError(AmpFxError):
    """Weights that a compiled graph holds as constants have changed."""


class CaptureError(AmpFxError):
    """A Dynamo graph could not be captured as pre-dispatch ATen."""


class PassError(AmpFxError):
    """A pass failed on a graph. A bug report for amp_fx unless the cause says otherwise."""


class VerifyError(PassError):
    """The rewritten graph does not run, or a dtype differs from the plan or from what Dynamo traced."""


class FallbackWarning(UserWarning):
    """Something of amp_fx has failed on a graph, which is compiled or called in a plainer way."""


class ScalingWarning(UserWarning):
    """float16 is trained without loss scaling."""


def did_you_mean(value: str, valid: Iterable[str]) -> str:
    """Returns ``" Did you mean 'policy'?"`` for the nearest valid name, or an empty string."""
    near = difflib.get_close_matches(value, list(valid), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
