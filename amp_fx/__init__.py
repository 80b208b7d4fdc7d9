"""amp_fx: a ``torch.compile`` backend for automatic mixed precision.

model = torch.compile(model, backend="amp_fx")
"""

from importlib.metadata import PackageNotFoundError, version

from amp_fx.compiler.settings import compile, options
from amp_fx.errors import (
    AmpFxError,
    CaptureError,
    ExportError,
    FallbackWarning,
    InputError,
    MissingLibraryError,
    OptionsError,
    PassError,
    PlanError,
    ScalerError,
    ScalingWarning,
    SecondDerivativeError,
    TargetError,
    VerifyError,
    WeightsError,
)
from amp_fx.exporting import convert, export, export_onnx, extra_files, package
from amp_fx.exporting.storing import StoredLow, store_low
from amp_fx.instruments.benching import Bench, Timed, bench
from amp_fx.instruments.calibration import CalibratedPlan, Calibration, Point, calibrate, quantize
from amp_fx.instruments.comparison import CallError, Comparison, ModuleError, compare
from amp_fx.instruments.reports import Recording, Report, explain, histogram, record
from amp_fx.precision.plans import CastPlan, NodePlan, Plan
from amp_fx.precision.policy import Policy, Rule
from amp_fx.runtime import weights
from amp_fx.runtime.scaling import GradScaler
from amp_fx.runtime.state import reset

__all__ = [
    "AmpFxError", "Bench", "CalibratedPlan", "Calibration", "CallError", "CaptureError", "CastPlan",
    "Comparison", "ExportError", "FallbackWarning", "GradScaler", "InputError", "MissingLibraryError",
    "ModuleError", "NodePlan", "OptionsError", "PassError", "Plan", "PlanError", "Point", "Policy",
    "Recording", "Report", "Rule", "ScalerError", "ScalingWarning", "SecondDerivativeError", "StoredLow", "TargetError",
    "Timed",
    "VerifyError", "WeightsError", "bench", "calibrate", "compare", "compile", "convert", "explain", "export",
    "export_onnx", "extra_files", "histogram", "options", "package", "quantize", "record", "reset", "store_low",
    "weights",
]  # fmt: skip

try:
    __version__ = version("amp_fx")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"
