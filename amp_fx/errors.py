"""The errors amp_fx raises, as one small tree. Every message names the bad value, the valid ones, and what to do.

``CaptureError`` and ``PassError`` reach the user only with ``options={"strict": True}``. Otherwise the graph
is compiled in a plainer way, at last with torch.autocast's semantics, and one :class:`FallbackWarning` says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class AmpFxError(Exception):
    """Base of everything amp_fx raises on purpose."""


class OptionsError(AmpFxError, ValueError):
    """An option has an unknown name or a bad value, or contradicts another one."""


class PlanError(AmpFxError, ValueError):
    """A file or value is not a plan, or the plan was made for another graph."""


class InputError(AmpFxError, TypeError):
    """A call has an argument that the model does not take, or a dtype that the program was not exported for."""


class ExportError(AmpFxError):
    """A program cannot be exported, or a file not written, or a runtime refuses it, or it computes something else."""


class ScalerError(AmpFxError, ValueError):
    """A graph finds no :class:`amp_fx.GradScaler` of its name, or a scaler cannot do what it is asked."""


class TargetError(AmpFxError, ValueError):
    """There is no device of that name to compile for, or this machine cannot compile for it."""


class MissingLibraryError(AmpFxError, ModuleNotFoundError):
    """A library of an extra is not installed: of integrations, ONNX files, figures, or GPUs that are not there."""


class WeightsError(AmpFxError):
    """Weights that a graph holds as constants have changed, or a gradient of weights stored low is asked for."""


class SecondDerivativeError(AmpFxError, RuntimeError):
    """A second derivative is taken of a compiled graph from outside: it was compiled with its first derivatives."""

    def __init__(self, graph: str) -> None:
        super().__init__(
            f"A second derivative of graph {graph} is taken outside of the compiled function (by create_graph=True), "
            "which has its first derivatives only. Take the inner gradient inside the compiled function, by "
            "torch.func.grad, or by torch.autograd.grad with torch._dynamo.config.trace_autograd_ops = True (from "
            "torch 2.12 on), or call the model uncompiled for it. docs/faq.md has an example."
        )


class CaptureError(AmpFxError):
    """A Dynamo graph cannot be captured as pre-dispatch ATen."""


class PassError(AmpFxError):
    """A pass failed; names it and the passes before it. A bug of amp_fx unless the cause says otherwise."""


class VerifyError(PassError):
    """The rewritten graph does not run, or a dtype differs from the plan or from what Dynamo traced."""


class FallbackWarning(UserWarning):
    """Something of amp_fx has failed on a graph, which is compiled or called in a plainer way."""


class ScalingWarning(UserWarning):
    """float16 is trained without loss scaling."""


def install_hint(extra: str) -> str:
    """How to install the libraries of an extra: amp_fx is on no registry, so from a checkout."""
    return f"pip install '.[{extra}]' in a checkout of amp_fx"


def did_you_mean(value: str, valid: Iterable[str]) -> str:
    """Returns ``" Did you mean 'policy'?"`` for the nearest valid name, or an empty string."""
    near = difflib.get_close_matches(value, list(valid), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def one_of(what: str, valid: Collection[str], value: object, where: str = "") -> str:
    """The value of an option, or of a key ``where`` one stands, if it is valid; else OptionsError."""
    if isinstance(value, str) and value in valid:
        return value
    raise OptionsError(
        f"Unknown {what} {value!r}{where and f' in {where}'}; valid: {', '.join(map(repr, valid))}."
        + did_you_mean(str(value), valid)
    )
