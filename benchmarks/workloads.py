"""The models that are measured, at sizes where activations outweigh weights. Nothing is downloaded.

Every workload computes its loss inside the compiled function or returns fp32: no arm alone has to widen its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.llama import Llama, LlamaDecoder, RMSNormBlock
from examples import hugging_face
from examples.gpt import GPT, GPTConfig

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, fp32 and in training mode, and its keyword arguments: it returns the loss or an output that has one.

    Attributes:
        calibration: batches for scales and sensitivities; none: ``batch``.
        held_out: batches by which results are judged, of ``batch``'s sizes; none: ``batch``.
        measure: the measure of the model's task, from the results in fp64 and those that are judged, by name.
        is_whole: Dynamo makes one graph of it.
    """

    name: str
    model: nn.Module
    batch: Batch
    calibration: Sequence[Batch] = ()
    held_out: Sequence[Batch] = ()
    measure: Callable[[Tensor, Tensor], Mapping[str, float]] | None = None
    is_whole: bool = True


WORKLOADS: dict[str, Callable[[], Workload]] = {}

OF_TRANSFORMERS = ("bert", "gpt2", "llama", "llama_eager", "resnet", "t5", "vit")

Build = Callable[..., tuple[nn.Module, Batch]]
BuildWhole = Callable[..., Workload]


def make(name: str) -> Workload:
    """Builds a workload of ``WORKLOADS``."""
    return WORKLOADS[name]()


def build_workload(name: str, build: Build | BuildWhole, **sizes: int) -> Workload:
    """Builds a model of any size; the same weights each time, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build(**sizes)
    if isinstance(made, Workload):
        return replace(made, name=name)
    model, batch = made
    return Workload(name, model.train(), batch)


def _workload(build: Build) -> Build:
    WORKLOADS[build.__name__] = functools.partial(build_workload, build.__name__, build)
    return build


def _tokens(*shape: int, vocab: int) -> Tensor:
    return torch.randint(vocab, shape)


def _shifted(tokens: Tensor) -> Batch:
    """Each token and the next one."""
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


# --- The activation-heavy rows: 4 layers, width 256, 8 x 512 tokens ---


@_workload
def gpt_512(
    batch: int = 8, length: int = 512, layers: int = 4, width: int = 256, vocab: int = 1024
) -> tuple[nn.Module, Batch]:
    """LayerNorm, GELU, fused attention, tied head."""
    config = GPTConfig(vocab=vocab, context=length, layers=layers, heads=width // 64, width=width)
    return GPT(config), _shifted(_tokens(batch, length + 1, vocab=vocab))


def llama_decode(
    batch: int, context: int, layers: int, width: int, hidden: int, vocab: int
) -> tuple[nn.Module, Batch]:
    """A decode step: weights outweigh everything else."""
    heads = width // 128
    model = LlamaDecoder(vocab, layers, width, heads=width // 64, kv_heads=heads, hidden=hidden)
    past = (layers, batch, heads, context, 64)
    return model, {
        "tokens": _tokens(batch, 1, vocab=vocab),
        "keys": torch.randn(past),
        "values": torch.randn(past),
    }


@_workload
def llama_512(
    batch: int = 8,
    length: int = 512,
    layers: int = 4,
    width: int = 256,
    hidden: int = 688,
    vocab: int = 1024,
    head: int = 64,
    groups: int = 2,
) -> tuple[nn.Module, Batch]:
    """RMS norms, rotary positions, SwiGLU, attention whose queries share keys in groups of so many."""
    tokens = _tokens(batch, length + 1, vocab=vocab)
    heads = width // head
    model = Llama(vocab, layers, width, heads, kv_heads=heads // groups, hidden=hidden)
    return model, _shifted(tokens)


# --- Hugging Face transformers. Imported on use: it takes seconds. ---


@_workload
def bert(
    batch: int = 8, length: int = 128, layers: int = 2, width: int = 256, vocab: int = 512
) -> tuple[nn.Module, Batch]:
    """Encoder with a padding mask."""
    model = hugging_face.bert(
        layers=layers, width=width, heads=width // 64, hidden=4 * width, vocab=vocab, length=length
    )
    return model, {
        "input_ids": _tokens(batch, length, vocab=vocab),
        "attention_mask": hugging_face.padding_mask(batch, length),
        "labels": _tokens(batch, vocab=4),
    }


@_workload
def gpt2(
    batch: int = 8, length: int = 128, layers: int = 2, width: int = 256, vocab: int = 512
) -> tuple[nn.Module, Batch]:
    """Decoder whose linears are ``addmm`` (Conv1D) and whose head is tied to the embedding."""
    model = hugging_face.gpt2(layers=layers, width=width, heads=width // 64, vocab=vocab, length=length)
    tokens = _tokens(batch, length, vocab=vocab)
    return model, {"input_ids": tokens, "labels": tokens}


@_workload
def llama(attention: str = "sdpa") -> tuple[nn.Module, Batch]:
    """Decoder with RMS norms, rotary positions and grouped-query attention."""
    model = hugging_face.llama(
        layers=2, width=256, heads=4, kv_heads=2, hidden=688, vocab=512, length=128, attention=attention
    )
    tokens = _tokens(8, 128, vocab=512)
    return model, {"input_ids": tokens, "attention_mask": hugging_face.padding_mask(8, 128), "labels": tokens}


@_workload
def llama_eager() -> tuple[nn.Module, Batch]:
    """The same with attention spelled out: the softmax asks for fp32 itself."""
    return llama("eager")


@_workload
def t5(
    batch: int = 8, length: int = 128, layers: int = 2, width: int = 256, vocab: int = 512
) -> tuple[nn.Module, Batch]:
    """Encoder, decoder with cross attention, relative position bias, norms that widen to fp32 themselves."""
    model = hugging_face.t5(
        layers=layers, width=width, heads=width // 64, head_size=64, hidden=4 * width, vocab=vocab
    )
    return model, {
        "input_ids": _tokens(batch, length, vocab=vocab),
        "attention_mask": hugging_face.padding_mask(batch, length),
        "labels": _tokens(batch, length // 2, vocab=vocab),
    }


@_workload
def resnet(
    batch: int = 8, image: int = 64, width: int = 64, stages: int = 3, layers: int = 2
) -> tuple[nn.Module, Batch]:
    """Residual convolutions with BatchNorm: training mode updates the running statistics."""
    hidden = [width * 2**stage for stage in range(stages)]
    model = hugging_face.resnet(width=width, hidden=hidden, depths=[layers] * stages)
    return model, {"pixel_values": torch.randn(batch, 3, image, image), "labels": _tokens(batch, vocab=4)}


@_workload
def vit(
    batch: int = 8, image: int = 64, patch: int = 8, layers: int = 2, width: int = 256
) -> tuple[nn.Module, Batch]:
    """Patches by convolution, then an encoder."""
    model = hugging_face.vit(
        layers=layers, width=width, heads=width // 64, hidden=4 * width, image=image, patch=patch
    )
    return model, {"pixel_values": torch.randn(batch, 3, image, image), "labels": _tokens(batch, vocab=4)}


def convnext(batch: int, image: int, width: int) -> tuple[nn.Module, Batch]:
    """Depthwise convolutions and linears over the channels, in four stages."""
    model = hugging_face.convnext(hidden=[width * 2**stage for stage in range(4)], depths=[2] * 4)
    return model, {"pixel_values": torch.randn(batch, 3, image, image), "labels": _tokens(batch, vocab=4)}


class _Served(nn.Module):
    """A model of transformers that returns its logits, in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).logits.float()


def served(build: Build) -> Build:
    """Without labels, as what is served: the model returns logits."""

    def without_labels(**sizes: int) -> tuple[nn.Module, Batch]:
        model, batch = build(**sizes)
        return _Served(model), {name: value for name, value in batch.items() if name != "labels"}

    return without_labels


# --- Named pieces ---


class _NaiveAttention(nn.Module):
    """Two matmuls, a scale, a mask and a softmax: no fused kernel hides what is kept of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(mask, float("-inf")).softmax(dim=-1)
        attended = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return F.mse_loss(self.out(attended), target)


@_workload
def naive_attention() -> tuple[nn.Module, Batch]:
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)
    x, target = torch.randn(4, 256, 256), torch.randn(4, 256, 256)
    return _NaiveAttention(256, 4), {"x": x, "mask": mask, "target": target}


class _Regression(nn.Module):
    """Layers in a row, with a mean squared error at the end if there is a target."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = self.layers(x)
        return y.float() if target is None else F.mse_loss(y, target)


@_workload
def rms_norm() -> tuple[nn.Module, Batch]:
    """The block of pytorch#188955: its casts have several readers and become kernels of their own."""
    x, target = torch.randn(8, 256, 256), torch.randn(8, 256, 256)
    return _Regression(RMSNormBlock(256), RMSNormBlock(256)), {"x": x, "target": target}


# --- Shapes of other fields ---


def mlp(batch: int, width: int, layers: int = 3) -> tuple[nn.Module, Batch]:
    """Square linears with ReLUs in between: torch for R's tutorial on mixed precision."""
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    parts = [part for pair in pairs for part in pair][:-1]
    return _Regression(*parts), {"x": torch.randn(batch, width), "target": torch.randn(batch, width)}


class _Linear(nn.Module):
    """A linear whose three matmuls all run: a norm before it wants a gradient, and a residual sum follows."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inner)
        self.linear = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        return (stream + self.linear(self.norm(x))).float().square().mean()


def linear(tokens: int, inner: int, outer: int) -> tuple[nn.Module, Batch]:
    """One linear in training: its forward, and the gradients of its input and its weight."""
    return _Linear(inner, outer), {"x": torch.randn(tokens, inner), "stream": torch.randn(tokens, outer)}


def linears(batch: int, width: int, layers: int = 4) -> tuple[nn.Module, Batch]:
    """Linears, each with a ReLU, and no loss: inference whose cost at small batches is the weights."""
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return _Regression(*(part for pair in pairs for part in pair)), {"x": torch.randn(batch, width)}


class _GAN(nn.Module):
    """Both losses of a DCGAN step; the discriminator's parameters get no gradient from the generator's."""

    def __init__(self, width: int, noise: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(noise, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4),
            nn.Flatten(),
        )

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise)
        fixed = {name: value.detach() for name, value in self.discriminator.named_parameters()}
        judged = torch.func.functional_call(self.discriminator, fixed, (fake,))
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        return F.softplus(-on_real).mean() + F.softplus(on_fake).mean() + F.softplus(-judged).mean()


def gan(batch: int, width: int, noise: int = 64) -> tuple[nn.Module, Batch]:
    """Convolutions and transposed ones, on images of 16 x 16."""
    real = torch.randn(batch, 3, 16, 16).tanh()
    return _GAN(width, noise), {"noise": torch.randn(batch, noise, 1, 1), "real": real}
