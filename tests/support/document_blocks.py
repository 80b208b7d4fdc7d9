"""What the Python blocks of the README and of the docs take for granted: a model, a batch, a loop around them.

A block says what is new in it; what a reader has already is made here, as small as it may be. Pages share one model, so
that it is compiled once for each of the options that a page is about.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amp_fx
from support.models.small import Parts, UpDown

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

#: pages whose blocks a test of its own runs, with what they say of the results
ELSEWHERE = ("calibrate.md",)

#: pages whose blocks are alternatives: each begins anew
APART = ("recipes.md",)

#: (page, words in a block) -> why it is not run. Whatever is not here runs
NOT_RUN = {
    ("costs.md", "class Stream("): "is about what a GPU's kernels do",
    ("integrations.md", "CompileConfig("): "a static cache compiles the decode step on a GPU only",
}


def pages() -> list[Path]:
    """All that is written for users."""
    top = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, and the lines that they begin in."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found.group(1) == "python":
            yield text.count("\n", 0, found.start()) + 2, found.group(2)


#: inputs of the model
ROWS: Any = [torch.randn(16) for _ in range(8)]

#: three layers, under names that the docs use
Net = functools.partial(UpDown, 16, 32, norm=True, act=F.gelu)


def loss_net() -> nn.Module:
    """Returns its loss. Blocks of a class of its own, as FSDP2 wants them."""

    def loss(m: Any, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, block: x + block(x), m.blocks, x).square().mean()

    return Parts(loss, blocks=nn.ModuleList(Net() for _ in range(2)))


def common() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    return {
        "torch": torch,
        "nn": nn,
        "amp_fx": amp_fx,
        "model": model,
        "batch": torch.randn(4, 16),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
    }


def readme() -> dict[str, Any]:
    small, x = Net(), torch.randn(4, 16)

    def train_one_step() -> None:
        torch.compile(small, backend="amp_fx")(x).sum().backward()

    amp_fx.explain(small, x).save("yesterday.json")
    return common() | {"batch": torch.randn(8, 128, 512), "train_one_step": train_one_step}


def reading() -> dict[str, Any]:
    given = common()
    return {**given, "yesterday": amp_fx.explain(given["model"], given["batch"])}


def recipes() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.optim.swa_utils import AveragedModel

    given = common()
    return given | {
        "model": loss_net(),
        "loss": given["model"](given["batch"]).sum(),
        "batches": [given["batch"]],
        "generator": Net(),
        "discriminator": Net(),
        "AveragedModel": AveragedModel,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "fully_shard": fully_shard,
    }


def scaling() -> dict[str, Any]:
    given = common()
    return given | {
        "batches": [(given["batch"], torch.randn(4, 16))],
        "loss_fn": F.mse_loss,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(given["optimizer"]),
    }


def integrations() -> dict[str, Any]:
    from lightning.fabric import Fabric
    from torch.utils.tensorboard import SummaryWriter

    from support.models.lightning_modules import LitNet

    class LitModel(LitNet):
        def __init__(self) -> None:
            super().__init__(Net(), lr=1e-3)

        def train_dataloader(self) -> Any:
            return DataLoader(ROWS, batch_size=4)

    return common() | {
        "scaler": amp_fx.GradScaler("cpu"),
        "loader": DataLoader(ROWS, batch_size=4),
        "Fabric": Fabric,
        "LitModel": LitModel,
        "data": [{"x": torch.randn(16)}],
        # its thread writes after the page's folder is left
        "SummaryWriter": functools.partial(SummaryWriter, str(Path.cwd() / "runs")),
        "wandb": SimpleNamespace(run=SimpleNamespace(log=dict)),
        "step": 0,
    }


def llama(**more: Any) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    more |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**more, num_attention_heads=2, num_key_value_heads=2)
    return {"config": config, "LlamaForCausalLM": LlamaForCausalLM}


def generation() -> dict[str, Any]:
    small = llama()
    return {
        "model": small["LlamaForCausalLM"](small["config"]).eval(),
        "inputs": {"input_ids": torch.ones(1, 4, dtype=torch.int64), "max_new_tokens": 3},
    }


Setup: TypeAlias = Callable[[], dict[str, Any]]

#: (page, words in a block) -> what that block finds, too
BEFORE: dict[tuple[str, str], Setup] = {("integrations.md", "model.generate("): generation}

#: page -> what its first block finds
SETUPS: dict[str, Setup] = {
    "README.md": readme,
    "integrations.md": integrations,
    "profiling.md": lambda: {**common(), "model": loss_net()},
    "reading-the-report.md": reading,
    "recipes.md": recipes,
    "scaling.md": scaling,
    "targets.md": lambda: common() | llama(use_cache=False),
}
SETUPS |= {page.name: common for page in pages() if page.name not in SETUPS}
