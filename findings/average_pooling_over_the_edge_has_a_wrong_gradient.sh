#!/usr/bin/env bash
# torch 2.13.0, fp32: torch.compile's gradient of avg_pool2d with ceil_mode=True is wrong where a window hangs over the
# edge (pytorch#198119, open): it divides by the whole window and not by the elements that the window has.
#
# Program: a mean over a map of 2 x 2 by a window of 384, as transformers' EfficientNet ends. Expected: every element gets
# a gradient of 1/4. Seen: 1/147456 of it for each. Forward values are right.
#
# Output seen:
#   torch 2.13.0: eager 0.25, compiled 6.7816840277778e-06
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
import torch.nn.functional as F


def gradient(run):
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    run(x).sum().backward()
    return x.grad.flatten()[0].item()


def pooled(x):
    return F.avg_pool2d(x, 384, ceil_mode=True)


eager, compiled = gradient(pooled), gradient(torch.compile(pooled))
version = torch.__version__.partition("+")[0]
print(f"torch {version}: eager {eager}, compiled {compiled:.14g}")
raise SystemExit(not (eager == 0.25 and compiled < 1e-4))
PY
"$folder/venv/bin/python" "$folder/program.py"
