"""Names that some files still import from here; each lives in the file that it comes from."""

from __future__ import annotations

from amp_fx.graphs.calls import (
    COPY_META,
    argument_value,
    arguments,
    differentiated,
    grad_modes,
    is_cast,
    is_gradient_call,
    is_leaf_call,
    is_parameter,
    output_nodes,
    tensor_nodes,
)
from amp_fx.graphs.fake_runs import RAN_META, dtype_under_autocast, fake_arguments, fake_values, run_fake
from amp_fx.graphs.flops import is_matmul, matmul_flops
from amp_fx.graphs.source_lines import module_path, source_line, where
from amp_fx.graphs.storages import in_place_target, is_view, storage_of, written_arguments, written_storages
from amp_fx.graphs.values import LOW_DTYPES, cast_bytes, is_eligible, numel, tensors

__all__ = [
    "COPY_META",
    "LOW_DTYPES",
    "RAN_META",
    "argument_value",
    "arguments",
    "cast_bytes",
    "differentiated",
    "dtype_under_autocast",
    "fake_arguments",
    "fake_values",
    "grad_modes",
    "in_place_target",
    "is_cast",
    "is_eligible",
    "is_gradient_call",
    "is_leaf_call",
    "is_matmul",
    "is_parameter",
    "is_view",
    "matmul_flops",
    "module_path",
    "numel",
    "output_nodes",
    "run_fake",
    "source_line",
    "storage_of",
    "tensor_nodes",
    "tensors",
    "where",
    "written_arguments",
    "written_storages",
]
