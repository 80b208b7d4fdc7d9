#!/usr/bin/env bash
# torch 2.13.0, fp32: of two nn.Embedding(sparse=True) in one compiled model, the gradient of one table is overwritten.
#
# Program: two tables with sparse gradients and a linear layer. Expected: the gradients of the eager model. Seen: the values
# of one sparse gradient are those of another tensor, without an error: Inductor gives the buffer that the sparse tensor
# holds to a later kernel of the same size.
#
# Output seen:
#   torch 2.13.0: wrong first.weight
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Embedding(50, 16, sparse=True) for _ in range(2))
        self.linear = nn.Linear(16, 16)

    def forward(self, ids):
        hidden = torch.tanh(self.linear(torch.tanh(self.second(ids))))
        return self.first(ids) * hidden


torch.manual_seed(0)
net, ids = Net(), torch.randint(0, 50, (64,))


def gradients(run):
    net.zero_grad()
    run(ids).square().mean().backward()
    return {name: value.grad.to_dense().clone() for name, value in net.named_parameters()}


eager, compiled = gradients(net), gradients(torch.compile(net))
wrong = [name for name in eager if (compiled[name] - eager[name]).norm() > 1e-3 * eager[name].norm()]
print(f"torch {torch.__version__.partition('+')[0]}: wrong {', '.join(wrong) or 'none'}")
raise SystemExit(wrong != ["first.weight"])
PY
"$folder/venv/bin/python" "$folder/program.py"
