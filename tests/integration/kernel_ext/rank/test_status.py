"""A rank's report on the way of its CUDA tensors; ``test_agent.py`` has its other answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.kernel_ext.rank import status


def engine(planes: tuple[str, ...], links: dict[str, tuple[int, ...]], ranks: tuple[int, ...]) -> Any:
    return SimpleNamespace(rank=1, ranks=lambda: ranks, device_planes=lambda: planes, links=lambda: links)


@pytest.mark.parametrize(
    ("planes", "links", "ranks", "held", "expected"),
    [
        (("cuda/ipc",), {"NVLink": (0,)}, (0, 1), 5, {"NVLink": (0,)}),
        (("cuda/ipc",), {}, (0, 1), 5, {}),
        ((), {}, (0, 1, 2), 5, {"CUDA tensors through the host": (0, 2)}),
        ((), {}, (0, 1, 2), 0, {}),
        ((), {}, (1,), 5, {}),
    ],
    ids=["known", "not yet", "no plane", "no GPU in use", "alone"],
)
def test_without_a_plane_they_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
    planes: tuple[str, ...],
    links: dict[str, tuple[int, ...]],
    ranks: tuple[int, ...],
    held: int,
    expected: dict[str, tuple[int, ...]],
) -> None:
    monkeypatch.setattr(status, "device_memory", lambda: held)
    assert status.links_now(engine(planes, links, ranks)) == expected
