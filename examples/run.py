"""Execute a notebook from the terminal, with progress.

    python examples/run.py examples/quickstart.ipynb --output out/quickstart.ipynb

Prints each cell's first line as it starts, its text output as it comes, and what the last cell gave. Exit code 1 if
a cell failed; the notebook executed so far is written in any case.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Progress:
    """Tells the terminal what the notebook does."""

    def __init__(self, notebook: nbformat.NotebookNode) -> None:
        self.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        self.started = time.monotonic()

    def begin(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        first, *rest = cell.source.strip().splitlines() or [""]
        second = f" · {rest[0].strip()}" if first.startswith("%%") and rest else ""
        number = next(i for i, c in enumerate(self.cells, 1) if c is cell)
        print(f"[{number}/{len(self.cells)}] {time.monotonic() - self.started:5.1f} s  {first}{second}", flush=True)

    def end(self, cell: nbformat.NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            for line in _ANSI.sub("", text).rstrip().splitlines():
                print(f"      {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="where the executed notebook goes")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take")
    arguments = parser.parse_args()
    output = arguments.output or arguments.notebook.with_suffix(".out.ipynb")
    output.parent.mkdir(parents=True, exist_ok=True)

    notebook = nbformat.read(arguments.notebook, as_version=4)
    progress = Progress(notebook)
    client = NotebookClient(
        notebook,
        timeout=arguments.timeout,
        resources={"metadata": {"path": str(arguments.notebook.parent)}},
        on_cell_start=progress.begin,
        on_cell_executed=progress.end,
    )
    failed = False
    try:
        client.execute()
    except CellExecutionError as error:
        failed = True
        print(error, file=sys.stderr)
    finally:
        nbformat.write(notebook, output)
    print(f"{'failed' if failed else 'done'} in {time.monotonic() - progress.started:.1f} s; executed notebook: {output}")
    print("open it with: make lab")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
