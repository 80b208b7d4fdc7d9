"""Llama 3 8B on one H100, counted on a machine that has neither the card nor the memory.

    python -m examples.llama_8b          # every row of the table, some minutes each on two cores, 1.5 GiB
    amp-fx explain examples.llama_8b:training --target cuda:h100
    amp-fx draw examples.llama_8b:training --target cuda:h100 -o llama.beside.svg

The model is on the ``meta`` device, where weights have no data. Bytes are what all kernels of a step read and write, by
Inductor's estimate. It needs transformers and Triton.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

import amp_fx

TARGET = "cuda:h100"
TOKENS = (2048, 8192)


def training(tokens: int = TOKENS[0]) -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    """A training step: one sequence, loss included."""
    with torch.device("meta"):
        ids = torch.empty(1, tokens, dtype=torch.int64)
    return _model(), (), {"input_ids": ids, "labels": ids}


class _Step(nn.Module):
    """One token after a context, whose keys and values are given: (layers, 1, heads, context, width of a head)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _model()

    def forward(self, token: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache.update(key, value, layer)
        return self.model(token, past_key_values=cache, use_cache=True).logits


def decoding(context: int = TOKENS[0]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A decoding step: one token after so many, without gradients."""
    with torch.device("meta"):
        token, past = torch.empty(1, 1, dtype=torch.int64), torch.empty(32, 1, 8, context, 128)
    return _Step().requires_grad_(False).eval(), (token, past, past.clone())


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def main() -> None:
    """Prints a row for each step: bytes and cast kernels under autocast, amp_fx, and policy fast."""
    parser = argparse.ArgumentParser(description="Count the steps of Llama 3 8B on an H100.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N")
    parser.add_argument(
        "--steps", nargs="+", choices=("training", "decoding"), default=("training", "decoding")
    )
    args = parser.parse_args()
    print(
        f"{'step':10}{'tokens':>8}{'autocast GB':>14}{'amp_fx':>9}{'fast':>9}{'cast kernels':>22}", flush=True
    )
    for step in args.steps:
        for tokens in args.tokens:
            _row(step, tokens)


def _row(step: str, tokens: int) -> None:
    costs = {}
    for policy in ("autocast", "fast"):
        start = time.monotonic()
        made = training(tokens) if step == "training" else decoding(tokens)
        model, batch, *named = made
        with torch.inference_mode(step == "decoding"):
            report = amp_fx.explain(
                model, *batch, options={"policy": policy}, target=TARGET, **(named[0] if named else {})
            )
        print(f"{step}, {tokens} tokens, {policy}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        costs["amp_fx" if policy == "autocast" else policy] = report.costs["amp_fx"]
        costs["autocast"] = report.costs["torch.autocast"]
    moved = [(costs[name].moved or 0) / 1e9 for name in ("autocast", "amp_fx", "fast")]
    kernels = ", ".join(str(costs[name].kernels) for name in ("autocast", "amp_fx", "fast"))
    ratios = "".join(f"{each / moved[0]:>9.3f}" for each in moved[1:])
    print(f"{step:10}{tokens:>8}{moved[0]:>14.1f}{ratios}{kernels:>22}", flush=True)


if __name__ == "__main__":
    main()
