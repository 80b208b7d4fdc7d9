#!/usr/bin/env bash
# accelerate 1.15.0: the compile settings of a second Accelerator in a process are dropped without a word.
#
# Program: an Accelerator with one backend of torch.compile trains a model; later, in the same process (a second run in a
# notebook, an evaluation after a training), another one is made with another backend. Expected: the second model is
# compiled with the second backend, or an error, as for mixed_precision. Seen: the second is compiled with the first
# backend, and nothing is said; another mixed_precision than the first raises a ValueError. Where the first compiles nothing,
# neither does the second.
#
# Output seen:
#   accelerate 1.15.0: asked eager, aot_eager; ran eager, eager; not compiled, then eager: nothing ran; mixed_precision: ValueError
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cat > "$folder/program.py" <<'PY'
from unittest import mock

import accelerate
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn

compile_model = torch.compile


def compiled(plugin):
    """The backend with which a new Accelerator compiles a model; None where it does not compile."""
    seen = [None]

    def note(model, **settings):
        seen.append(settings["backend"])
        return compile_model(model, **settings)

    with mock.patch("torch.compile", note):
        model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(nn.Linear(4, 4))
    model(torch.ones(1, 4))
    return seen[-1]


def forget():
    AcceleratorState._reset_state(reset_partial_state=True)


ran = [compiled(TorchDynamoPlugin(backend=name)) for name in ("eager", "aot_eager")]
try:
    Accelerator(cpu=True, mixed_precision="bf16")
    precision = "taken"
except ValueError:
    precision = "ValueError"
forget()
late = [compiled(None), compiled(TorchDynamoPlugin(backend="eager"))]
print(
    f"accelerate {accelerate.__version__}: asked eager, aot_eager; ran {', '.join(map(str, ran))}; not compiled, then eager: "
    f"{'nothing ran' if late == [None, None] else late}; mixed_precision: {precision}"
)
raise SystemExit(ran != ["eager", "eager"] or late != [None, None] or precision != "ValueError")
PY
"$folder/venv/bin/python" "$folder/program.py"
