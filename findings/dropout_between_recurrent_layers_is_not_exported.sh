#!/usr/bin/env bash
# torch 2.13.0: dropout between the layers of nn.LSTM, nn.GRU and nn.RNN is lost where the layer is decomposed.
#
# Program: two layers in training with dropout=1.0, so that the second reads zeros and nothing depends on the input; exported,
# and decomposed to core ATen. Expected: the results of the exported module depend on the input no more than the eager ones.
# Seen: they do. The decomposition compares the number of layers with the layer's index the wrong way round, so that it
# never drops. torch.compile reaches the same code where Dynamo's allow_rnn is on.
#
# Output seen:
#   torch 2.13.0: depends on the input: LSTM eager False exported True; GRU eager False exported True; RNN eager False exported True
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
first, second = (torch.randn(5, 1, 8) for _ in range(2))


def depends(run):
    return not torch.equal(run(first)[0], run(second)[0])


seen = []
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    layer = kind(8, 8, num_layers=2, dropout=1.0).train()
    exported = torch.export.export(layer, (first,)).run_decompositions().module()
    seen.append((kind.__name__, depends(layer), depends(exported)))
said = "; ".join(f"{name} eager {eager} exported {exported}" for name, eager, exported in seen)
print(f"torch {torch.__version__.partition('+')[0]}: depends on the input: {said}")
raise SystemExit(any(eager or not exported for _, eager, exported in seen))
PY
"$folder/venv/bin/python" "$folder/program.py"
