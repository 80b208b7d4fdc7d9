#!/usr/bin/env bash
# torch 2.13.0, CPU, Inductor with freezing: max_pool2d(ceil_mode=True) between two roundings to uint8 has a smaller result.
#
# Program: a value in uint8 is widened, pooled with ceil_mode=True, and rounded to uint8 again, as a model quantised in PyTorch's
# own form is. Expected: the shape of the eager program. Seen: a result of the shape that ceil_mode=False has, without an
# error. The pattern that makes one call of pool and roundings does not hand ceil_mode on.
#
# Output seen:
#   torch 2.13.0: eager (1, 4, 4, 4), compiled (1, 4, 3, 3)
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn

ops = torch.ops.quantized_decomposed
RANGE = 0.02, 128, 0, 255, torch.uint8


def rounded(x):
    return ops.dequantize_per_tensor.default(ops.quantize_per_tensor.default(x, *RANGE), *RANGE)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)

    def forward(self, x):
        return rounded(self.pool(rounded(x)))


torch.manual_seed(0)
net, x = Net().eval(), torch.randn(1, 4, 8, 8)
with torch.no_grad():
    eager, compiled = net(x), torch.compile(net, options={"freezing": True})(x)
shapes = tuple(eager.shape), tuple(compiled.shape)
print(f"torch {torch.__version__.partition('+')[0]}: eager {shapes[0]}, compiled {shapes[1]}")
raise SystemExit(shapes != ((1, 4, 4, 4), (1, 4, 3, 3)))
PY
"$folder/venv/bin/python" "$folder/program.py"
