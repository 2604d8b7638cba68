"""constraints.txt resolves for every Python that is promised, without a network: by the metadata of the installed
distributions."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHECKED = [
    "requirements/installed.txt",
    "requirements/cuda.txt",
    "requirements/mxnet.txt",
    "requirements/engines.txt",
]
FILES = ["constraints.txt", *CHECKED]
CLASSIFIER = "Programming Language :: Python :: "
#: The first release of each promised minor version: a dependency's requirement is most often a lower bound.
PROMISED = [
    f"{minor}.0"
    for minor in (
        line.removeprefix(CLASSIFIER) for line in PROJECT["classifiers"] if line.startswith(CLASSIFIER)
    )
    if minor[0].isdigit() and "Only" not in minor
]
#: All extras but those that have an environment of their own, `out/engines`.
EXTRAS: dict[str, list[str]] = {
    name: lines
    for name, lines in PROJECT["optional-dependencies"].items()
    if name not in ("ray", "spark", "dask")
}
#: Distributions that `make install` brings beside the extras, and the one extra that it does not bring.
BESIDE = ["mpich", "tensorflow-cpu"]
LEFT_OUT = "gpu"
#: The same files as another one that it brings.
REPLACED = {"tensorflow": "tensorflow-cpu"}


class Pin(NamedTuple):
    name: str
    version: Version
    requirement: Requirement

    def holds(self, environment: dict[str, str]) -> bool:
        marker = self.requirement.marker
        return marker is None or marker.evaluate(environment)


def read_pins(text: str) -> list[Pin]:
    pins = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        [specifier] = requirement.specifier
        assert specifier.operator == "==", f"not one version: {line}"
        assert requirement.url is None, f"a place that other machines lack: {line}"
        pins.append(Pin(canonicalize_name(requirement.name), Version(specifier.version), requirement))
    return pins


PINS = read_pins((ROOT / "constraints.txt").read_text())


def environment_of(python: str) -> dict[str, str]:
    """Return the environment of markers on this machine, were its Python another."""
    changed = {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "implementation_version": python,
    }
    return {**{name: str(value) for name, value in default_environment().items()}, **changed}


@functools.cache
def installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def asked_by_project(extras: Iterable[str] = EXTRAS) -> list[Requirement]:
    return [
        Requirement(line)
        for line in itertools.chain(PROJECT["dependencies"], BESIDE, *map(EXTRAS.__getitem__, extras))
    ]


def required(asked: list[Requirement], environment: dict[str, str]) -> dict[str, str]:
    """Return each distribution that installing `asked` brings, and its dependents, as far as metadata is here to
    follow."""
    found: dict[str, str] = {}
    waiting = [("hvdlab", requirement, "") for requirement in asked]
    followed: set[tuple[str, str]] = set()
    while waiting:
        asker, requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(
            {**environment, "extra": extra}
        ):
            continue
        name = canonicalize_name(requirement.name)
        found[name] = asker
        distribution = installed(name)
        for wanted in {"", *requirement.extras} - {done for of, done in followed if of == name}:
            followed.add((name, wanted))
            lines = (distribution and distribution.requires) or []
            waiting += [(name, Requirement(line), wanted) for line in lines]
    return found


def test_promised_pythons_begin_where_requires_python_does() -> None:
    assert PROMISED
    assert PROJECT["requires-python"] == ">=" + PROMISED[0].removesuffix(".0")


@pytest.mark.parametrize("python", PROMISED)
def test_each_pin_can_be_installed(python: str) -> None:
    environment = environment_of(python)
    refused = {}
    for pin in PINS:
        distribution = installed(pin.name)
        if (
            distribution is None
            or Version(distribution.version).public != pin.version.public
            or not pin.holds(environment)
        ):
            continue  # test_what_is_installed_is_what_is_pinned sees to it that nothing needed here is passed over
        needs = (distribution.metadata.get_all("Requires-Python") or [""])[0]
        if python not in SpecifierSet(needs):
            refused[f"{pin.name}=={pin.version}"] = needs
    assert not refused, f"not installable on Python {python}; `make lock` finds others"


@pytest.mark.parametrize("python", PROMISED)
def test_all_that_is_required_is_pinned_once(python: str) -> None:
    environment = environment_of(python)
    held = [pin.name for pin in PINS if pin.holds(environment)]
    missing = {
        name: asker for name, asker in required(asked_by_project(), environment).items() if name not in held
    }
    assert not missing, "required (by) but not in constraints.txt; `make lock` writes it"
    assert len(held) == len(set(held)), "two versions for one Python"


def test_what_the_project_asks_for_allows_what_is_pinned() -> None:
    versions = {pin.name: pin.version for pin in PINS}
    asked = asked_by_project()
    assert [str(line) for line in asked if versions[canonicalize_name(line.name)] not in line.specifier] == []


def test_what_is_installed_is_what_is_pinned() -> None:
    here = {name: str(value) for name, value in default_environment().items()}
    pinned = {pin.name: pin.version.public for pin in PINS if pin.holds(here)}
    brought = required(asked_by_project(EXTRAS.keys() - {LEFT_OUT}), here) - REPLACED.keys()
    versions = {
        name: found and Version(found.version).public
        for name, found in zip(brought, map(installed, brought), strict=True)
    }
    other = {
        name: (version, pinned.get(name)) for name, version in versions.items() if version != pinned.get(name)
    }
    assert not other, "(installed, pinned): `make install` brings what is pinned"


def test_no_host_and_no_path_is_named() -> None:
    for file in FILES:
        assert "/" not in (ROOT / file).read_text()


def hashed(file: str) -> dict[str, list[str]]:
    """Return each requirement of a file of :data:`CHECKED`, and its digests."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith("#"):
            continue
        text = line.strip().removesuffix("\\").strip()
        if line.startswith(" "):
            kind, _, digest = text.partition(":")
            assert kind == "--hash=sha256"
            assert len(bytes.fromhex(digest)) == 32
            found[list(found)[-1]].append(digest)
        else:
            found[text] = []
    return found


@pytest.mark.parametrize("file", CHECKED)
def test_all_that_is_downloaded_has_digests(file: str) -> None:
    found = hashed(file)
    assert found
    assert [line for line, digests in found.items() if not digests] == []


@pytest.mark.parametrize("python", PROMISED)
def test_what_is_checked_by_digest_is_what_is_pinned(python: str) -> None:
    """`make install` resolves nothing: distributions missing from these files are not installed."""
    environment = environment_of(python)
    pins = {pin.name: pin.version for pin in PINS if pin.holds(environment)}
    files = [
        read_pins("\n".join(hashed(file))) for file in ("requirements/installed.txt", "requirements/cuda.txt")
    ]
    both = {pin.name: pin.version for pin in itertools.chain(*files) if pin.holds(environment)}
    assert both.pop("pip")
    wanted = required(asked_by_project(EXTRAS.keys() - {LEFT_OUT, "tensorflow"}), environment)
    assert {name for name in wanted if name not in both} <= set(REPLACED)
    assert {
        name: (version, pins.get(name)) for name, version in both.items() if pins.get(name) != version
    } == {}


def test_what_is_installed_is_checked(tmp_path: Path) -> None:
    """Each of the Makefile's installations of `.venv`, MXNet's environment and that of Ray and Spark asks for digests, or downloads nothing."""
    commands = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if re.search(r"^\t.*(\$\(BIN\)|out/(mxnet|engines)/bin)/python -m pip install", line)
    ]
    assert len(commands) == 10
    assert [
        line for line in commands if not re.search(r"\$\((CHECKED|OURSELVES)\)|--no-index --no-deps", line)
    ] == []


def test_another_file_than_was_pinned_is_refused(tmp_path: Path) -> None:
    """A registry, or a proxy before it, serves a package of the same name and version."""
    wheel = tmp_path / "attrs-26.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("attrs/__init__.py", "raise SystemExit('not attrs')")
        file.writestr(
            "attrs-26.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: attrs\nVersion: 26.1.0\n"
        )
        file.writestr(
            "attrs-26.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("attrs-26.1.0.dist-info/RECORD", "")
    ((line, digests),) = [
        item for item in hashed("requirements/installed.txt").items() if item[0].startswith("attrs==")
    ]
    asked = tmp_path / "asked.txt"
    version = Requirement(line).specifier
    wheel = wheel.rename(tmp_path / wheel.name.replace("26.1.0", str(version).removeprefix("==")))
    asked.write_text(" ".join([line, *(f"--hash=sha256:{digest}" for digest in digests)]))
    options = ["--isolated", "--no-index", "--find-links", str(tmp_path), "--require-hashes", "--no-deps"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--target",
        str(tmp_path / "into"),
        *options,
        "-r",
        str(asked),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "into").exists()
