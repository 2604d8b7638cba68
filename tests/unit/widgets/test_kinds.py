"""The views know the kinds of operations by their numbers: each has a name and two colours there."""

from __future__ import annotations

import re
from pathlib import Path

from hvdlab.collectives.types import OpKind

UI = Path(__file__).parents[3] / "ui" / "src"


def test_each_kind_of_operation_has_its_name_in_the_views() -> None:
    (names,) = re.findall(r"KINDS = \[(.*)\];", (UI / "model" / "store.ts").read_text())
    assert re.findall("'(.*?)'", names) == [kind.label.replace("_", " ") for kind in OpKind]


def test_each_kind_of_operation_has_a_colour_on_light_and_on_dark_ground() -> None:
    palettes = re.findall(r"kinds: \[\n(.*?)\n  \],", (UI / "draw" / "palette.ts").read_text(), re.DOTALL)
    assert [len(palette.splitlines()) for palette in palettes] == [len(OpKind)] * 2
