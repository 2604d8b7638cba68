"""Ranks of other versions are refused, in one sentence, and the others go on without them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlab
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import handshake
from hvdlab.collectives.protocol import messages as m
from support.simulation.coordinator import Simulation

OURS = {"Python": "3.11", "hvdlab": hvdlab.__version__, "torch": "2.9.1"}


def test_what_a_process_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.9.1+cpu"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert handshake.own_versions() == {"Python": python, "hvdlab": hvdlab.__version__, "torch": "2.9.1"}
    monkeypatch.delitem(sys.modules, "torch")
    assert "torch" not in handshake.own_versions()


@pytest.mark.parametrize("name", OURS)
def test_a_newcomer_with_another_version_is_refused_and_told_of_once(name: str) -> None:
    sim = Simulation(CoordinatorOptions(size=2))
    sim.connect_client()
    first = sim.connect(0, versions=OURS)
    sim.connect(1, versions={"Python": "3.11"})  # it can't differ in types that it has not loaded
    sim.drain()
    assert first.sets[0].ranks == (0, 1)
    sim.client_says(m.Expect((0, 1, 2)))
    for _ in range(3):
        refused = sim.connect(2, versions={**OURS, name: "9.9"})
        sim.drain()
    other = "the coordinator" if name == "hvdlab" else "rank 0"
    reason = (
        f"rank 2 has {name} 9.9, but {other} has {name} {OURS[name]}; all ranks need the same, so install {name} {OURS[name]} "
        "where rank 2 runs"
    )
    assert list(refused.incoming) == [m.Refused(reason)]
    assert [line for line in sim.logged if "refused" in line] == [f"refused: {reason}"]
    assert first.sets[0].ranks == (0, 1)
    sim.connect(2, versions=OURS)
    sim.drain()
    assert first.sets[0].ranks == (0, 1, 2)


def test_the_first_one_to_come_is_not_right_because_of_that() -> None:
    sim = Simulation(CoordinatorOptions(size=2))
    sim.connect_client()
    refused = sim.connect(1, versions={**OURS, "hvdlab": "9.9"})
    sim.drain()
    (message,) = refused.incoming
    assert isinstance(message, m.Refused)
    assert f"rank 1 has hvdlab 9.9, but the coordinator has hvdlab {hvdlab.__version__}" in message.reason
    first = sim.connect(0, versions=OURS)
    sim.connect(1, versions=OURS)
    sim.drain()
    assert first.sets[0].ranks == (0, 1)


SOME = st.dictionaries(st.sampled_from("abc"), st.sampled_from("12"))


@given(st.lists(st.tuples(st.booleans(), SOME), max_size=20))
def test_a_newcomer_fits_if_it_fits_each_rank_that_is_there(
    actions: list[tuple[bool, dict[str, str]]],
) -> None:
    agreed, there = handshake.AgreedVersions(), list[dict[str, str]]()
    for comes, said in actions:
        if not comes and there:
            agreed.remove(there.pop(0))
        refusal = handshake.version_mismatch(
            9, said, ((f"rank {rank}", known) for rank, known in enumerate(there))
        )
        assert agreed.fit(said) == (not refusal)
        if not refusal:
            agreed.add(said)
            there.append(said)


def test_newcomers_are_not_compared_with_every_rank_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def refusal(rank: int, own: dict[str, str], others: list[tuple[str, dict[str, str]]]) -> str:
        compared.append(len(others))
        return ""

    monkeypatch.setattr(handshake, "version_mismatch", refusal)
    sim = Simulation(CoordinatorOptions(size=8))
    for rank in range(8):
        sim.connect(rank, versions=OURS)
    assert compared == [1] * 8, "with the coordinator"
