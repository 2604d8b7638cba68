"""The files that JupyterLab loads were made from the sources beside it, and fit the package that brings them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import hvdlab
from hvdlab.kernel_ext.notebook.debugger import multiplexer
from hvdlab.magics import panel_comms

ROOT = Path(__file__).parents[3]
EXTENSION = ROOT / "labextension"
PREBUILT = EXTENSION / "prebuilt"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(not EXTENSION.is_dir(), reason="not a checkout: the sources are not here")


def test_the_panel_is_up_to_date() -> None:
    lines = (PREBUILT / "sources.txt").read_text().splitlines()
    sources = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    assert {"labextension/src/index.ts", "ui/src/view/timeline.ts", "labextension/schema/plugin.json"} <= set(
        sources
    )
    for name, digest in sources.items():
        path = ROOT / name
        now = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"
        assert now == digest, f"{name} was changed: run `make views`"


def test_no_file_of_the_panel_was_changed_after_it_was_built() -> None:
    """The sources' digests do not cover the files that JupyterLab loads."""
    lines = (EXTENSION / "outputs.txt").read_text().splitlines()
    built = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    there = {
        path.relative_to(PREBUILT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in PREBUILT.rglob("*")
        if path.is_file()
    }
    assert there == built


def test_the_panel_is_whole() -> None:
    about = json.loads((PREBUILT / "package.json").read_text())
    assert about["version"] == hvdlab.__version__
    assert (PREBUILT / about["jupyterlab"]["_build"]["load"]).is_file()
    schema = json.loads((PREBUILT / "schemas" / about["name"] / "plugin.json").read_text())
    assert schema == json.loads((EXTENSION / "schema" / "plugin.json").read_text())


def test_the_panel_names_no_place_of_the_machine_that_built_it() -> None:
    for path in PREBUILT.rglob("*"):
        if path.is_file():
            found = re.search(rb"(?<![\w.])/(home|root|tmp|work|Users)/", path.read_bytes())
            assert not found, (path, found)


@pytest.mark.skipif(
    NODE is None or not (EXTENSION / "node_modules" / "esbuild").is_dir(),
    reason="no node, or `npm ci` was not run in labextension/",
)
def test_tests_of_the_panel_scripts_pass() -> None:
    done = subprocess.run(
        [str(NODE), "test/run.mjs"], cwd=EXTENSION, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lock_names_no_host() -> None:
    assert '"resolved"' not in (EXTENSION / "package-lock.json").read_text()


def test_page_and_kernel_call_things_by_the_same_names() -> None:
    source = (EXTENSION / "src" / "kernel_channel.ts").read_text()
    names = dict(re.findall(r"export const (\w+) = '([^']*)'", source))
    assert names == {
        "TARGET": panel_comms.TARGET,
        "STREAM": panel_comms.STREAM,
        "REQUESTS": panel_comms.REQUESTS,
        "OWN": "",
    }
    assert f"export const SCOPE = '{multiplexer.SCOPE}'" in (EXTENSION / "src" / "debugger.ts").read_text()
