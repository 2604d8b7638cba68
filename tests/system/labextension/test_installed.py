"""Installation by users: a wheel that was built without node brings the panel, the widgets and the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
pytest.importorskip("jupyterlab")

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ROOT / "labextension").is_dir(), reason="not a checkout: the sources are not here"
    ),
]

WHAT = """\
import json
from pathlib import Path
import hvdlab
from hvdlab.widgets.timeline import STATIC, TimelineWidget
print(json.dumps({"at": hvdlab.__file__, "scripts": sorted(one.name for one in STATIC.iterdir()), "size": len(TimelineWidget._esm)}))
"""


def without_node(directory: Path) -> dict[str, str]:
    """Return an environment with nothing on PATH but the system's own programs, and no node."""
    tools = directory / "tools"
    tools.mkdir()
    for name in ("node", "npm", "jlpm", "jupyter-builder"):
        (tools / name).write_text("#!/bin/sh\necho called >> $(dirname $0)/called\nexit 1\n")
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTHON"))}
    home = directory / "home"
    return kept | {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(home), "IPYTHONDIR": str(home / "ipython")}


def test_a_fresh_environment_gets_panel_widgets_and_kernel(tmp_path: Path) -> None:
    environment = without_node(tmp_path)

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    build = (
        "import os, hatchling.build as build; os.chdir({!r}); print('built', build.build_wheel({!r}))".format
    )
    name = run(sys.executable, "-c", build(str(ROOT), str(tmp_path))).split()[-1]
    assert not (tmp_path / "tools" / "called").exists()
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", tmp_path / name
    )
    # Dependencies come from this environment: behind its own packages, and without the path that makes this checkout
    # importable.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    found = json.loads(run(python, "-c", WHAT))
    assert Path(found["at"]).is_relative_to(site), found
    assert {"timeline.js", "metrics.js", "ranks.js", "strip.js", "views.css", "strip.css"} <= set(
        found["scripts"]
    )
    assert found["size"] > 10_000
    kernels = json.loads(run(python, "-m", "jupyter_client.kernelspecapp", "list", "--json"))["kernelspecs"]
    assert Path(kernels["hvdlab"]["resource_dir"]) == place / "share" / "jupyter" / "kernels" / "hvdlab"
    listed = run(python, "-m", "jupyterlab.labextensions", "list").splitlines()
    assert str(place / "share" / "jupyter" / "labextensions") in listed, listed
    panels = [line for line in listed if "@hvdlab/labextension" in line]
    assert panels, listed
    assert all("enabled" in line and "OK" in line for line in panels), panels
