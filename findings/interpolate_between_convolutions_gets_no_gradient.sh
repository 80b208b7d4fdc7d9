#!/usr/bin/env bash
# torch 2.13.0, CPU: gradients of exactly zero in front of an interpolation between convolutions, in bf16.
#
# Program: convolution, nearest interpolation, convolution, relu, convolution under torch.autocast("cpu", torch.bfloat16),
# compiled by torch.compile's own backend. Expected: the first convolution gets the gradient that it gets eagerly.
# Seen: its weight and bias get gradients of exactly 0, without an error or a warning. In fp32, with
# layout_optimization=False, on 2.12.0 and on 2.14.1 the gradients are right.
#
# Cause: a buffer is filled with zeros and added to in place. The code generator for CPUs makes the loops of a kernel that
# reads the buffer anew to fuse it, and its dependencies then name the zeros, so that it may run before the addition.
#
# Output seen:
#   torch 2.13.0: eager max |grad| > 0 True, compiled max |grad| == 0 True
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(4, 32, 3, padding=1),
    nn.Upsample(scale_factor=2),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 3, 3, padding=1),
)
x = torch.randn(1, 4, 16, 16)


def largest_gradient(run):
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y.float().square().mean().backward()
    return net[0].weight.grad.abs().max().item()


eager, compiled = largest_gradient(net), largest_gradient(torch.compile(net))
version = torch.__version__.partition("+")[0]
print(f"torch {version}: eager max |grad| > 0 {eager > 0}, compiled max |grad| == 0 {compiled == 0}")
raise SystemExit(not (eager > 0 and compiled == 0))
PY
"$folder/venv/bin/python" "$folder/program.py"
