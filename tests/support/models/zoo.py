"""A zoo of small random models, as users write them: the real inputs of the model tests.

Every case is deterministic: weights from a fixed seed, dropout 0 (its random numbers would differ between
the arms that are compared), inputs from a seed. Widths and depths are as small as the structure allows,
because the time goes into compiling. Nothing is downloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import hugging_face
from support.models import dense_outputs
from support.models.small import Parts

Batch = dict[str, Tensor]
Outputs = Any


def _call_with_first(model: nn.Module, batch: Batch) -> Outputs:
    return model(next(iter(batch.values())))


@dataclass(frozen=True)
class Case:
    """One model with what it takes to run it."""

    model: nn.Module  # fp32, in training mode; copy it before use
    inputs: Callable[[int], Batch]  # from a seed
    loss_fn: Callable[[Outputs, Batch], Tensor]  # a scalar; called outside the compiled code
    # submodules to compile instead of the whole model (the two networks of a GAN)
    parts: tuple[str, ...] = ()
    run: Callable[[nn.Module, Batch], Outputs] = lambda model, batch: model(**batch)
    dynamo: Mapping[str, Any] = field(default_factory=dict)  # settings of ``torch._dynamo.config``
    low_in_eval: bool = True  # False where autocast itself computes in fp32 in evaluation


CASES: dict[str, Callable[[], Case]] = {}


def make(name: str) -> Case:
    """Builds a case of ``CASES``; the same weights each time, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CASES[name]()


def _case(build: Callable[..., Case]) -> Callable[..., Case]:
    CASES[build.__name__] = build
    return build


def _returned_loss(outputs: Outputs, batch: Batch) -> Tensor:
    """Hugging Face models compute their loss inside, from ``labels``."""
    return outputs.loss


def _classification_loss(outputs: Outputs, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["target"])


def tokens(seed: int, *shape: int, vocab: int = 128) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _images(seed: int) -> Batch:
    return {"pixel_values": normal(seed, 4, 3, 32, 32), "labels": tokens(seed, 4, vocab=4)}


def _padded_tokens(*labels: int, vocab: int = 128, ahead: int = 1) -> Callable[[int], Batch]:
    """Batches of sentences of different lengths, and labels of a shape."""

    def inputs(seed: int) -> Batch:
        batch = {"input_ids": tokens(seed, 4, 32), "attention_mask": hugging_face.padding_mask(4, 32)}
        return {**batch, "labels": tokens(seed + ahead, *labels, vocab=vocab)}

    return inputs


def _classified(*shape: int) -> Callable[[int], Batch]:
    """Batches of random numbers, each of ten classes."""
    return lambda seed: {"input": normal(seed, *shape), "target": tokens(seed, shape[0], vocab=10)}


# --- Hugging Face transformers: tiny configurations, random weights. ---

_SIZES = {"width": 64, "hidden": 128, "vocab": 128}


@_case
def bert(attention: str = "sdpa") -> Case:
    """Encoder with a padding mask."""
    model = hugging_face.bert(layers=2, heads=2, length=64, attention=attention, **_SIZES)
    return Case(model.train(), _padded_tokens(4, vocab=4), _returned_loss)


# attention spelled out: two matmuls, an additive mask, a softmax
CASES["bert_eager_attention"] = functools.partial(bert, "eager")


@_case
def gpt2() -> Case:
    """Decoder whose linears are ``addmm`` (Conv1D) and whose head is tied to the embedding."""
    model = hugging_face.gpt2(layers=2, width=64, heads=2, vocab=128, length=64)

    def inputs(seed: int) -> Batch:
        given = tokens(seed, 4, 32)
        return {"input_ids": given, "labels": given}

    return Case(model.train(), inputs, _returned_loss)


@_case
def llama(attention: str = "sdpa") -> Case:
    """Decoder with RMS norms, rotary positions and grouped-query attention."""
    model = hugging_face.llama(layers=2, heads=4, kv_heads=2, length=64, attention=attention, **_SIZES)
    return Case(model.train(), _padded_tokens(4, 32, ahead=0), _returned_loss)


# attention spelled out: the softmax asks for fp32 itself
CASES["llama_eager_attention"] = functools.partial(llama, "eager")


@_case
def t5() -> Case:
    """Encoder, decoder with cross attention, relative position bias, norms that widen to fp32 themselves."""
    model = hugging_face.t5(layers=1, width=64, heads=2, head_size=32, hidden=128, vocab=128)
    return Case(model.train(), _padded_tokens(4, 16), _returned_loss)


@_case
def resnet() -> Case:
    """Residual convolutions with BatchNorm: training mode updates the running statistics."""
    model = hugging_face.resnet(width=16, hidden=[16, 32], depths=[1, 1])
    return Case(model.train(), _images, _returned_loss)


@_case
def vit() -> Case:
    """Patches by convolution, then an encoder."""
    model = hugging_face.vit(layers=2, width=64, heads=2, hidden=128, image=32, patch=8)
    return Case(model.train(), _images, _returned_loss)


# --- Plain torch.nn ---


@_case
def mlp() -> Case:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return Case(model, _classified(32, 64), _classification_loss, run=_call_with_first)


@_case
def conv_net() -> Case:
    """In-place ReLUs on BatchNorm outputs, max pooling, a flattened head."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return Case(model, _classified(8, 3, 16, 16), _classification_loss, run=_call_with_first)


@_case
def transformer_layer() -> Case:
    """``nn.TransformerEncoderLayer`` under a causal mask.

    In evaluation it is one fused op, ``aten._transformer_encoder_layer_fwd``, which autocast does not list.
    """
    layer = nn.TransformerEncoderLayer(64, nhead=2, dim_feedforward=128, dropout=0.0, batch_first=True)

    def inputs(seed: int) -> Batch:
        return {"src": normal(seed, 4, 16, 64), "target": normal(seed + 1, 4, 16, 64)}

    def run(model: nn.Module, batch: Batch) -> Outputs:
        mask = nn.Transformer.generate_square_subsequent_mask(16, dtype=batch["src"].dtype)
        return model(batch["src"], src_mask=mask, is_causal=True)

    def loss_fn(outputs: Outputs, batch: Batch) -> Tensor:
        return F.mse_loss(outputs, batch["target"])

    return Case(layer, inputs, loss_fn, run=run, low_in_eval=False)


@_case
def lstm() -> Case:
    """Embedding, recurrence, head. Unless told to trace it, Dynamo leaves an ``nn.LSTM`` in training to eager."""
    model = Parts(
        lambda m, tokens: m.head(m.lstm(m.embedding(tokens))[0]),
        embedding=nn.Embedding(128, 64),
        lstm=nn.LSTM(64, 64, batch_first=True),
        head=nn.Linear(64, 10),
    )

    def inputs(seed: int) -> Batch:
        return {"tokens": tokens(seed, 8, 4), "target": tokens(seed + 1, 8, 4, vocab=10)}

    def loss_fn(outputs: Outputs, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["target"].flatten())

    return Case(model, inputs, loss_fn, run=_call_with_first, dynamo={"allow_rnn": True})


@_case
def gan() -> Case:
    """Both losses of one step: the discriminator runs three times, once frozen for the generator's loss."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 32, 4, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(32, 1),
    )
    networks = {"generator": generator, "discriminator": discriminator}

    def inputs(seed: int) -> Batch:
        return {"noise": normal(seed, 8, 32, 1, 1), "real": normal(seed + 1, 8, 3, 8, 8).tanh()}

    def run(model: nn.Module, batch: Batch) -> Outputs:
        generator = model.get_submodule("generator")
        discriminator = model.get_submodule("discriminator")
        fake = generator(batch["noise"])
        outputs = {"on_real": discriminator(batch["real"]), "on_fake": discriminator(fake.detach())}
        discriminator.requires_grad_(False)
        outputs["for_generator"] = discriminator(fake)
        discriminator.requires_grad_(True)
        return outputs

    def loss_fn(outputs: Outputs, batch: Batch) -> Tensor:
        bce = F.binary_cross_entropy_with_logits
        real, fake = torch.ones_like(outputs["on_real"]), torch.zeros_like(outputs["on_fake"])
        discriminator_loss = bce(outputs["on_real"], real) + bce(outputs["on_fake"], fake)
        return discriminator_loss + bce(outputs["for_generator"], real)

    return Case(nn.ModuleDict(networks), inputs, loss_fn, parts=tuple(networks), run=run)


# --- dense results: see dense_outputs.py ---


def _dense(build: Callable[[], nn.Module], *shape: int) -> Callable[[], Case]:
    """A network and random numbers; the loss is the distance of its results, which may be several, from others."""

    def loss_fn(outputs: Outputs, batch: Batch) -> Tensor:
        found = outputs if isinstance(outputs, list) else [outputs]
        targets = [normal(at, *each.shape).to(each.dtype) for at, each in enumerate(found)]
        return torch.stack([F.mse_loss(*pair) for pair in zip(found, targets, strict=True)]).sum()

    return lambda: Case(build(), lambda seed: {"x": normal(seed, *shape)}, loss_fn, run=_call_with_first)


CASES |= {
    "decoder": _dense(dense_outputs.decoder, 2, 4, 8, 8),
    "decoder_bilinear": _dense(functools.partial(dense_outputs.decoder, "bilinear", norm=True), 2, 4, 8, 8),
    "u_net": _dense(dense_outputs.UNet, 2, 3, 16, 16),
    "segmentation": _dense(dense_outputs.Segmentation, 2, 3, 32, 32),
    "depth": _dense(dense_outputs.Depth, 2, 3, 16, 16),
    "super_resolution": _dense(dense_outputs.SuperResolution, 2, 3, 8, 8),
    "pyramid": _dense(dense_outputs.Pyramid, 2, 3, 16, 16),
    "volume": _dense(dense_outputs.Volume, 2, 1, 8, 8, 8),
    "waveform": _dense(dense_outputs.Waveform, 2, 1, 64),
}
