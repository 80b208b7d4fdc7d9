"""`import amp_fx` works from everywhere: a source tree, a wheel, an editable install, from inside and from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: what a fresh process is asked: where the package and its two linked folders lie
LOOK = "import amp_fx, amp_fx.passes, amp_fx.viz; print(*(m.__file__ for m in (amp_fx, amp_fx.passes, amp_fx.viz)))"


def found(cwd: Path, *path: Path, isolated: bool = False) -> list[Path]:
    """The files that a fresh process imports amp_fx, its passes and its viz from.

    Args:
        cwd: its working directory.
        path: its PYTHONPATH.
        isolated: without what is installed beside torch, editable installs of amp_fx included.
    """
    command = [sys.executable, "-c", LOOK]
    if isolated:
        # -S leaves the .pth files of site-packages out, which is how editable installs are found
        path = (*path, *(Path(p) for p in sys.path if p.endswith("site-packages")))
        command.insert(1, "-S")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [Path(line) for line in run.stdout.split()]


def in_tree(root: Path) -> list[Path]:
    return [root / folder / "__init__.py" for folder in ("amp_fx", "amp_fx/passes", "amp_fx/viz")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, unpacked by pip."""
    target = tmp_path_factory.mktemp("installed")
    tree = tmp_path_factory.mktemp("tree") / "checkout"
    # setuptools writes beside the sources
    shutil.copytree(
        ROOT,
        tree,
        symlinks=True,
        ignore=shutil.ignore_patterns(
            ".*", "build", "out", "tests", "benchmarks", "__pycache__", "*.egg-info"
        ),
    )
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    run = subprocess.run([*command, str(target), str(tree)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return target


def test_a_source_tree_that_is_not_installed_imports_from_its_root() -> None:
    assert found(ROOT, isolated=True) == in_tree(ROOT)


def test_a_source_tree_on_the_path_imports_from_elsewhere(tmp_path: Path) -> None:
    assert found(tmp_path, ROOT, isolated=True) == in_tree(ROOT)


def test_an_installed_wheel_imports_from_elsewhere(tmp_path: Path, wheel: Path) -> None:
    package = wheel / "amp_fx"
    assert found(tmp_path, wheel, isolated=True) == [
        package / "__init__.py",
        package / "passes" / "__init__.py",
        package / "viz" / "__init__.py",
    ]


def test_in_the_root_of_a_checkout_the_checkout_is_imported_not_the_wheel(wheel: Path) -> None:
    assert found(ROOT, wheel, isolated=True) == in_tree(ROOT)


def test_an_editable_install_imports_from_elsewhere(tmp_path: Path) -> None:
    assert found(tmp_path) == in_tree(ROOT)


def test_a_source_tree_comes_before_an_editable_install_of_another(tmp_path: Path) -> None:
    for folder in ("amp_fx", "passes", "viz"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    assert found(tmp_path) == in_tree(tmp_path)


def test_a_wheel_has_every_file(wheel: Path) -> None:
    installed = {str(path.relative_to(wheel / "amp_fx")) for path in (wheel / "amp_fx").rglob("*.py")}
    here = {str(path.relative_to(ROOT / "amp_fx")) for path in (ROOT / "amp_fx").rglob("*.py")}
    for folder in ("passes", "viz"):
        here |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert installed == here


def test_folders_of_another_package_are_not_taken_in(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "base.py").write_text("raise ImportError('somebody else')\n")
    shutil.copytree(wheel / "amp_fx", tmp_path / "amp_fx")
    assert found(tmp_path, isolated=True)[1] == tmp_path / "amp_fx" / "passes" / "__init__.py"


def test_whoever_walks_the_package_walks_the_package() -> None:
    # TORCH_LOGS=+amp_fx does, before anything else runs
    command = [sys.executable, "-c", "import torch, logging; print(logging.getLogger('amp_fx').level)"]
    env = {**os.environ, "TORCH_LOGS": "+amp_fx", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "10"


def test_the_command_line_runs_in_the_root() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "amp_fx", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("amp_fx ")
