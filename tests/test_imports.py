"""The shape of the code: who imports whom, what stays light, what a built wheel holds, and who hides our names."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eesd_lite import entry
from eesd_lite.shadow import OURS, find_shadow

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "cli": {"cli", "eesd_lite", "quant", "models"},
    "eesd_lite": {"eesd_lite", "quant", "models"},
    "quant": {"quant"},
    "models": {"models"},
}
# Plain-Python modules: importing them must not cost the import of torch or transformers.
LIGHT = [
    "eesd_lite",
    "eesd_lite.acceptance",
    "eesd_lite.config",
    "eesd_lite.controller",
    "eesd_lite.controllers_exits",
    "eesd_lite.controllers_tree",
    "eesd_lite.conversation_controller",
    "eesd_lite.convert_gguf",
    "eesd_lite.costs",
    "eesd_lite.draft_weights",
    "eesd_lite.drafter_names",
    "eesd_lite.entry",
    "eesd_lite.errors",
    "eesd_lite.exit_choice",
    "eesd_lite.fetch_wheel",
    "eesd_lite.home",
    "eesd_lite.head_list",
    "eesd_lite.head_prior",
    "eesd_lite.hub",
    "eesd_lite.inspection",
    "eesd_lite.layer_shapes",
    "eesd_lite.packed_beside",
    "eesd_lite.params",
    "eesd_lite.placement",
    "eesd_lite.plan_cost",
    "eesd_lite.planning",
    "eesd_lite.preflight",
    "eesd_lite.prepare",
    "eesd_lite.progress",
    "eesd_lite.shadow",
    "eesd_lite.sizing",
    "eesd_lite.stats",
    "eesd_lite.synth",
    "eesd_lite.text_facts",
    "eesd_lite.tiers",
    "eesd_lite.tree_beliefs",
    "eesd_lite.units",
    "models",
    "quant",
    "quant.errors",
    "quant.small_reads",
    "quant.tensor_stream",
    "quant.survey",
    "cli",
    "cli.chat",
    "cli.chat_config",
    "cli.model_list",
    "cli.talk",
    "cli.inspect_model",
    "cli.main",
    "cli.plan",
    "cli.plan_table",
    "cli.synth",
]


def sources() -> Iterator[tuple[str, Path]]:
    for package in MAY_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield package, path


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports by its full name, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            yield node.lineno, str(node.module)


def test_imports_go_in_one_direction() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, path in sources()
        for line, name in imported_names(path)
        if name.split(".")[0] in MAY_IMPORT and name.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert wrong == []


def test_models_uses_the_standard_library_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, path in sources()
        if package == "models"
        for line, name in imported_names(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "models"}
    ]
    assert wrong == []


def test_only_the_entry_point_imports_by_a_computed_name() -> None:
    using = [path.name for _, path in sources() if "import_module" in path.read_text(encoding="utf-8")]
    assert using == ["entry.py"]


@pytest.mark.parametrize("module", LIGHT)
def test_plain_modules_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_the_public_surface_is_two_names() -> None:
    import eesd_lite

    assert eesd_lite.__all__ == ["Engine", "SamplingParams"]
    assert eesd_lite.SamplingParams.__name__ == "SamplingParams"
    assert eesd_lite.Engine.__name__ == "Engine"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        eesd_lite.Nothing  # noqa: B018


def test_a_built_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for package in MAY_IMPORT:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(source))
        for package in MAY_IMPORT
        for path in (source / package).rglob("*.*")
        if path.is_file()
    }
    assert packed == wanted
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    programs = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "eesd = eesd_lite.entry:eesd" in programs and "eesd-chat = eesd_lite.entry:eesd_chat" in programs


def test_the_constraints_pin_every_direct_requirement() -> None:
    # tomllib is not in Python 3.10; requirement strings are the quoted ones with a version.
    wanted = re.findall(r'"([A-Za-z0-9_-]+)>=', (ROOT / "pyproject.toml").read_text())
    pinned = re.findall(r"^([A-Za-z0-9_-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {plain(name) for name in wanted} - {plain(name) for name in pinned} == set()


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def hide(folder: Path, name: str, kind: str) -> Path:
    """Another package of that name in `folder`: a module, a package, or a folder without __init__."""
    if kind == "module":
        file = folder / f"{name}.py"
    else:
        (folder / name).mkdir()
        file = folder / name / ("__init__.py" if kind == "package" else "other.py")
    file.write_text("raise SystemExit('somebody else was run')\n")
    return file


def start(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from eesd_lite.entry import {program}; sys.exit({program}())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", code]
    return subprocess.run([*command, "--help"], cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("program", ["eesd", "eesd_chat"])
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", ["module", "package"])
def test_another_package_of_our_name_is_named_and_never_run(tmp_path: Path, program: str, name: str, kind: str) -> None:
    file = hide(tmp_path, name, kind)
    result = start(program, tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {file} hides the package {name!r} of eesd-lite")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("start", [entry.eesd, entry.eesd_chat])
def test_ctrl_c_while_modules_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: Callable[[], int]
) -> None:
    def interrupted(name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("eesd_lite.entry.importlib.import_module", interrupted)
    assert start() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_folder_that_is_no_package_does_not_hide_ours(tmp_path: Path) -> None:
    hide(tmp_path, "models", "folder")  # Python prefers a real package further down the path to a bare folder
    assert start("eesd", tmp_path).returncode == 0


def test_importing_the_engine_names_the_hiding_package_too(tmp_path: Path) -> None:
    file = hide(tmp_path, "models", "package")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "from eesd_lite import Engine"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert f"ImportError: {file} hides the package 'models'" in result.stderr


def test_nothing_is_hidden_here() -> None:
    assert find_shadow() is None
