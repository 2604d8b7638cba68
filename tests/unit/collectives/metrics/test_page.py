"""The pages about metrics are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvdlab import exporters
from hvdlab.collectives.metrics import sampler
from hvdlab.collectives.metrics.export import MOST_WAITING, Export, Point

DOCS = Path(__file__).parents[4] / "docs"


def test_the_reference_has_the_names_that_ranks_record() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    told = {name for name in re.findall(r"`(hvdlab/[^`<… ]+[^/`<… ])`", page)}
    constants = {key: value for key, value in vars(sampler).items() if key.isupper() and key != "GPU"}
    known = {value for value in constants.values() if isinstance(value, str) and value.startswith("hvdlab/")}
    assert {name.format(index=0) for name in known} <= told


def test_the_guide_has_the_exporters_and_their_limit() -> None:
    page = (DOCS / "how-to" / "export-metrics.md").read_text()
    told = set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE))
    assert told == set(exporters.__all__) - {"Export", "Exporter", "Point"}
    assert f"up to {MOST_WAITING:,} points wait" in page


def test_the_exporter_of_the_guide_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "how-to" / "export-metrics.md").read_text()
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Printer" in code
    ]
    made: list[Export] = []

    class Hvd:
        @staticmethod
        def export(exporter: Any, names: str) -> None:
            made.append(Export(exporter, [names]))

    exec(compile(block, "export-metrics.md", "exec"), {"hvd": Hvd})  # noqa: S102  (the page's code)
    made[0].put([Point(3, "loss", 0.5, 7, 1.0)])
    assert made[0].close(10)
    assert capsys.readouterr().out == "1.0 3 loss 0.5 7\nthat was all\n"
