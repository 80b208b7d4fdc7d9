"""Imports point one way: viz -> plan <- backend -> passes -> policy, plan; private torch in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Private by their underscore only: pytree is what torch.export documents for nested values, and the others
#: are reached by attribute from `import torch` as users do.
ALLOWED_PRIVATE = {"torch.utils._pytree"}

#: What a layer may not import.
FORBIDDEN = {
    "amp_fx.passes": {
        "amp_fx.backend",
        "amp_fx.fallback",
        "amp_fx.options",
        "amp_fx.recording",
        "amp_fx.viz",
    },
    "amp_fx.policy": {"amp_fx.backend", "amp_fx.passes", "amp_fx.plan", "amp_fx.capture", "amp_fx.viz"},
    "amp_fx.plan": {"amp_fx.backend", "amp_fx.passes", "amp_fx.options", "amp_fx.viz"},
    "amp_fx.capture": {"amp_fx.backend", "amp_fx.passes", "amp_fx.options", "amp_fx.plan", "amp_fx.viz"},
    "amp_fx.graph": {"amp_fx.backend", "amp_fx.passes", "amp_fx.capture", "amp_fx.plan", "amp_fx.viz"},
    "amp_fx.backend": {"amp_fx.viz"},
    "amp_fx.viz": {"amp_fx.backend", "amp_fx.passes", "amp_fx.fallback", "amp_fx.capture"},
    "amp_fx.errors": {"amp_fx"},
    "amp_fx._torch": {"amp_fx"},
}
for _name in ("scaler", "weights", "exporting", "explaining", "histograms", "report"):
    FORBIDDEN["amp_fx.passes"].add(f"amp_fx.{_name}")


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the installed package with its file."""
    for folder, package in (
        (ROOT / "amp_fx", "amp_fx"),
        (ROOT / "passes", "amp_fx.passes"),
        (ROOT / "viz", "amp_fx.viz"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            yield name, path


def imports(name: str, path: Path) -> set[str]:
    """What a file imports, relative names resolved: ``amp_fx.plan.Plan`` for a from-import."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


MODULES = dict(sources())


def inside(imported: str, module: str) -> bool:
    return imported == module or imported.startswith(f"{module}.")


def test_the_walk_sees_the_package() -> None:
    assert {
        "amp_fx",
        "amp_fx.backend",
        "amp_fx._torch",
        "amp_fx.policy.cpu",
        "amp_fx.passes.place",
    } <= MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    wrong = {
        imported
        for layer, forbidden in FORBIDDEN.items()
        if inside(name, layer)
        for imported in imports(name, MODULES[name])
        if any(inside(imported, module) for module in forbidden)
    }
    assert not wrong


@pytest.mark.parametrize("name", MODULES)
def test_private_torch_is_imported_in_one_module(name: str) -> None:
    if name == "amp_fx._torch":
        return
    private = {
        imported
        for imported in imports(name, MODULES[name])
        if imported.partition(".")[0] == "torch"
        and any(part.startswith("_") for part in imported.split("."))
        and not any(inside(imported, module) for module in ALLOWED_PRIVATE)
    }
    # experimental is private by its documentation
    private |= {i for i in imports(name, MODULES[name]) if inside(i, "torch.fx.experimental")}
    assert not private


@pytest.mark.parametrize("name", MODULES)
def test_nobody_imports_the_source_folders_by_their_own_names(name: str) -> None:
    assert not any(inside(i, "passes") or inside(i, "viz") for i in imports(name, MODULES[name]))
