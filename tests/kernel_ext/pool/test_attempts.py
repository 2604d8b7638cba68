"""When ipyparallel's controller is started again, and on which ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvdlab.kernel_ext.launchers import ports
from hvdlab.kernel_ext.launchers.attempts import (
    AT_LATEST,
    DEATHS,
    DEATHS_WITHIN,
    LATER,
    OTHER_PORTS,
    SAME_PORTS,
    SOON,
    Attempt,
    Attempts,
    Deaths,
)


def test_a_successor_insists_on_its_ports_for_a_while_and_takes_others_then() -> None:
    attempts = Attempts(again=True)
    assert [attempts.after(taken=True) for _ in SAME_PORTS] == [Attempt(wait) for wait in SAME_PORTS]
    assert [attempts.after(taken=True) for _ in OTHER_PORTS] == [Attempt(wait, True) for wait in OTHER_PORTS]
    assert attempts.after(taken=True) is None


def test_a_successor_that_fails_for_another_reason_keeps_its_ports() -> None:
    attempts = Attempts(again=True)
    assert [attempts.after(taken=False) for _ in SAME_PORTS] == [Attempt(wait) for wait in SAME_PORTS]
    assert attempts.after(taken=False) is None


def test_who_waits_for_the_first_one_is_told_at_once_why_it_fails() -> None:
    assert Attempts(again=False).after(taken=False) is None
    # Which ports it gets is nobody's concern yet.
    assert Attempts(again=False).after(taken=True) == Attempt(OTHER_PORTS[0])


def test_one_that_dies_all_the_time_is_started_more_and_more_rarely_but_is() -> None:
    deaths = Deaths()
    assert not deaths
    pauses = [deaths.add(now=float(second)) for second in range(DEATHS + 6)]
    assert pauses[:DEATHS] == [SOON] * DEATHS
    assert pauses[DEATHS : DEATHS + 2] == [LATER, 2 * LATER]
    assert pauses[-1] == AT_LATEST
    assert deaths
    assert deaths.add(now=2 * DEATHS_WITHIN) == SOON


@pytest.mark.parametrize(
    ("given_away", "wanted"),
    [
        (range(32768, 61000), range(ports.LOWEST, ports.HIGHEST)),
        (range(16000, 65536), range(ports.LOWEST, 16000)),
        (range(1024, 40000), range(40000, 65536)),
        (range(1024, 65536), range(0)),
        (range(0), range(0)),
    ],
)
def test_ports_are_chosen_where_the_system_gives_none_away(given_away: range, wanted: range) -> None:
    assert ports.candidates(given_away) == wanted


def test_the_system_tells_which_ports_it_gives_away(tmp_path: Path) -> None:
    assert ports.outgoing(tmp_path) == range(0)
    (tmp_path / "ip_local_port_range").write_text("32768\t60999\n")
    assert ports.outgoing(tmp_path) == range(32768, 61000)


def test_what_somebody_has_or_wants_to_have_is_not_chosen() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert ports.choose(1, among=range(port, port + 1)) == []
    assert ports.choose(1, among=range(port, port + 1)) == [port]
    assert ports.choose(1, avoid=[port], among=range(port, port + 1)) == []


def test_as_many_as_are_wanted_are_chosen_each_once() -> None:
    chosen = ports.choose(20, among=range(20000, 30000))
    assert len(set(chosen)) == len(chosen) == 20
    assert all(20000 <= port < 30000 for port in chosen)
