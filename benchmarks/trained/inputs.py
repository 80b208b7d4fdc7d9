"""Inputs that come inside of packages or are computed: pictures, voices, sentences, crystals. Nothing is downloaded."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: samples a second
RATE = 16000


def pictures() -> list[NDArray[np.uint8]]:
    """Two photographs of scikit-learn, ``[427, 640, 3]``."""
    from sklearn.datasets import load_sample_images

    return list(load_sample_images().images)


def crops(count: int, size: int, seed: int) -> Tensor:
    """Parts of the photographs, RGB from 0 to 255: ``[count, 3, size, size]``."""
    g, made = np.random.default_rng(seed), []
    sources = [torch.from_numpy(np.ascontiguousarray(each)).permute(2, 0, 1).float() for each in pictures()]
    for at in range(count):
        source = sources[at % len(sources)]
        side = int(min(source.shape[1:]) * g.uniform(0.25, 1))
        top, left = (int(g.integers(0, length - side + 1)) for length in source.shape[1:])
        part = source[None, :, top : top + side, left : left + side]
        made.append(torch.nn.functional.interpolate(part, size=(size, size), mode="bilinear", antialias=True))
    return torch.cat(made)


def voice(seconds: float, seed: int) -> NDArray[np.float32]:
    """A sung vowel: pulses with vibrato and a glide, through three formants, with a little noise."""
    lfilter: Any = importlib.import_module("scipy.signal").lfilter

    g = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    vibrato = 0.02 * np.sin(2 * np.pi * 5.5 * t)
    frequency = g.uniform(90, 330) * 2 ** (g.uniform(-0.4, 0.4) * t / seconds + vibrato)
    phase, wave = np.cumsum(frequency) / RATE, 0.02 * g.standard_normal(len(t))
    for harmonic in range(1, 40):
        tone = np.sin(2 * np.pi * harmonic * phase + g.uniform(0, 6)) / harmonic**1.2
        wave += (harmonic * frequency < 0.45 * RATE) * tone
    formants = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240))[seed % 3]
    for centre, width in zip(formants, (60, 90, 120), strict=True):
        r = np.exp(-np.pi * width / RATE)
        wave = lfilter([1 - r], [1, -2 * r * np.cos(2 * np.pi * centre / RATE), r * r], wave)
    return (0.5 * wave / np.abs(wave).max()).astype(np.float32)


def mel(wave: NDArray[np.float32], channels: int) -> Tensor:
    """Energies in mel bands, windows of 25 ms every 10 ms: ``[frames, channels]``."""
    window, hop = RATE // 40, RATE // 100
    frames = torch.from_numpy(wave).unfold(0, window, hop) * torch.hann_window(window)
    power = torch.fft.rfft(frames).abs().square()
    edges = torch.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), channels + 2)
    edges = 700 * (10 ** (edges / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, power.shape[1])
    rises = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falls = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    bands = torch.minimum(rises, falls).clamp(min=0) * 2 / (edges[2:] - edges[:-2])
    return power @ bands


def sentences() -> list[str]:
    """Paragraphs about data sets and first lines of documentation, in a random order, the same each time."""
    data: Any = importlib.import_module("sklearn.datasets")
    loads = (data.load_iris, data.load_wine, data.load_breast_cancer, data.load_diabetes, data.load_digits)
    texts = [text for load in loads for text in re.split(r"\n\s*\n", load().DESCR)]
    for name in ("json", "re", "random", "statistics", "datetime", "asyncio", "socket", "threading", "csv"):
        module = importlib.import_module(name)
        documented = (getattr(getattr(module, key), "__doc__", None) for key in sorted(dir(module)))
        texts += [text.split("\n\n")[0] for text in documented if isinstance(text, str)]
    flat = sorted({text for text in (re.sub(r"\s+", " ", text).strip() for text in texts) if len(text) > 40})
    random.Random(0).shuffle(flat)
    return flat


@dataclass(frozen=True)
class Crystal:
    """Atoms in a periodic cell, as far as CHGNet reads pymatgen's ``Structure``.

    Attributes:
        numbers: of the elements, for each atom.
        frac_coords: positions in units of the cell, ``[atoms, 3]``.
        lattice: has the cell as ``matrix``, ``[3, 3]``, in angstroms.
    """

    numbers: tuple[int, ...]
    frac_coords: NDArray[np.float64]
    lattice: SimpleNamespace

    composition = SimpleNamespace(formula="")
    sites = None

    @classmethod
    def rock_salt(cls, seed: int, repeats: int = 2) -> Crystal:
        """Cells of sodium chloride, each atom moved by about 0.1 angstroms."""
        g = np.random.default_rng(seed)
        corners = np.array([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) / 2
        cell = np.concatenate([corners, corners + np.array([0.5, 0, 0])])
        moved = [cell + shift for shift in np.ndindex(repeats, repeats, repeats)]
        length = 5.64 * repeats * g.uniform(0.97, 1.03)
        places = np.concatenate(moved) / repeats + g.normal(0, 0.1 / length, (8 * repeats**3, 3))
        return cls((11,) * 4 + (17,) * 4, places % 1, SimpleNamespace(matrix=length * np.eye(3)))

    def __len__(self) -> int:
        return len(self.frac_coords)

    def __iter__(self) -> Iterator[SimpleNamespace]:
        """Sites, of which the element is read."""
        elements = (SimpleNamespace(Z=self.numbers[at % len(self.numbers)]) for at in range(len(self)))
        return (SimpleNamespace(specie=element) for element in elements)

    def get_neighbor_list(self, r: float, **_: object) -> tuple[NDArray[np.int64], ...]:
        """Pairs of atoms nearer than ``r``: first, second, the second's cell, distance."""
        reach = int(np.ceil(r / self.lattice.matrix[0, 0]))
        images = np.array(list(np.ndindex(*(2 * reach + 1,) * 3))) - reach
        first, second = np.meshgrid(np.arange(len(self)), np.arange(len(self)), indexing="ij")
        found = []
        for image in images:
            apart = (self.frac_coords[second] + image - self.frac_coords[first]) @ self.lattice.matrix
            distance = np.linalg.norm(apart, axis=-1)
            one, other = np.nonzero((distance < r) & (distance > 1e-8))
            found.append((one, other, np.tile(image, (len(one), 1)), distance[one, other]))
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))
