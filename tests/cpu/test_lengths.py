"""Models of transformers that are called with batches and prompts of several sizes: nothing falls back, and each size
is as accurate as under autocast."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_fx
from amp_fx.instruments.step import relative_error
from support.checks.step_errors import AMP_FX, EAGER_AUTOCAST, FP64, far_off, run
from support.models.architectures import GROUPED, SIZES, of_transformers
from support.models.zoo import Batch, Case, normal, tokens

pytestmark = [
    pytest.mark.slow,
    # of functions of transformers that ask which libraries there are; stock Inductor warns alike
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

#: rows and lengths of a session's calls: Dynamo makes the first one's sizes numbers, and those that change unknown
CALLS = ((4, 16), (4, 24), (3, 11))

_WINDOW = {"sliding_window": 8, "num_hidden_layers": 2}
#: all experts are chosen, as rounding may choose others, which says nothing of rounding
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}

#: class of the configuration, of the model, and settings
_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", "Qwen3", GROUPED),
    "gemma": ("Gemma", "Gemma", GROUPED),
    "gemma2": ("Gemma2", "Gemma2", {**GROUPED, **_WINDOW}),
    "gemma3": (
        "Gemma3Text",
        "Gemma3",
        {**GROUPED, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "diffllama": ("DiffLlama", "DiffLlama", {"num_key_value_heads": 2}),
    "mixtral": ("Mixtral", "Mixtral", {**GROUPED, **_EXPERTS}),
    "gptoss": ("GptOss", "GptOss", {**GROUPED, **_WINDOW, **_EXPERTS, "rope_parameters": None}),
    "llama4": (
        "Llama4Text",
        "Llama4",
        {
            **GROUPED,
            **_EXPERTS,
            "num_hidden_layers": 2,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 8,
        },
    ),
}


def _text(seed: int) -> Batch:
    given = tokens(seed, *CALLS[seed], vocab=125) + 3
    return {"input_ids": given, "labels": given}


def _decoder(name: str, experts: str | None = None) -> Case:
    kind, model, more = _DECODERS[name]
    settings = {
        **SIZES,
        "use_cache": False,
        **more,
        **({"experts_implementation": experts} if experts else {}),
    }
    made = of_transformers(kind, "ForCausalLM", settings, model)
    return Case(made.train(), _text, lambda outputs, batch: outputs.loss)


def _detector() -> Case:
    import transformers

    made_of: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    made_of |= {"layer_type": "basic", "out_features": ["stage2"]}
    backbone = transformers.ResNetConfig(**made_of)
    parts = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))
    }
    settings = {"d_model": 32, "num_queries": 5, "num_labels": 4, "use_timm_backbone": False, **parts}
    made = of_transformers(
        "Detr",
        "ForObjectDetection",
        {**settings, "use_pretrained_backbone": False, "backbone_config": backbone},
    )
    images = ((4, 64, 64), (4, 64, 96), (6, 96, 64))

    def inputs(seed: int) -> Batch:
        rows, *size = images[seed]
        return {"pixel_values": normal(seed, rows, 3, *size)}

    def loss(outputs: Any, batch: Batch) -> Tensor:
        return outputs.logits.square().mean() + outputs.pred_boxes.square().mean()

    return Case(made.train(), inputs, loss)


#: the model as it is run, and one that computes the same in calls that autocast has on its lists
CASES: dict[str, Callable[[], tuple[Case, Case]]] = {
    name: functools.partial(lambda name: (_decoder(name), _decoder(name)), name)
    for name, (_, _, more) in _DECODERS.items()
    if _EXPERTS.keys().isdisjoint(more)
}
for _name in ("mixtral", "gptoss", "llama4"):
    for _experts in ("batched_mm", "grouped_mm"):
        if _name != "llama4" or _experts == "batched_mm":
            CASES[f"{_name}, {_experts}"] = functools.partial(
                lambda name, experts: (_decoder(name, experts), _decoder(name, "batched_mm")), _name, _experts
            )
CASES["detr"] = lambda: (_detector(), _detector())


def make(name: str) -> tuple[Case, Case]:
    ours, theirs = CASES[name]()
    theirs.model.load_state_dict(ours.model.state_dict())
    return ours, theirs


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["training", "inference"])
@pytest.mark.parametrize("name", CASES)
def test_each_size_is_as_accurate_as_under_autocast_and_none_falls_back(name: str, mode: Any) -> None:
    case, listed = make(name)
    ours = run(case, AMP_FX, mode, range(3))
    theirs, exact = (run(listed, arm, mode, range(3)) for arm in (EAGER_AUTOCAST, FP64))
    for call in range(3):
        assert "outputs" not in (wrong := far_off(*([each[call]] for each in (ours, exact, theirs)))), (
            call,
            wrong,
        )
    # gradients of all calls: one of two numbers, as of the sinks of two heads, is one draw of rounding in each
    assert not far_off(ours, exact, theirs)


#: lengths of the prompts of a session: transformers makes a cache for each that is longer than all before
_PROMPTS, _NEW = (7, 12, 9), 3


def _compile(model: Any) -> None:
    """Compiles prefill and decoding, as users do."""
    model.forward = torch.compile(model.forward, **AMP_FX.compile or {})


def _compile_decoding(model: Any) -> None:
    """Compiles decoding alone, as transformers does on a GPU, and on a CPU with a flag of its own tests."""
    from transformers import CompileConfig

    settings: dict[str, Any] = {"mode": None, **(AMP_FX.compile or {})}
    config: Any = CompileConfig(**settings)
    config._compile_all_devices = True
    model.generation_config.compile_config = config


def _chosen(given: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """The scores by which the next token is a given one: all runs see the same tokens."""
    return torch.full_like(scores, -torch.inf).scatter(1, given[:, ids.shape[1]][:, None], 0.0)


def _logits(model: Any, cache: str = "dynamic", autocast: bool = False) -> list[dict[str, Tensor]]:
    """For each prompt, the logits of all steps."""
    found = list[dict[str, Tensor]]()
    settings = {"cache_implementation": cache, "use_cache": True, "do_sample": False, "output_logits": True}
    settings |= {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "return_dict_in_generate": True}
    for seed, length in enumerate(_PROMPTS):
        given = tokens(seed, 4, length + _NEW, vocab=125) + 3
        prompt = {"input_ids": given[:, :length], "attention_mask": torch.ones(4, length, dtype=torch.int64)}
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = model.generate(
                **prompt, **settings, logits_processor=[functools.partial(_chosen, given)]
            )
        assert torch.equal(result.sequences, given)
        found.append({str(step): logits for step, logits in enumerate(result.logits)})
    return found


_GENERATE = {f"{name}, whole": (name, _compile) for name in CASES if name != "detr"}
_GENERATE |= {
    f"{name}, decoding": (name, _compile_decoding) for name in ("qwen3", "gemma3", "mixtral, grouped_mm")
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("name", "compiled"), _GENERATE.values(), ids=_GENERATE)
def test_generation_with_a_static_cache_serves_prompts_of_any_length(name: str, compiled: Any) -> None:
    case, listed = make(name)
    # to a static cache, eager autocast fails to write: values in 16 bits beside keys in fp32
    exact = _logits(copy.deepcopy(listed.model).double().eval())
    theirs = _logits(listed.model.eval(), autocast=True)
    compiled(model := case.model.eval())
    with amp_fx.record() as recording:
        ours = _logits(model, "static")
    assert {node.dtype for plan in recording.plans for node in plan.nodes} >= {torch.bfloat16}
    for each, eager, true in zip(ours, theirs, exact, strict=True):
        assert relative_error(each, true) <= 1.05 * relative_error(eager, true)
