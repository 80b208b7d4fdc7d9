#!/usr/bin/env bash
# onnxruntime 1.31.1, provider for CPUs: a file in fp16 is computed in fp32, and rounded at its ends alone.
#
# File: x -> Cast to fp16 -> Mul 70000 / 64 -> Mul 64 -> Mul 1 / 1024 -> Cast to fp32, all in fp16, for x = 1. Expected: the second
# product is 70000, beyond fp16's 65504, so that the result is infinite. Seen: it is finite, with every optimization level.
# With a Cast to fp32 and back behind each product, which the file itself has, the result is infinite.
#
# Output seen:
#   onnxruntime 1.31.1: as it is 68.38, with casts inf
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import numpy as np
import onnx.helper as h
import onnxruntime
from onnx import TensorProto


def result(rounds):
    nodes, last = [h.make_node("Cast", ["x"], ["v0"], to=TensorProto.FLOAT16)], "v0"
    for index, factor in enumerate((70000 / 64, 64.0, 1 / 1024)):
        value = h.make_tensor(f"c{index}", TensorProto.FLOAT16, [], [factor])
        nodes.append(h.make_node("Constant", [], [f"k{index}"], value=value))
        if not rounds:
            nodes.append(h.make_node("Mul", [last, f"k{index}"], [last := f"m{index}"]))
            continue
        wide = [f"a{index}", f"b{index}"]
        for source, target in zip((last, f"k{index}"), wide):
            nodes.append(h.make_node("Cast", [source], [target], to=TensorProto.FLOAT))
        nodes.append(h.make_node("Mul", wide, [f"p{index}"]))
        nodes.append(h.make_node("Cast", [f"p{index}"], [last := f"m{index}"], to=TensorProto.FLOAT16))
    nodes.append(h.make_node("Cast", [last], ["y"], to=TensorProto.FLOAT))
    ends = [h.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(session.run(None, {"x": np.ones(1, np.float32)})[0][0])


plain, rounded = result(False), result(True)
print(f"onnxruntime {onnxruntime.__version__}: as it is {plain:.2f}, with casts {rounded}")
raise SystemExit(not (math.isfinite(plain) and math.isinf(rounded)))
PY
"$folder/venv/bin/python" "$folder/program.py"
