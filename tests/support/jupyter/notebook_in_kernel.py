"""Runs a notebook in a real kernel, as a user would: ``python tests/support/jupyter/notebook_in_kernel.py NOTEBOOK``, in the directory of the kernel.

It needs no nbclient, which the environments of the engines don't have. A cell with the tag ``raises-exception`` must fail, and no other may.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from support.jupyter.live_kernel import LiveKernel
from support.patience import PATIENCE

ENGINES = Path(__file__).parents[3] / "examples/engines"


def command(engine: str) -> Sequence[str]:
    """Return the command that runs the notebook of an engine."""
    return [sys.executable, __file__, str(ENGINES / f"{engine}.ipynb")]


def run_notebook(engine: str, directory: Path, environment: Mapping[str, str]) -> None:
    """Run the notebook of an engine in a directory, with these variables beside the process's own."""
    done = subprocess.run(
        command(engine),
        cwd=directory,
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def main(path: str) -> None:
    """Run each cell; exit with the unexpected results."""
    cells = [cell for cell in json.loads(Path(path).read_text())["cells"] if cell["cell_type"] == "code"]
    kernel = LiveKernel(Path.cwd())
    try:
        for cell in cells:
            source = "".join(cell["source"])
            ran = kernel.run(source, timeout=2 * PATIENCE)
            print(
                f"--- {source.splitlines()[0]} ({ran.seconds:.1f} s)",
                ran.text(),
                ran.text("stderr"),
                sep="\n",
            )
            must_fail = "raises-exception" in cell["metadata"].get("tags", ())
            if ran.error is not None and not must_fail:
                raise SystemExit("\n".join(ran.error["traceback"]))
            if ran.error is None and must_fail:
                raise SystemExit("this cell had to fail")
    finally:
        kernel.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
