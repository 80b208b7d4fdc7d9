#!/usr/bin/env bash
# OpenVINO 2026.4.1, CPU: INFERENCE_PRECISION_HINT=f32 takes the casts to fp16 out of a file, and leaves those to bf16.
#
# File: x in fp32 -> Cast to a 16-bit dtype -> Cast to fp32, for x = 1 / 3. Expected: x rounded to the dtype. Seen with the hint f32: x
# itself for fp16, the rounded number for bf16. With EXECUTION_MODE_HINT=ACCURACY both are rounded on a CPU with fp16
# instructions (AVX512-FP16).
#
# Output seen:
#   OpenVINO 2026.4.1, hint f32: float16 0.33333334, bfloat16 0.33398438
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

x = np.full(4, 1 / 3, np.float32)


def cast(dtype):
    ends = [h.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    nodes = [h.make_node("Cast", ["x"], ["low"], to=dtype), h.make_node("Cast", ["low"], ["y"], to=TensorProto.FLOAT)]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:])
    file = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=10).SerializeToString()
    core = openvino.Core()
    model = core.read_model(io.BytesIO(file))
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0][0]


fp16, bf16 = cast(TensorProto.FLOAT16), cast(TensorProto.BFLOAT16)
version = openvino.__version__.partition("-")[0]
print(f"OpenVINO {version}, hint f32: float16 {fp16:.8f}, bfloat16 {bf16:.8f}")
raise SystemExit(not (fp16 == x[0] and bf16 == np.float32(0.33398438)))
PY
"$folder/venv/bin/python" "$folder/program.py"
