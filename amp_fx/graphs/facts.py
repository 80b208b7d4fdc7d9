"""Names that some files still import from here; each lives in the file that it comes from."""

from __future__ import annotations

from amp_fx.graphs.calls import COPY_META, arguments, is_cast, is_parameter
from amp_fx.graphs.fake_runs import fake_arguments, run_fake
from amp_fx.graphs.flops import is_matmul, matmul_flops
from amp_fx.graphs.storages import is_view, storage_of, written_storages
from amp_fx.graphs.values import FP8_DTYPES, LOW_DTYPES, is_eligible, numel

__all__ = [
    "COPY_META",
    "FP8_DTYPES",
    "LOW_DTYPES",
    "arguments",
    "fake_arguments",
    "is_cast",
    "is_eligible",
    "is_matmul",
    "is_parameter",
    "is_view",
    "matmul_flops",
    "numel",
    "run_fake",
    "storage_of",
    "written_storages",
]
