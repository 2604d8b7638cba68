"""Draws the map of the house: its rooms, and an arrow from each room to those that it imports, read from the sources.

python docs/images/rooms.py

An arrow is left out if a way of two or more arrows leads to the same room.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from support.house import House  # beside the tests

PICTURE = HERE / "rooms.svg"
WIDTH, HEIGHT = 150, 46

ROOMS = {
    "magics": (20, 20, ["magics"]),
    "ray, spark": (390, 20, ["ray", "spark"]),
    "kernel_ext": (20, 120, ["kernel_ext"]),
    "frameworks": (390, 120, ["torch", "tensorflow", "keras", "mxnet", "numpy", "kvstore", "data"]),
    "widgets": (205, 220, ["widgets"]),
    "runner, horovod": (390, 220, ["runner", "horovod"]),
    "launch": (390, 320, ["launch"]),
    "bindings": (390, 420, ["bindings"]),
    "collectives": (205, 520, ["collectives"]),
}
"""For each room its place in the picture, and its packages below ``hvdlab``."""


def room_imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports, wherever in a module the import stands."""
    room_of = {package: room for room, (_, _, packages) in ROOMS.items() for package in packages}
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for importer, imported in House.read().imports.items():
        room = room_of.get(importer.partition(".")[0])
        if room is not None:
            others = {room_of.get(module.partition(".")[0]) for module in imported}
            found[room] |= {other for other in others if other is not None} - {room}
    return found


def shortest(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the arrows to draw: those imports that no way over other rooms stands for.

    Raises:
        ValueError: Rooms import each other in a circle.
    """

    def reached(room: str, before: tuple[str, ...]) -> set[str]:
        if room in before:
            raise ValueError(f"rooms import each other in a circle: {' → '.join([*before, room])}")
        return imports[room].union(*(reached(other, (*before, room)) for other in imports[room]))

    for room in imports:
        reached(room, ())
    return [
        (room, other)
        for room, others in imports.items()
        for other in sorted(others)
        if not any(other in reached(via, (room,)) for via in others - {other})
    ]


def drawn() -> str:
    """Return the picture as SVG."""
    arrows = []
    for room, other in shortest(room_imports()):
        (x, y, _), (to_x, to_y, _) = ROOMS[room], ROOMS[other]
        shift = (to_x > x) - (to_x < x)
        start = x + WIDTH / 2 + shift * WIDTH / 4
        end = to_x + WIDTH / 2 - shift * WIDTH / 4
        arrows.append(f'<line x1="{start:g}" y1="{y + HEIGHT}" x2="{end:g}" y2="{to_y - 3}"/>')
    boxes = [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 5:g}">{escape(room)}</text>'
        for room, (x, y, _) in ROOMS.items()
    ]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 586" width="560" height="586">',
            (
                "<style>rect{fill:#eef3fb;stroke:#46658f}text{font:15px sans-serif;text-anchor:middle;fill:#1b2a41}"
                "line{stroke:#46658f;stroke-width:1.5;marker-end:url(#tip)}</style>"
            ),
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                '<path d="M0 0L8 4L0 8z" fill="#46658f"/></marker></defs>'
            ),
            '<rect x="0" y="0" width="560" height="586" style="fill:#fff;stroke:none"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
