"""Small networks whose result is dense: images, masks, depths, volumes, waveforms; and classifiers as timm has them.

What they share is what transformers and classifiers lack: convolutions after an interpolation, a pixel shuffle or a
transposed convolution, maps of several sizes that are added or joined, and convolutions of one and three dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv(inputs: int, outputs: int, size: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU in place."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def decoder(mode: str = "nearest", norm: bool = False) -> nn.Module:
    """The end of a VAE: a convolution after each interpolation."""
    norms = [nn.GroupNorm(4, 32)] if norm else []
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1),
        nn.Upsample(scale_factor=2, mode=mode),
        nn.Conv2d(32, 32, 3, padding=1),
        *norms,
        nn.ReLU(),
        nn.Conv2d(32, 3, 3, padding=1),
    )


class UNet(nn.Module):
    """Down twice, up twice by interpolation, what was of a size before is joined to it."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.first, self.down = _conv(3, width), _conv(width, 2 * width, stride=2)
        self.deepest = _conv(2 * width, 4 * width, stride=2)
        self.up1, self.up2 = _conv(6 * width, 2 * width), _conv(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.down(fine)
        y = F.interpolate(self.deepest(coarse), scale_factor=2, mode="bilinear", align_corners=False)
        y = F.interpolate(self.up1(torch.cat((y, coarse), 1)), scale_factor=2, mode="nearest")
        return self.head(self.up2(torch.cat((y, fine), 1)))


class Segmentation(nn.Module):
    """As DeepLab: dilated convolutions and a pooled map beside each other, back to the size of the image."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width, stride=2), _conv(width, width, stride=2))
        self.branches = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=rate, dilation=rate) for rate in (1, 2, 3)
        )
        self.pooled, self.project = nn.Conv2d(width, width, 1), _conv(4 * width, width, 1)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        whole = F.relu(self.pooled(F.adaptive_avg_pool2d(y, 1))).expand(-1, -1, *y.shape[2:])
        y = self.project(torch.cat([*(branch(y) for branch in self.branches), whole], 1))
        return F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear", align_corners=False)


class Depth(nn.Module):
    """Maps of two sizes are added after convolutions; depth is a sigmoid of what is interpolated bicubically."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fine, self.coarse = _conv(3, width, stride=2), _conv(width, 2 * width, stride=2)
        self.side, self.inner = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(2 * width, width, 1)
        self.fuse, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = F.interpolate(
            self.inner(self.coarse(fine)), scale_factor=2, mode="bilinear", align_corners=True
        )
        y = F.relu(self.fuse(F.relu(self.side(fine)) + coarse))
        return self.head(F.interpolate(y, scale_factor=2, mode="bicubic")).sigmoid()


class SuperResolution(nn.Module):
    """Residual blocks, a pixel shuffle, and the image itself, enlarged, added."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(2)
        )
        self.up = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        return self.last(self.up(y)) + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """Maps of three sizes; each gets the next coarser one, enlarged; each has a head of its own weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stages = nn.ModuleList((_conv(3, width, stride=2), _conv(width, width, stride=2)))
        self.coarsest = _conv(width, width, stride=2)
        self.sides = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        for stage in (*self.stages, self.coarsest):
            x = stage(x)
            maps.append(x)
        merged = self.sides[2](maps[2])
        found = [self.head(self.smooth[2](merged))]
        for level in (1, 0):
            merged = self.sides[level](maps[level]) + F.interpolate(merged, scale_factor=2, mode="nearest")
            found.append(self.head(self.smooth[level](merged)))
        return found


class Volume(nn.Module):
    """A U-Net of volumes: strided convolutions, trilinear interpolation, a joined map."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width, affine=True)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.up, self.head = nn.Conv3d(3 * width, width, 3, padding=1), nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.leaky_relu(self.norm(self.first(x)))
        deep = F.interpolate(F.relu(self.down(fine)), scale_factor=2, mode="trilinear", align_corners=False)
        return self.head(F.relu(self.up(torch.cat((deep, fine), 1))))


class Waveform(nn.Module):
    """As an audio codec: strided convolutions, dilated ones in between, transposed ones back; snake activations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.down = nn.Conv1d(1, width, 7, padding=3), nn.Conv1d(width, 2 * width, 4, 2, 1)
        self.middle = nn.ModuleList(
            nn.Conv1d(2 * width, 2 * width, 3, padding=rate, dilation=rate) for rate in (1, 3)
        )
        self.up, self.last = nn.ConvTranspose1d(2 * width, width, 4, 2, 1), nn.Conv1d(width, 1, 7, padding=3)
        self.rate = nn.Parameter(torch.ones(1, 2 * width, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.elu(self.first(x)))
        for conv in self.middle:
            y = y + conv(y + (self.rate * y).sin().square() / (self.rate + 1e-9))
        return self.last(F.elu(self.up(y))).tanh()


# --- classifiers as timm has them ---


class Classifier(nn.Module):
    """A stem, blocks, the mean of their map, a head."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.Sequential(*blocks), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Dense(nn.Module):
    """As DenseNet: what a convolution finds is joined to what it was given."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(F.relu(self.norm(x)))), 1)


class SqueezeExcite(nn.Module):
    """As EfficientNet and MobileNetV3: a depthwise convolution whose channels are weighed by their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.depth = _conv(width, 2 * width, 1), _conv(2 * width, 2 * width, groups=2 * width)
        self.reduce, self.excite = nn.Conv2d(2 * width, 8, 1), nn.Conv2d(8, 2 * width, 1)
        self.project = nn.Sequential(nn.Conv2d(2 * width, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        weight = self.excite(F.silu(self.reduce(y.mean((2, 3), keepdim=True))))
        return x + self.project(y * F.hardsigmoid(weight))


class Shuffle(nn.Module):
    """As ShuffleNet: one half of the channels goes through, the other is convolved, then they are mixed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            _conv(half, half, 1), _conv(half, half, groups=half), _conv(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return F.channel_shuffle(torch.cat((left, self.branch(right)), 1), 2)


class Inception(nn.Module):
    """Kernels of several sizes and a pool side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 4
        self.one, self.three = _conv(width, part, 1), nn.Sequential(_conv(width, part, 1), _conv(part, part))
        self.five, self.pool = (
            nn.Sequential(_conv(width, part, 1), _conv(part, part, 5)),
            _conv(width, part, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, 1, 1)
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pool(pooled)), 1)


class ConvMixer(nn.Module):
    """A depthwise convolution with a residual, then a pointwise one; GELU before each BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth, self.point = (
            nn.Conv2d(width, width, 5, padding=2, groups=width),
            nn.Conv2d(width, width, 1),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(F.gelu(self.depth(x)))
        return self.norm2(F.gelu(self.point(x)))


class ChannelAttention(nn.Module):
    """As XCiT and Restormer: attention between channels, whose queries and keys have length one."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.ones(heads, 1, 1))
        self.norm, self.qkv = nn.GroupNorm(1, width), nn.Conv2d(width, 3 * width, 1)
        self.local, self.out = (
            nn.Conv2d(3 * width, 3 * width, 3, padding=1, groups=3 * width),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.local(self.qkv(self.norm(x))).chunk(3, 1)
        q, k, v = (each.unflatten(1, (self.heads, -1)).flatten(3) for each in (q, k, v))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.scale).softmax(-1)
        return x + self.out((weights @ v).flatten(1, 2).unflatten(2, x.shape[2:]))


class Mixer(nn.Module):
    """As MLP-Mixer: linears over patches, then over channels, of a map."""

    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, patches), nn.GELU(), nn.Linear(patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        y = y + self.patches(self.norm1(y).transpose(1, 2)).transpose(1, 2)
        y = y + self.channels(self.norm2(y))
        return y.transpose(1, 2).unflatten(2, x.shape[2:])


def classifier(block: str, width: int = 32, depth: int = 2) -> Classifier:
    """One of ten classes of images 32 x 32, by blocks of a kind."""
    stem = nn.Sequential(nn.Conv2d(3, width, 4, 4, bias=False), nn.BatchNorm2d(width))
    if block == "dense":
        return Classifier(stem, [Dense(width + 16 * at, 16) for at in range(depth)], width + 16 * depth)
    if block == "mixer":
        return Classifier(stem, [Mixer(width, 64) for _ in range(depth)], width)
    kinds = {
        "squeeze_excite": SqueezeExcite,
        "shuffle": Shuffle,
        "inception": Inception,
        "conv_mixer": ConvMixer,
        "channel_attention": ChannelAttention,
    }
    return Classifier(stem, [kinds[block](width) for _ in range(depth)], width)
