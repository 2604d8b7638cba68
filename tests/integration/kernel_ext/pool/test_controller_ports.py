"""The ports that are chosen for ipyparallel's controller."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvdlab.kernel_ext.forkserver import controller


@pytest.mark.parametrize(
    ("given_away", "wanted"),
    [
        (range(32768, 61000), range(controller.LOWEST, controller.HIGHEST)),
        (range(16000, 65536), range(controller.LOWEST, 16000)),
        (range(1024, 40000), range(40000, 65536)),
        (range(1024, 65536), range(0)),
        (range(0), range(0)),
    ],
)
def test_ports_are_chosen_where_the_system_gives_none_away(given_away: range, wanted: range) -> None:
    assert controller.candidates(given_away) == wanted


def test_the_range_of_ports_that_the_system_gives_away_is_read(tmp_path: Path) -> None:
    assert controller.outgoing(tmp_path) == range(0)
    (tmp_path / "ip_local_port_range").write_text("32768\t60999\n")
    assert controller.outgoing(tmp_path) == range(32768, 61000)


def test_a_port_that_a_program_has_is_not_chosen() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert controller.choose(1, among=range(port, port + 1)) == []
    assert controller.choose(1, among=range(port, port + 1)) == [port]


def test_as_many_as_are_wanted_are_chosen_each_once() -> None:
    chosen = controller.choose(20, among=range(20000, 30000))
    assert len(set(chosen)) == len(chosen) == 20
    assert all(20000 <= port < 30000 for port in chosen)
