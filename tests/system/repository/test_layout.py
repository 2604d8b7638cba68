"""The rooms are real directories, reached by links as one package, and every build has each module exactly once."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("collectives", "kernel_ext", "magics", "widgets")
HEAVY = ("numpy", "torch", "IPython", "ipykernel", "ipyparallel", "traitlets", "zmq")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None,
    reason="not a git checkout: no index to look at",
)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_real_directory_that_the_package_links_to(room: str) -> None:
    link = ROOT / "src" / "hvdlab" / room
    assert link.is_symlink(), f"{link} must be a symbolic link; this checkout has none (core.symlinks=false?)"
    assert str(link.readlink()) == f"../../{room}"
    assert not (ROOT / room).is_symlink()
    assert (ROOT / room / "__init__.py").is_file()


@needs_git
def test_the_links_are_committed_as_links() -> None:
    lines = git("ls-files", "-s", *(f"src/hvdlab/{room}" for room in ROOMS)).splitlines()
    assert [line.split()[0] for line in lines] == ["120000"] * len(ROOMS)


def expected_modules() -> set[str]:
    """Return names in a wheel of all modules that git knows."""
    places = [*ROOMS, "src/hvdlab"]
    tracked = [Path(name) for name in git("ls-files", *places).splitlines()]
    present = [path for path in tracked if path.suffix == ".py" and (ROOT / path).is_file()]
    return {str(path.relative_to("src") if path.parts[0] == "src" else "hvdlab" / path) for path in present}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a wheel of this tree, and a wheel of the source distribution of this tree."""
    out = tmp_path_factory.mktemp("builds")
    for target in ("wheel", "sdist"):
        done = run("-m", "hatchling", "build", "-t", target, "-d", str(out / target))
        assert done.returncode == 0, done.stderr
    (sdist,) = (out / "sdist").iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out / "second")]
    subprocess.run(build, cwd=unpacked, capture_output=True, check=True)
    (first,), (second,) = (out / "wheel").iterdir(), (out / "second").iterdir()
    return first, second


@needs_git
def test_the_source_distribution_has_all_that_the_readme_links_to(tmp_path: Path) -> None:
    done = run("-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^()#:]+)[^()]*\)|src(?:set)?=\"([^\"]+)\"", text))
    targets = {next(filter(None, pair)) for pair in linked}
    assert len(targets) > 20
    assert targets - names == set()


#: The distribution of a module that has another name.
DISTRIBUTIONS = {"IPython": "ipython", "zmq": "pyzmq", "yaml": "PyYAML", "cuda": "cuda-bindings"}
#: Modules that come with another distribution.
BROUGHT = {
    "pydevd": "debugpy",
    "_pydevd_bundle": "debugpy",
    "pydevd_tracing": "debugpy",
    "py4j": "pyspark",
    "dask": "distributed",
    "keras": "tensorflow",
}
USERS = {"tqdm", "mxnet"}
"""Packages of the user's, which hvdlab imports only after the user has."""


def imported_modules() -> set[str]:
    """Return the modules of others that the package imports anywhere, by their first name."""
    found: set[str] = set()
    for path in [
        *ROOT.glob("src/hvdlab/**/*.py"),
        *(one for room in ROOMS for one in ROOT.glob(f"{room}/**/*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"hvdlab"}


def requirement_names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=\[;]", line)[0].strip().lower() for line in lines}


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    development = ("test", "dev", "docs")
    of_users = [lines for name, lines in extras.items() if name not in development]
    declared = requirement_names(project["dependencies"] + [line for lines in of_users for line in lines])
    modules = {BROUGHT.get(name, DISTRIBUTIONS.get(name, name)) for name in imported_modules() - USERS}
    assert {name.lower() for name in modules} - declared == set()


def test_jupyterlab_is_brought_without_packages_that_only_users_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert requirement_names(extras["lab"]) == {"jupyterlab", "ipywidgets", "anywidget"}


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@needs_git
@pytest.mark.parametrize("which", [0, 1], ids=["wheel", "wheel of the sdist"])
def test_a_wheel_has_every_module_once_and_nothing_else_at_the_top(
    builds: tuple[Path, Path], which: int
) -> None:
    names = names_in(builds[which])
    assert [name for name, count in Counter(names).items() if count > 1] == []
    modules = {name for name in names if name.endswith(".py")}
    assert expected_modules() - modules == set(), "hatchling visits a directory once: reach it by one path"
    version = names[-1].split("/")[0].removesuffix(".dist-info")
    assert {name.split("/")[0] for name in names} == {"hvdlab", f"{version}.dist-info", f"{version}.data"}
    assert {"hvdlab/py.typed", "hvdlab/widgets/static/timeline.js"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".md"))]


def test_a_wheel_brings_the_panel_to_where_jupyterlab_finds_it(builds: tuple[Path, Path]) -> None:
    prebuilt = ROOT / "labextension" / "prebuilt"
    files = [path.relative_to(prebuilt).as_posix() for path in prebuilt.rglob("*") if path.is_file()]
    names = names_in(builds[0])
    data = next(name.split("/")[0] for name in names if ".data/" in name)
    place = f"{data}/data/share/jupyter/labextensions/@hvdlab/labextension"
    assert {f"{place}/{name}" for name in [*files, "install.json"]} <= set(names)
    assert "package.json" in files


@pytest.mark.parametrize("which", [0, 1], ids=["wheel", "wheel of the sdist"])
def test_a_wheel_brings_the_kernel_to_where_jupyter_finds_it(builds: tuple[Path, Path], which: int) -> None:
    files = {path.name for path in (ROOT / "kernel_ext" / "kernel" / "kernelspec").iterdir()}
    assert files == {"kernel.json", "logo-svg.svg", "logo-32x32.png", "logo-64x64.png"}
    names = names_in(builds[which])
    data = next(name.split("/")[0] for name in names if ".data/" in name)
    assert {f"{data}/data/share/jupyter/kernels/hvdlab/{name}" for name in files} <= set(names)


def test_the_wheel_of_the_sdist_is_the_wheel(builds: tuple[Path, Path]) -> None:
    first, second = (sorted(names_in(wheel)) for wheel in builds)
    assert first == second


def test_the_package_under_test_is_this_tree() -> None:
    import hvdlab.collectives.errors as module

    assert Path(module.__file__).resolve() == ROOT / "collectives" / "errors.py"


def test_the_arrows_between_rooms_point_as_agreed() -> None:
    done = run(
        "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "hvdlab",
        "hvdlab.collectives",
        "hvdlab.collectives.errors",
        "hvdlab.collectives.coordinator.__main__",
        "hvdlab.collectives.coordinator.process",
        "hvdlab.collectives.tracing.recorder",
        "hvdlab.collectives.tracing.timeline_file",
        "hvdlab.runner.check_trace",
        "hvdlab.runner.cli",
    ],
)
def test_what_must_be_light_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = run("-c", code)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr


@pytest.mark.parametrize("which", [0, 1], ids=["wheel", "wheel of the sdist"])
def test_a_wheel_brings_a_bill_of_materials(builds: tuple[Path, Path], which: int) -> None:
    """Others' code that it contains, and its dependencies."""
    (place,) = [name for name in names_in(builds[which]) if name.endswith(".dist-info/sboms/hvdlab.cdx.json")]
    with zipfile.ZipFile(builds[which]) as wheel:
        bill = json.loads(wheel.read(place))
        scripts = "".join(
            wheel.read(name).decode("utf-8", "replace") for name in wheel.namelist() if name.endswith(".js")
        )
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "hvdlab")
    named = {one["name"]: one for one in bill["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[<>=]", text)[0] for text in project["dependencies"]} <= set(named)
    assert named["msgspec"]["version"] in (ROOT / "constraints.txt").read_text()
    assert "uPlot" in scripts
    assert named["uplot"]["purl"].startswith("pkg:npm/uplot@")
    assert {one["bom-ref"] for one in named.values()} == set(bill["dependencies"][0]["dependsOn"])
