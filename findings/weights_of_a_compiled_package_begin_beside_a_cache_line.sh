#!/usr/bin/env bash
# torch 2.13.0 (AOTInductor, CPU): every large weight of a loaded package begins 16 bytes behind a cache line.
#
# Program: a linear and a custom op that returns its weight's address modulo 64, exported, compiled with AOTInductor, loaded.
# Expected: 0. AOTInductor pads the constants of a package to 64 bytes each, and torch's own CPU allocator places every tensor
# at 64 bytes: the same model gives 0 eagerly and compiled in one process. Seen: 16. The package copies its constants into one
# block of std::malloc when it is loaded, and glibc begins blocks of more than 32 MB 16 bytes behind a page. Smaller ones begin at
# any multiple of 16, another one in each process.
#
# Results are right. What it costs on a Xeon with AMX, two threads (oneDNN's own verbose times of the same primitive, packed
# bf16 weights, 1,024 rows): 384 to 1,536 with gelu 1.27 ms in the package and 0.83 ms in one process, 1,536 to 384 0.88 and 0.58,
# 384 to 1,152 0.58 and 0.35.
#
# Output seen (Linux, x86-64):
#   torch 2.13.0: address of the weight modulo 64: eager 0, compiled 0, package 16
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 setuptools==80.9.0
export TORCHINDUCTOR_CACHE_DIR="$folder/cache"
cat > "$folder/program.py" <<'PY'
import sys

import torch


@torch.library.custom_op("places::modulo", mutates_args=())
def modulo(weight: torch.Tensor) -> torch.Tensor:
    return torch.tensor([weight.data_ptr() % 64])


@modulo.register_fake
def _(weight):
    return torch.empty(1, dtype=torch.int64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3072, 3072)

    def forward(self, x):
        return self.linear(x), torch.ops.places.modulo(self.linear.weight)


model, x = Model().eval(), torch.randn(2, 3072)
with torch.no_grad():
    program = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    runs = model, torch.compile(model), torch._inductor.aoti_load_package(path)
    eager, compiled, package = (int(run(x)[1]) for run in runs)
print(
    f"torch {torch.__version__.partition('+')[0]}: address of the weight modulo 64: "
    f"eager {eager}, compiled {compiled}, package {package}"
)
raise SystemExit((eager, compiled, package) != (0, 0, 16))
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder/model.pt2"
