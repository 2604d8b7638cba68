"""Execute the notebooks of the tutorial, and keep their outputs for the site: ``make tutorial``.

    python docs/tutorial/execute.py                                # all, in place
    python docs/tutorial/execute.py first-five-minutes --out out/  # one, elsewhere

A cell with the tag ``raises-exception`` must fail, and every other one must not. Times and widgets' states, which no reader of the
site can use, are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
ORDER = ("first-five-minutes", "training-with-views", "when-something-goes-wrong")
FAILS = "raises-exception"


class TutorialError(Exception):
    """A cell of a tutorial did not end as its text says."""


def execute(path: Path, *, timeout: int = 240) -> nbformat.NotebookNode:
    """Execute a notebook in a kernel of its own.

    Args:
        path: The notebook.
        timeout: Seconds that one cell may take.

    Returns:
        The notebook with its outputs.

    Raises:
        CellExecutionError: A cell failed that has not the tag ``raises-exception``.
        TutorialError: A cell did not fail that has this tag.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
    )
    client.extra_arguments = ["--log-level=ERROR"]
    client.execute()
    for cell in notebook.cells:
        failed = any(output.output_type == "error" for output in cell.get("outputs", ()))
        if FAILS in cell.metadata.get("tags", ()) and not failed:
            raise TutorialError(f"{path.name}: this cell was to fail:\n{cell.source}")
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    )
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks of the tutorial.")
    parser.add_argument(
        "names", nargs="*", default=ORDER, help="notebooks, without their suffix; all by default"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder for the executed notebooks; in place by default"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        print(f"{name} …", flush=True)
        nbformat.write(execute(HERE / f"{name}.ipynb"), arguments.out / f"{name}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())
