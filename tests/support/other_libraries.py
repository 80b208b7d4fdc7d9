"""What the tests of other libraries share, and which of them shows each claim of the page about conformance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import amp_fx
from support.models.loss_scaled import INF, weights

__all__ = ["INF", "weights"]

#: arguments of trainers of transformers: quiet, and on the CPU
QUIET: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "learning_rate": 0.1,
    "per_device_train_batch_size": 2,
}  # fmt: skip


def batches(*bad: int, count: int = 4) -> DataLoader[Any]:
    """Inputs of the model, some of them infinite."""
    found = [torch.randn(4, 8) * (INF if step in bad else 1) for step in range(count)]
    return DataLoader(found, batch_size=None)  # pyright: ignore[reportArgumentType]


def moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return not all(torch.equal(p, q) for p, q in zip(before, after, strict=True))


def low(recording: amp_fx.Recording) -> set[torch.dtype | None]:
    """Dtypes below fp32 in what was compiled, without falling back."""
    assert not any(plan.fallback for plan in recording.plans)
    return {node.dtype for plan in recording.plans for node in plan.nodes} - {torch.float32, None}


DOCUMENT = Path(__file__).parents[2] / "docs" / "contributors" / "conformance.md"
FOLDER = Path(__file__).parents[1] / "cpu" / "integrations"

#: library -> its file of tests, and what works -> the test that shows it
CLAIMS: dict[str, tuple[str, dict[str, str]]] = {
    "accelerate": ("test_accelerate.py", {
        "bf16 training, with the plugin alone": "test_bf16_training_needs_the_plugin_alone",
        "fp16: a bad step is skipped, `optimizer_step_was_skipped` and schedulers know it, fused optimizers too":
            "test_a_bad_step_is_skipped_and_accelerate_knows",
        "clipping": "test_gradients_are_true_to_scale_and_clipped_as_in_fp32",
        "gradient accumulation": "test_one_bad_micro_batch_spoils_the_step_that_it_is_part_of",
        "`save_state`, `load_state`": "test_state_is_saved_and_loaded",
        "regional compilation": "test_regional_compilation_compiles_the_repeated_blocks",
    }),
    "transformers": ("test_transformers.py", {
        "`Trainer`: bf16 training, evaluation, prediction":
            "test_bf16_training_evaluation_and_prediction_are_compiled",
        "fp16: a bad step is skipped, the learning rate waits, fused optimizers too":
            "test_a_bad_step_is_skipped_and_the_learning_rate_waits",
        "gradient accumulation": "test_accumulated_micro_batches_are_judged_together",
        "checkpoints with clean keys and the scale, resumed":
            "test_a_checkpoint_has_clean_keys_and_the_scale_and_is_resumed",
        "a Trainer of one's own": "test_a_trainer_of_ones_own_compiles_through_accelerate",
        "`generate`": "test_generation_is_low_and_the_second_call_compiles_nothing",
        "`generate` with a static cache, low weights shared by prefill and decoding":
            "test_with_a_static_cache_prefill_and_decoding_of_any_length_share_low_weights",
        "speculative decoding": "test_speculative_decoding_has_low_weights_of_both_models_once",
    }),
    "trl": ("test_recipes.py", {"`SFTTrainer` with LoRA, bf16": "test_lora_is_tuned_in_bf16_and_saved"}),
    "peft": ("test_recipes.py", {"LoRA adapters, saved with clean keys": "test_lora_is_tuned_in_bf16_and_saved"}),
    "lightning": ("test_lightning.py", {
        "`Trainer`: bf16 training and validation, with the plugin alone":
            "test_bf16_training_and_validation_need_the_plugin_alone",
        "fp16: a bad step is skipped, gradients are clipped, fused optimizers too":
            "test_a_bad_step_is_skipped_and_gradients_are_clipped",
        "gradient accumulation": "test_one_bad_micro_batch_spoils_the_step_that_it_is_part_of",
        "checkpoints": "test_checkpoints_have_clean_keys_and_the_state_of_the_scaler",
        "Fabric, bf16": "test_fabric_trains_in_bf16",
        "Fabric, fp16": "test_fabric_skips_a_bad_step",
    }),
    "diffusers": ("test_recipes.py", {
        "the training loop of its examples, bf16": "test_the_loop_of_diffusers_trains_a_unet",
    }),
    "timm": ("test_recipes.py", {"`NativeScaler`, fp16": "test_timms_native_scaler_skips_a_bad_step"}),
    "torchtitan": ("test_recipes.py", {"the `compile` section": "test_torchtitan_compiles_the_blocks"}),
}  # fmt: skip
