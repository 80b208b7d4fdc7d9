"""What the long runs train: models, and data that packages bring along."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

Batch = tuple[Tensor, Tensor]

#: of the text of the standard library
_CONTEXT, _TEXT_BYTES, HELD_OUT_BYTES = 32, 4_000_000, 100_000

#: images and windows of a batch: small, as matmuls in fp16 are slow on a CPU without instructions for them
_IMAGES, _WINDOWS = 32, 8


@dataclass(frozen=True)
class Task:
    """One thing to learn."""

    #: a model with weights of the current random state; called with a batch it returns the loss
    make: Callable[[], nn.Module]
    #: of a step and a seed
    batch: Callable[[int, int], Batch]
    #: what the model has learned, on data that it was not trained on, and the name of that number
    measure: Callable[[nn.Module], float]
    measured: str
    #: of AdamW
    rate: float


class _Classifier(nn.Module):
    def logits(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(images), labels)


class ConvNet(_Classifier):
    """Three convolutions with BatchNorm; images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 2)):
            convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def logits(self, images: Tensor) -> Tensor:
        """Images: (batch, 1, 8, 8)."""
        return self.head(self.body(images).mean((2, 3)))


class ViT(_Classifier):
    """Two layers of attention over the 16 patches of 2 x 2."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def logits(self, images: Tensor) -> Tensor:
        """Images: (batch, 1, 8, 8)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(tokens)).mean(1))


class Digits:
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8; each fifth is held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        self.images = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.labels = torch.as_tensor(labels)
        self.is_held_out = torch.arange(len(labels)) % 5 == 0

    def batch(self, step: int, seed: int) -> Batch:
        """Images of the training part."""
        draw = torch.Generator().manual_seed(1_000_000 * seed + step)
        known = (~self.is_held_out).nonzero().flatten()
        chosen = known[torch.randint(len(known), (_IMAGES,), generator=draw)]
        return self.images[chosen], self.labels[chosen]

    def accuracy(self, model: nn.Module) -> float:
        """Share of the images that were held out; in fp32, whatever it was trained in."""
        if not isinstance(model, _Classifier):
            raise TypeError(f"accuracy is that of a classifier; got {type(model).__name__}.")
        with torch.no_grad():
            found = model.eval().logits(self.images[self.is_held_out]).argmax(1)
        model.train()
        return float((found == self.labels[self.is_held_out]).double().mean())


class Text:
    """The source code of Python's standard library, as bytes; the end is held out."""

    def __init__(self, context: int = _CONTEXT, windows: int = _WINDOWS) -> None:
        self.context, self.windows = context, windows
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
        self.bytes = torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8).long()

    def batch(self, step: int, seed: int) -> Batch:
        """Windows of the training part."""
        draw = torch.Generator().manual_seed(1_000_000 * seed + step)
        last = len(self.bytes) - HELD_OUT_BYTES - self.context - 1
        return self._windows(torch.randint(last, (self.windows,), generator=draw))

    def loss(self, model: Callable[[Tensor, Tensor], Tensor], windows: int = 256) -> float:
        """Mean over the held-out text, in nats per byte; without torch.compile in fp32, whatever it was trained in."""
        size = len(self.bytes)
        starts = torch.arange(size - HELD_OUT_BYTES, size - self.context - 1, self.context)
        with torch.no_grad():
            losses = [float(model(*self._windows(part))) for part in starts.split(windows)[:-1]]
        return sum(losses) / len(losses)

    def _windows(self, starts: Tensor) -> Batch:
        windows = self.bytes[starts[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _digits(model: Callable[[], nn.Module]) -> Task:
    data = Digits()
    return Task(model, data.batch, data.accuracy, "accuracy", 1e-3)


def _text() -> Task:
    data = Text()
    config = GPTConfig(vocab=256, context=_CONTEXT, layers=2, heads=4, width=64)
    return Task(lambda: GPT(config), data.batch, data.loss, "loss on held-out text", 1e-3)


#: name -> how to get it; data is read then
TASKS: dict[str, Callable[[], Task]] = {
    "digits_conv": lambda: _digits(ConvNet),
    "digits_vit": lambda: _digits(ViT),
    "text_gpt": _text,
}
