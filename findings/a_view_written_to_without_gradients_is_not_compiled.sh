#!/usr/bin/env bash
# torch 2.13.0: a view that is made and written to under no_grad raises where its grad_fn or is_leaf is read, and is not compiled.
#
# Program: y needs gradients (it is the result of a layer, or of a part that is frozen). Under torch.no_grad() code makes a
# view of y, divides it in place, and goes on after a graph break. Expected: what eager computes, as nothing is recorded; or
# the tensor's is_leaf. Seen: is_leaf and grad_fn of the view raise RuntimeError, and torch.compile raises an
# InternalTorchDynamoError as it reads is_leaf of what a new graph is given. The message says that the base was "modified
# inplace with grad mode enabled", and grad mode was never enabled. Without the view, or
# without the write ("others"), all is well.
#
# Output seen:
#   torch 2.13.0: eager runs; is_leaf RuntimeError; compiled InternalTorchDynamoError; others ['runs']
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch


def energies(y, *, is_view=True, writes=True):
    z = y.view(-1) if is_view else y
    if writes:
        z /= 2
    torch._dynamo.graph_break()
    return z + 1


def tried(call):
    try:
        return call(), "runs"
    except Exception as error:
        assert "modified inplace with grad mode enabled" in str(error)
        return None, type(error).__name__


def made():
    with torch.enable_grad():
        return torch.ones(4, 4, requires_grad=True) * 2


def leaf():
    z = made().view(-1)
    z /= 2
    return z.is_leaf


def compiled(**choice):
    torch._dynamo.reset()
    return torch.compile(energies, backend="eager")(made(), **choice)


with torch.no_grad():
    value, eager = tried(lambda: energies(made()))
    assert torch.equal(value, torch.full((16,), 2.0))
    found = {"leaf": tried(leaf)[1], "compiled": tried(compiled)[1]}
    others = {tried(lambda: compiled(is_view=False))[1], tried(lambda: compiled(writes=False))[1]}
version = torch.__version__.partition("+")[0]
print(f"torch {version}: eager {eager}; is_leaf {found['leaf']}; compiled {found['compiled']}; others {sorted(others)}")
wanted = {"leaf": "RuntimeError", "compiled": "InternalTorchDynamoError"}
raise SystemExit(eager != "runs" or found != wanted or others != {"runs"})
PY
"$folder/venv/bin/python" "$folder/program.py"
