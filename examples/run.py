"""Execute a notebook from the terminal, with progress.

    python examples/run.py examples/quickstart.ipynb --output out/quickstart.ipynb

Prints each cell's first line as it starts and its text as it comes. Exit code 1 if a cell failed; the notebook as far
as it was executed is written in any case.
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
_LINES_OF_A_VALUE = 8


class TerminalClient(NotebookClient):
    """A notebook client that tells the terminal what it does."""

    def begin(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        cells = [c for c in self.nb.cells if c.cell_type == "code"]
        number = next(i for i, c in enumerate(cells, 1) if c is cell)
        first, *rest = cell.source.strip().splitlines() or [""]
        second = f"  {rest[0].strip()} …" if first.startswith("%%") and rest else ""
        print(f"[{number}/{len(cells)}] {first}{second}", flush=True)

    def output(self, outs: list[Any], msg: Any, display_id: str, cell_index: int) -> Any:
        content = msg["content"]
        text = content.get("text") or content.get("data", {}).get("text/plain", "")
        lines = _ANSI.sub("", text).rstrip().splitlines()
        for line in lines if "text" in content else lines[:_LINES_OF_A_VALUE]:
            print(f"      {line}", flush=True)
        if "text" not in content and len(lines) > _LINES_OF_A_VALUE:
            print(f"      … {len(lines) - _LINES_OF_A_VALUE} more lines", flush=True)
        return super().output(outs, msg, display_id, cell_index)


def execute(path: Path, output: Path, timeout: int) -> CellExecutionError | None:
    """Execute the notebook and write it to ``output``; returns the error of the cell that failed, if one did."""
    notebook = nbformat.read(path, as_version=4)
    client = TerminalClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}})
    client.extra_arguments = ["--log-level=ERROR"]  # its note on unencrypted loopback is no news here
    client.on_cell_start = client.begin
    try:
        client.execute()
    except CellExecutionError as error:
        return error
    finally:
        output.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, output)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute a notebook from the terminal, with progress.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="where the executed notebook goes")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take")
    arguments = parser.parse_args()
    output = arguments.output or arguments.notebook.with_suffix(".out.ipynb")
    started = time.monotonic()
    error = execute(arguments.notebook, output, arguments.timeout)
    if error is not None:
        print(_ANSI.sub("", str(error)), file=sys.stderr)
    verdict = "failed" if error else "done"
    print(
        f"{verdict} in {time.monotonic() - started:.1f} s; the executed notebook is {output}; `make lab` opens it"
    )
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
