"""``hvdlab run`` on two hosts, each with a relay between its ranks and the coordinator."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
from hosts import Network
from patience import eventually
from remote_shell import RemoteShell

pytestmark = pytest.mark.root

HEAD = '''
import contextlib, json, os, pathlib, signal, sys, time
import numpy as np
from hvdlab.collectives import api, context
from hvdlab.collectives.errors import AbortedError

def total(name, value=1.0):
    # Of the kind that needs the coordinator.
    return float(np.asarray(api.synchronize(api.allreduce_async(np.full(3, value), name, op=api.Sum)))[0])

def process(*words):
    """A process of this host with these words in its command."""
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "\\0".join(("", *words, "")).encode() in (place / "cmdline").read_bytes():
                return int(place.name)

def relay():
    return process("-m", "hvdlab.collectives.relay")

def coordinator():
    return process("-m", "hvdlab.collectives.coordinator")

def launcher():
    return process("-m", "hvdlab", "run")

def relayed():
    return not context.engine()._endpoint.secure
'''

PLAIN = """
engine = context.init()
print(json.dumps([engine.rank, relay() is not None, relayed(), total("x")]))
"""

KILLED = """
engine = context.init()
before, memory, steps = engine.generation, [engine.rank], 0
while True:
    if steps == 20 and engine.rank == 3:
        steps += 1
        os.kill(relay(), signal.NUMBER)
    try:
        # What is lost for some ranks may have been completed for others, which then wait in the next one: all have one name.
        gone_on = total("x", float(engine.generation != before))
        steps += 1
    except AbortedError as error:
        assert error.cause.kind == "coordinator_lost", error
        continue
    if gone_on == engine.size:
        break
print(json.dumps([engine.rank, memory, relayed(), engine.generation - before]))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture
def shell(network: Network, tmp_path: Path) -> Iterator[RemoteShell]:
    with RemoteShell(network, tmp_path) as made:
        yield made


def run(
    network: Network, shell: RemoteShell, script: str, *arguments: str, relays: str = "1", fails: int = -1
) -> tuple[int, dict[int, list[object]], str]:
    """A script of two ranks on each host, of which number ``fails`` may; exit code, what each rank has printed, and stderr."""
    command = ["-np", "4", "-H", "host0:2,host1:2", *arguments, sys.executable, "-c", HEAD + script]
    process = network.hosts[0].popen(
        [sys.executable, "-m", "hvdlab", "run", *command],
        env={"HVDLAB_SSH": shell.client, "HVDLAB_RELAYS": relays, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=120)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    lines = [json.loads(line.partition(":")[2]) for line in out.decode().splitlines()]
    if fails >= 0:  # nothing was left there that could remove it
        for left in network.hosts[fails].directory.glob("hvdlab-*"):
            shutil.rmtree(left)
    eventually(lambda: not relays_of(network))
    return process.returncode, {line[0]: line[1:] for line in lines}, err.decode()


def relays_of(network: Network) -> list[object]:
    """The relays that still run on any host, and their directories."""
    found: list[object] = []
    for host in network.hosts:
        look = host.popen(["pgrep", "-f", "hvdlab.collectives.rela[y]"], stdout=subprocess.PIPE)
        found += look.communicate()[0].split()
        found += host.directory.glob("hvdlab-*/coordinator")
    return found


@pytest.mark.parametrize("relays", ["0", "1", "auto"])
def test_ranks_are_behind_relays_where_that_is_wanted(
    network: Network, shell: RemoteShell, relays: str
) -> None:
    code, found, err = run(network, shell, PLAIN, relays=relays)
    assert code == 0, err
    there = relays == "1"
    assert found == {rank: [there, there, 4.0] for rank in range(4)}
    assert "hvdlab coordinator:" not in err, err


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_relay_that_dies_costs_no_rank_its_memory(
    network: Network, shell: RemoteShell, number: str
) -> None:
    code, found, err = run(network, shell, KILLED.replace("NUMBER", number))
    assert code == 0, err
    assert found == {rank: [[rank], False, 1] for rank in range(4)}
    assert "the relay of host1 is lost" in err
    assert "another coordinator took over within" in err
    assert ("the relay of this host is killed: its process is stopped" in err) == (number == "SIGSTOP")


COORDINATOR_KILLED = KILLED.replace("relay()", "coordinator()").replace(
    "engine.rank == 3", "engine.rank == 0"
)


def test_a_coordinator_that_dies_costs_no_rank_its_memory(network: Network, shell: RemoteShell) -> None:
    code, found, err = run(network, shell, COORDINATOR_KILLED.replace("NUMBER", "SIGKILL"))
    assert code == 0, err
    assert found == {rank: [[rank], False, 1] for rank in range(4)}
    assert "relay" not in err


def test_a_rank_behind_a_relay_that_dies_is_named(network: Network, shell: RemoteShell) -> None:
    script = "rank = context.init().rank\ntotal('x')\nif rank == 3: os.kill(os.getpid(), signal.SIGKILL)\ntotal('x')"
    code, found, err = run(network, shell, script)
    assert code == 128 + 9
    assert not found
    assert "hvdlab: rank 3 on host1 failed first: killed by SIGKILL" in err
    assert "coordinator" not in err.replace("hvdlab.collectives.coordinator", "")


# The agent must see all ends before it is told to start a rank anew.
KILL_TOGETHER = """
kill -STOP $0
kill -KILL $@
for child; do while [ "$(ps -o state= -p $child)" != Z ]; do :; done; done
kill -CONT $0
"""

ELASTIC = """
import subprocess, torch, hvdlab.torch as hvd
hvd.init()
first = not pathlib.Path(DIRECTORY, "killed").exists()

@hvd.elastic.run
def train(state):
    while state.batch < 60:
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="x"))
        if hvd.rank() == 3 and state.batch == 20 and first:
            pathlib.Path(DIRECTORY, "killed").touch()
            if WHAT == "children":  # the relay and both ranks
                agent = str(os.getppid())
                children = pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
                subprocess.Popen(["sh", "-c", KILL, agent, *children], start_new_session=True)
                time.sleep(1000)
            if WHAT == "host":
                os.kill(-1, signal.SIGKILL)  # the agent, the relay and the other rank
            os.kill(relay() if WHAT == "relay" else os.getpid(), signal.SIGKILL)
        state.batch += 1
        state.commit()

state = hvd.elastic.TorchState(batch=0)
train(state)
print(json.dumps([hvd.rank(), hvd.size(), state.batch, relayed()]))
"""


@pytest.mark.parametrize("what", ["relay", "rank"])
def test_elastic_training_behind_relays(
    network: Network, shell: RemoteShell, what: str, tmp_path: Path
) -> None:
    script = ELASTIC.replace("DIRECTORY", repr(str(tmp_path))).replace("WHAT", repr(what))
    code, found, err = run(network, shell, script, "--min-np", "4", "--reset-limit", "3")
    assert code == 0, err
    # A rank that was started anew is behind the relay as well, which lives.
    assert found == {rank: [4, 60, what == "rank"] for rank in range(4)}


def test_ranks_that_are_started_where_none_is_left_have_a_relay_again(
    network: Network, shell: RemoteShell, tmp_path: Path
) -> None:
    script = ELASTIC.replace("DIRECTORY", repr(str(tmp_path))).replace("WHAT", repr("children"))
    script = script.replace("KILL,", f"{KILL_TOGETHER!r},")
    code, found, err = run(network, shell, script, "--min-np", "4", "--reset-limit", "3")
    assert code == 0, err
    assert found == {rank: [4, 60, rank >= 2] for rank in range(4)}, err


def test_elastic_training_goes_on_without_a_host_that_fails_with_its_relay(
    network: Network, shell: RemoteShell, tmp_path: Path
) -> None:
    script = ELASTIC.replace("DIRECTORY", repr(str(tmp_path))).replace("WHAT", repr("host"))
    code, found, err = run(network, shell, script, "--min-np", "2", "--reset-limit", "0", fails=1)
    assert code == 0, err
    assert found == {rank: [2, 60, False] for rank in range(2)}


def test_an_agent_that_dies_takes_its_ranks_and_the_relay_along(network: Network, shell: RemoteShell) -> None:
    script = "rank = context.init().rank\ntotal('x')\nif rank == 3: os.kill(os.getppid(), signal.SIGKILL)\ntotal('x')"
    code, found, err = run(network, shell, script)
    assert code == 1, err
    assert not found
    assert "for host1 ended with exit code 137" in err
    assert "the relay of host1 is lost" not in err


def test_an_interrupt_ends_all(network: Network, shell: RemoteShell) -> None:
    script = (
        "rank = context.init().rank\ntotal('x')\nif rank == 0: os.kill(launcher(), signal.SIGINT)\ntotal('x')"
    )
    code, _, err = run(network, shell, script + "\ntime.sleep(1000)")
    assert code == 128 + 2
    assert "interrupted; ending 4 ranks" in err
