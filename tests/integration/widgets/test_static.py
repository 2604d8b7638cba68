"""The scripts that the widgets bring were made from the sources beside them."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UI = ROOT / "ui"
STATIC = ROOT / "widgets" / "static"
BUNDLES = ("timeline.js", "ranks.js", "membership.js", "metrics.js", "strip.js", "strip.css", "views.css")
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(
    not UI.is_dir(), reason="not a checkout: the sources of the scripts are not here"
)


def digest_of_sources() -> str:
    """Return the digest as ``ui/build.mjs`` computes it."""
    files = [path for path in (UI / "src").rglob("*") if path.is_file()]
    files += [UI / "build.mjs", UI / "package-lock.json"]
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(UI).as_posix() for path in files):
        digest.update(name.encode() + b"\0" + (UI / name).read_bytes() + b"\0")
    return digest.hexdigest()


def test_no_bundle_was_changed_after_it_was_built() -> None:
    """The sources' digest in the first line does not cover the text after it."""
    lines = (UI / "outputs.txt").read_text().splitlines()
    built = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    there = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in STATIC.iterdir()
        if path.suffix in (".js", ".css")
    }
    assert there == built
    assert set(BUNDLES) == set(built)


@pytest.mark.parametrize("directory", ["ui", "labextension"])
def test_nothing_that_npm_installs_runs_then(directory: str) -> None:
    """Of hundreds of packages, any could do so on the machine that builds."""
    assert "ignore-scripts=true" in (ROOT / directory / ".npmrc").read_text().splitlines()


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_is_up_to_date(name: str) -> None:
    first = (STATIC / name).read_text().split("\n", 1)[0]
    found = re.search(r"sources: sha256:([0-9a-f]{64})", first)
    assert found, f"{name} does not say what it was made from"
    assert found[1] == digest_of_sources(), "run `npm ci && npm run build` in ui/"


needs_tools = pytest.mark.skipif(
    NODE is None or not (UI / "node_modules" / "esbuild").is_dir(),
    reason="no node, or `npm ci` was not run in ui/",
)


@needs_tools
def test_the_bundles_are_what_the_build_makes(tmp_path: Path) -> None:
    subprocess.run([str(NODE), "build.mjs", str(tmp_path)], cwd=UI, check=True, capture_output=True)
    for name in BUNDLES:
        assert (tmp_path / name).read_bytes() == (STATIC / name).read_bytes(), name


@needs_tools
def test_the_model_of_the_drawing() -> None:
    done = subprocess.run([str(NODE), "test/run.mjs"], cwd=UI, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lock_names_no_host() -> None:
    assert '"resolved"' not in (UI / "package-lock.json").read_text()
