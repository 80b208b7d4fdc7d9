"""Imports go down one table of floors; files form no cycle; private torch is imported through doors."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_fx.compiler.compiling import KEYED_ROOMS

ROOT = Path(__file__).parents[2]

#: The house from the ground up. A room may import from lower floors and from itself, not from its own floor's others.
FLOORS = (
    ("amp_fx.runtime.state",),
    ("amp_fx._torch", "amp_fx.errors"),
    (
        "amp_fx.compiler.notices",
        "amp_fx.instruments.batches",
        "amp_fx.instruments.progress",
        "amp_fx.precision.policy",
    ),
    ("amp_fx.graphs", "amp_fx.instruments.step"),
    ("amp_fx.precision.plans",),
    ("amp_fx.precision.placement", "amp_fx.runtime.weights", "amp_fx.runtime.widened", "amp_fx.viz"),
    (
        "amp_fx.compiler.option_values",
        "amp_fx.instruments.environment",
        "amp_fx.instruments.targets",
        "amp_fx.passes",
    ),
    ("amp_fx.compiler.settings", "amp_fx.runtime.scaling"),
    ("amp_fx.compiler",),
    ("amp_fx.exporting",),
    ("amp_fx.instruments.reports", "amp_fx.integrations"),
    ("amp_fx.instruments.calibration",),
    ("amp_fx.instruments.benching", "amp_fx.instruments.comparison"),
    ("amp_fx",),
    ("amp_fx.cli",),
    ("amp_fx.__main__",),
)

#: Private by their underscore only: pytree is what torch.export documents for nested values, and the others
#: are reached by attribute from `import torch` as users do.
ALLOWED_PRIVATE = {"torch.utils._pytree"}

#: The doors, a folder and a file: all that amp_fx needs, and what stands for a GPU that is not there.
DOORS = {"amp_fx._torch", "amp_fx.instruments.targets._torch"}


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the installed package with its file."""
    for package in ("amp_fx", "amp_fx.passes", "amp_fx.viz"):
        folder = ROOT / package.rpartition(".")[2]
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


@functools.cache
def imports(name: str) -> set[str]:
    """What a file imports, relative names resolved: ``amp_fx.precision.plans.plan.Plan`` for a from-import."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    # functions and `if TYPE_CHECKING` included: an import that is hidden counts
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
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def inside(imported: str, module: str) -> bool:
    return imported == module or imported.startswith(f"{module}.")


def room_of(name: str) -> str:
    """The entry of the table that a module belongs to, the innermost where one holds another."""
    while name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    return name


def module_of(imported: str) -> str:
    while imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported


def arrows(name: str) -> set[str]:
    return {module_of(i) for i in imports(name) if inside(i, "amp_fx")} - {name}


def test_every_file_and_folder_has_a_floor() -> None:
    # folders of rooms hold nothing but a docstring
    of_rooms = {"amp_fx.instruments", "amp_fx.precision", "amp_fx.runtime"}
    assert {name for name in MODULES if room_of(name) == "amp_fx"} == {"amp_fx", *of_rooms}
    assert set(FLOOR_OF) <= MODULES.keys()
    assert not {imported for room in of_rooms for imported in arrows(room)}


def test_the_package_has_at_most_twelve_rooms() -> None:
    own = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    assert len({path.name for path in (ROOT / "amp_fx").iterdir()} - own) <= 12


def test_imports_go_down_the_floors() -> None:
    wrong = {
        (name, imported)
        for name in MODULES
        for imported in arrows(name)
        if room_of(imported) != room_of(name) and FLOOR_OF[room_of(imported)] >= FLOOR_OF[room_of(name)]
    }
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    pending = {name: arrows(name) for name in MODULES}
    while free := [name for name, below in pending.items() if not below & pending.keys()]:
        for name in free:
            del pending[name]
    assert not pending


def test_all_that_passes_on_inductors_graphs_are_made_of_is_in_the_keys_of_the_caches() -> None:
    pending = [name for name in MODULES if inside(name, "amp_fx.passes.inductor")]
    found = {"amp_fx.passes.base", *pending}
    while pending:
        new = arrows(pending.pop()) - found
        found |= new
        pending += new
    # what an error says, and that a result is kept, changes no graph
    unkeyed = {name for name in found if name.split(".")[1] not in KEYED_ROOMS}
    assert unkeyed <= {"amp_fx.errors", "amp_fx.runtime.state"}


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if path.name == "__init__.py"])
def test_every_folder_says_what_lives_there(name: str) -> None:
    text = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or ""
    is_room = (
        name != "amp_fx" and not inside(name, "amp_fx.passes") and (name.count(".") == 1 or name in FLOOR_OF)
    )
    assert text
    assert not is_room or {"Here:", "Not here:"} <= {line[: line.find(":") + 1] for line in text.splitlines()}
    assert not is_room or "first" in text.splitlines()[-1]


def is_private(imported: str) -> bool:
    if inside(imported, "torch.fx.experimental"):  # by its documentation
        return True
    underscore = any(part.startswith("_") for part in imported.split("."))
    return inside(imported, "torch") and underscore and not any(inside(imported, m) for m in ALLOWED_PRIVATE)


def test_private_torch_is_imported_through_a_door() -> None:
    outside = [name for name in MODULES if not any(inside(name, door) for door in DOORS)]
    assert not {(name, i) for name in outside for i in imports(name) if is_private(i)}


def test_nobody_imports_the_source_folders_by_their_own_names() -> None:
    own = ("passes", "viz")
    assert not {(name, i) for name in MODULES for i in imports(name) if any(inside(i, each) for each in own)}


#: names of torch's and of IPython's that files of amp_fx read or define as well
OF_OTHERS = {"_check", "_dynamo_source", "_int_mm", "_param_name_to_source", "_repr_html_", "_version"}


def made_in(path: Path) -> set[str]:
    """Private names that a file defines, as functions, classes, variables or attributes."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def read_in(path: Path) -> set[str]:
    """Names that a file imports, reads of an object, or replaces for a test."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "object", "patch"):
            strings = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            found.update(value.rpartition(".")[2] for value in strings if isinstance(value, str))
    return found


def test_tests_read_no_private_name_of_what_they_test() -> None:
    folders = ("amp_fx", "passes", "viz", "benchmarks", "examples")
    private = {name for each in folders for path in (ROOT / each).rglob("*.py") for name in made_in(path)}
    files = {path: read_in(path) & private - made_in(path) for path in (ROOT / "tests").rglob("*.py")}
    assert {path.name: names - OF_OTHERS for path, names in files.items() if names - OF_OTHERS} == {}
