"""The recipes of ``examples/`` with the real libraries: timm, diffusers, torchtitan; and TRL with LoRA of PEFT.

timm brings torchvision, which must fit the build of torch, and torchtitan wants other versions of what TRL wants: both
are tested where they are installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fx
import train_diffusers
import train_timm
import train_torchtitan
from examples import hugging_face
from support.other_libraries import QUIET, low, weights


@pytest.mark.slow
def test_the_loop_of_diffusers_trains_a_unet() -> None:
    model = train_diffusers.tiny_unet()
    before = weights(model)
    with amp_fx.record() as recording:
        losses = train_diffusers.train(model, [torch.randn(2, 3, 16, 16)] * 3, cpu=True)
    assert torch.bfloat16 in low(recording)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True) if p.dim() > 1)


@pytest.mark.slow
def test_timms_native_scaler_skips_a_bad_step() -> None:
    pytest.importorskip("timm")
    labels = torch.tensor([0, 1])
    good = torch.randn(2, 3, 160, 160), labels
    bad = good[0] * float("inf"), labels
    with amp_fx.record() as recording:
        # "auto" leaves matmuls in fp32 on a CPU, where fp16 is slow
        scaler = train_timm.train([good, bad, good], profile="off")
    assert torch.float16 in low(recording)
    # the first scale, 2**16, may be too large for a good batch
    assert scaler.skipped_steps in (1, 2)
    assert scaler.get_scale() == 2.0 ** (16 - scaler.skipped_steps)


@pytest.mark.slow
def test_torchtitan_compiles_the_blocks() -> None:
    pytest.importorskip("torchtitan")
    with amp_fx.record() as recording:
        losses = train_torchtitan.train()
    assert torch.bfloat16 in low(recording)
    assert losses[-1] < losses[0]


VOCAB = 32


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB)}
    words["<eos>"] = words.pop("w0")
    own = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=own, **special)


# PEFT asks a model by a name that transformers is about to drop; Dynamo makes an instance of every
# autograd.Function, and TRL's loss is one
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_lora_is_tuned_in_bf16_and_saved(tmp_path: Path) -> None:
    # here, as they take seconds
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from safetensors.torch import load_file
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from amp_fx.integrations.transformers import AmpFxCallback

    model = hugging_face.llama(layers=1, width=16, heads=2, kv_heads=1, hidden=16, vocab=VOCAB, length=32)
    settings: Any = {"bf16": False, "max_steps": 4, "activation_checkpointing": False, "max_length": 8}
    rows = Dataset.from_dict({"input_ids": torch.randint(1, VOCAB, (8, 8)).tolist()})
    trainer = SFTTrainer(
        model,  # pyright: ignore[reportArgumentType]
        SFTConfig(str(tmp_path), **QUIET, **settings),
        train_dataset=rows,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[AmpFxCallback({"profile": "off"}, dtype="bfloat16")],
    )
    tuned: Any = trainer.model
    assert isinstance(tuned, PeftModel)
    before = weights(tuned)
    with amp_fx.record() as recording:
        trainer.train()
    pairs = zip(tuned.named_parameters(), before, strict=True)
    moved = {name for (name, p), old in pairs if not torch.equal(p, old)}
    assert moved
    assert all("lora_" in name for name in moved)
    assert torch.bfloat16 in low(recording)

    trainer.save_model(str(tmp_path / "saved"))
    keys = load_file(tmp_path / "saved" / "adapter_model.safetensors").keys()
    assert keys
    assert not any("_orig_mod" in key for key in keys)
