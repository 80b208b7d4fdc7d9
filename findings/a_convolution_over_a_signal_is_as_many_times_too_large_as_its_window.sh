#!/usr/bin/env bash
# torch 2.13.0 (oneDNN 3.12.0), CPUs with AMX: conv1d in bf16 over many channels is as many times too large as its window is wide.
#
# Program: conv1d of 1,024 channels by windows of 33, with and without torch.autocast("cpu", torch.bfloat16), eagerly. Expected: an
# error of a few thousandths, as of any product in bf16. Seen: each result is 33 times the right one, without an error or a
# warning; windows of 8 are right, and so are fp32 and fp16. The same convolution of a column, [N, C, L, 1], is right. In
# int8 it needs twice as many channels. Which sizes are wrong follows oneDNN's blocking: of 554 random signals and windows
# with 4,096 to 131,072 elements a window 39 were, the smallest with 24,576.
#
# Output seen (a Xeon with AMX; on a CPU without, the script says so and shows nothing):
#   torch 2.13.0: windows of 33: 33.0 times, of a column 1.0 times, windows of 8: 1.0 times
# Exits with 1 if that changes.
set -euo pipefail
if ! grep -qm1 amx_bf16 /proc/cpuinfo; then
    echo "this CPU has no AMX: nothing to show"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(2, 1024, 100)


def times(convolve, window):
    """How many times the result in fp32 the one in bf16 is, in the least squares."""
    weight = torch.randn(64, 1024, window)
    exact = torch.conv1d(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = convolve(weight).float()
    return round(float((found * exact).sum() / exact.square().sum()), 1)


wide, short = (times(lambda weight: torch.conv1d(x, weight), window) for window in (33, 8))
column = times(lambda weight: torch.conv2d(x[..., None], weight[..., None])[..., 0], 33)
print(f"torch {torch.__version__.partition('+')[0]}: windows of 33: {wide} times, of a column {column} times, windows of 8: {short} times")
raise SystemExit((wide, column, short) != (33.0, 1.0, 1.0))
PY
"$folder/venv/bin/python" "$folder/program.py"
