"""What calibrated plans move, beside torch.autocast at no more than its error: small models, trained in fp32.

    OMP_NUM_THREADS=1 python -m benchmarks.budgets [--only NAME ...] [--budget 1.0] [--steps 300] [--target cuda:h100]

Bytes are what all kernels of a training step read and write, by Inductor's estimate. The error is that of the gradient:
predicted, and that of a step compiled on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.compiler.settings import Options
from amp_fx.instruments.batches import call_of
from amp_fx.instruments.calibration.verifying import Verifier
from amp_fx.instruments.step import Step
from amp_fx.instruments.targets import TARGETS
from benchmarks.learning import TASKS, Task
from benchmarks.results import arguments, describe, write

#: batches that are calibrated on; training has not seen them
_BATCHES = 4


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class SwiGLU(nn.Module):
    """Three layers with RMSNorm and SwiGLU, no biases; takes tokens and targets."""

    def __init__(self, width: int = 96, layers: int = 3, vocab: int = 256, length: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(_Layer(width, 6) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens (batch, length)."""
        x = self.layers(self.tokens(tokens) + self.positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


#: name -> what is trained
MODELS: dict[str, Callable[[], Task]] = {
    "text_swiglu": lambda: replace(TASKS["text_gpt"](), make=SwiGLU),
    "text_gpt": TASKS["text_gpt"],
    "digits_vit": TASKS["digits_vit"],
}


@dataclass(frozen=True)
class Row:
    """A plan of one model: bytes moved and the predicted error, both as shares of torch.autocast's.

    ``measured`` is the error, too, of steps compiled on the CPU with amp_fx, by the plan and by policy autocast.
    """

    model: str
    moved: float
    predicted: float
    measured: float


def measure(name: str, budget: float, steps: int, target: str | None) -> Row:
    torch.manual_seed(0)
    task = MODELS[name]()
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    for step in range(steps):
        model(*task.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [task.batch(steps + number, 0) for number in range(_BATCHES)]
    cal = amp_fx.calibrate(model, batches, profile="off" if target is None else "auto", target=target)
    plan = cal.plan(budget, minimise="bytes", verify=False)
    costs = amp_fx.explain(model, *batches[0], target=target, options={"plan": plan, "strict": True}).costs
    moved = [costs[arm].moved or 0 for arm in ("amp_fx", "torch.autocast")]
    compiled = Verifier(
        [Step(model, call_of(model, batch)) for batch in batches], Options(dtype=torch.bfloat16), 1.0
    )
    measured = compiled.error(plan.plans) / compiled.compiled({"policy": "autocast", "profile": "off"})
    return Row(name, moved[0] / moved[1], plan.point.error / cal.autocast_error, measured)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks.budgets", __doc__, device=False)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target", choices=TARGETS, metavar="NAME")
    args = parser.parse_args(argv)
    print(f"{'':14}{'bytes':>8}{'error, predicted':>18}{'measured':>10}  (torch.autocast: 1)")
    rows = []
    for name in args.only:
        row = measure(name, args.budget, args.steps, args.target)
        print(f"{name:14}{row.moved:8.3f}{row.predicted:18.2f}{row.measured:10.2f}", flush=True)
        rows.append(row)
    if args.json:
        write(args.json, describe("cpu"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
