#!/usr/bin/env bash
# onnxruntime 1.31.1, provider for CPUs: a convolution of quantised values runs in integers only where its result is rounded, too.
#
# File: x -> QuantizeLinear -> DequantizeLinear -> Conv by a weight in int8 that is dequantised -> Add of a constant. Expected: the products
# are those of integers, whatever reads the result. Seen: Conv in fp32, and the weight is dequantised in each call. With QuantizeLinear and
# DequantizeLinear between Conv and Add, it is QLinearConv. Read off the graph that onnxruntime has made of the file.
#
# Output seen:
#   onnxruntime 1.31.1: as it is Conv, with a rounded result QLinearConv
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import sys

import numpy as np
import onnx
import onnx.helper as h
import onnx.numpy_helper as nh
import onnxruntime
from onnx import TensorProto

random = np.random.RandomState(0)
stored = {
    "scale": np.float32(0.05),
    "zero": np.uint8(128),
    "weight": random.randint(-127, 128, (8, 8, 3, 3)).astype(np.int8),
    "weight_scale": np.full(8, 0.01, np.float32),
    "weight_zero": np.zeros(8, np.int8),
    "other": np.ones((1, 8, 1, 1), np.float32),
}


def kinds(rounds, folder):
    by = ["scale", "zero"]
    nodes = [
        h.make_node("QuantizeLinear", ["x", *by], ["bytes"]),
        h.make_node("DequantizeLinear", ["bytes", *by], ["value"]),
        h.make_node("DequantizeLinear", ["weight", "weight_scale", "weight_zero"], ["matrix"], axis=0),
        h.make_node("Conv", ["value", "matrix"], ["result"]),
    ]
    if rounds:
        nodes.append(h.make_node("QuantizeLinear", ["result", *by], ["result_bytes"]))
        nodes.append(h.make_node("DequantizeLinear", ["result_bytes", *by], ["read"]))
    nodes.append(h.make_node("Add", ["read" if rounds else "result", "other"], ["y"]))
    ends = [h.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, size, size]) for name, size in (("x", 16), ("y", 14))]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:], [nh.from_array(np.asarray(v), n) for n, v in stored.items()])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = f"{folder}/{rounds}.onnx", 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(f"{folder}/{rounds}.onnx").graph.node if "Conv" in node.op_type]


(plain,), (rounded,) = kinds(False, sys.argv[1]), kinds(True, sys.argv[1])
print(f"onnxruntime {onnxruntime.__version__}: as it is {plain}, with a rounded result {rounded}")
sys.exit((plain, rounded) != ("Conv", "QLinearConv"))
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder"
