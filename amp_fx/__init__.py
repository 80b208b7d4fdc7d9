"""amp_fx: a ``torch.compile`` backend for automatic mixed precision.

model = torch.compile(model, backend="amp_fx")
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from amp_fx.errors import (
    AmpFxError,
    CaptureError,
    FallbackWarning,
    OptionsError,
    PassError,
    PlanError,
    ScalerError,
    ScalingWarning,
    VerifyError,
    WeightsError,
)
from amp_fx.exporting import convert, export, extra_files
from amp_fx.plan import CastPlan, NodePlan, Plan
from amp_fx.policy import Policy, Rule
from amp_fx.recording import Recording, record
from amp_fx.report import Report
from amp_fx.scaler import GradScaler

if TYPE_CHECKING:
    from amp_fx.explaining import explain
    from amp_fx.histograms import histogram

__all__ = [
    "AmpFxError",
    "CaptureError",
    "CastPlan",
    "FallbackWarning",
    "GradScaler",
    "NodePlan",
    "OptionsError",
    "PassError",
    "Plan",
    "PlanError",
    "Policy",
    "Recording",
    "Report",
    "Rule",
    "ScalerError",
    "ScalingWarning",
    "VerifyError",
    "WeightsError",
    "convert",
    "explain",
    "export",
    "extra_files",
    "histogram",
    "record",
]

#: loaded when they are asked for: `import amp_fx` should not wait for what most programs never use
_LAZY = {"explain": "amp_fx.explaining", "histogram": "amp_fx.histograms"}

try:
    __version__ = version("amp_fx")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_LAZY[name]), name)
    return value
