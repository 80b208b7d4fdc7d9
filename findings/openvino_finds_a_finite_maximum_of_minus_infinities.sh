#!/usr/bin/env bash
# OpenVINO 2026.4.1, CPU: ReduceMax of a row of -inf is the lowest finite number of fp32.
#
# File: ReduceMax over the last dimension, in fp32. Expected for a row of -inf: -inf, as in numpy, torch and onnxruntime. Seen:
# -3.4e38, by the hints f32 and bf16. A mask of attention whose rows are all -inf is then not found by its largest number.
#
# Output seen:
#   OpenVINO 2026.4.1: [-3.4028234663852886e+38, 2.0]
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openvino==2026.4.1 onnx==1.23.2 numpy
cat > "$folder/program.py" <<'PY'
import io

import numpy as np
import onnx.helper as h
import openvino
from onnx import TensorProto

x = np.array([[-np.inf] * 4, [-np.inf, 1, 2, -np.inf]], np.float32)
graph = h.make_graph(
    [h.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=0)],
    "g",
    [h.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
    [h.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    [h.make_tensor("axes", TensorProto.INT64, [1], [-1])],
)
file = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=10).SerializeToString()
core = openvino.Core()
found = core.compile_model(core.read_model(io.BytesIO(file)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]
print(f"OpenVINO {openvino.__version__.partition('-')[0]}: {[*map(float, found)]}")
raise SystemExit(not (found[0] == np.finfo(np.float32).min and found[1] == 2))
PY
"$folder/venv/bin/python" "$folder/program.py"
