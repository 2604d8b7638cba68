"""``hvdlab run`` on two hosts, each with a relay between its ranks and the coordinator."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import Network
from patience import eventually
from relayed_ranks import ON_RANKS
from remote_shell import RemoteShell
from two_hosts import finished

pytestmark = pytest.mark.root

HEAD = f'''{ON_RANKS}
import json, pathlib, sys, time

def process(*words):
    """The process of this host with these words in its command."""
    for found in psutil.process_iter(["cmdline"]):
        if "\\0".join(words) in "\\0".join(found.info["cmdline"] or ()):
            return found.pid

def coordinator():
    return process("-m", "hvdlab.collectives.coordinator")

def launcher():
    return process("-m", "hvdlab", "run")
'''

PLAIN = """
engine = context.init()
print(json.dumps([engine.rank, relay() is not None, relayed(), total("x")]))
"""

KILLED = """
engine = context.init()
memory = [engine.rank]
lost = reduce_until_lost(VICTIM, lambda: os.kill(PROCESS(), signal.NUMBER))
print(json.dumps([engine.rank, memory, relayed(), lost]))
"""


def killed(process: str, number: str, *, by: int) -> str:
    """A script in which a rank sends a signal to a process of its host, until the coordinator has a successor."""
    return KILLED.replace("PROCESS", process).replace("NUMBER", number).replace("VICTIM", str(by))


def run(
    network: Network, shell: RemoteShell, script: str, *arguments: str, relays: str = "1", fails: int = -1
) -> tuple[int, dict[int, list[object]], str]:
    """A script of two ranks on each host, of which number ``fails`` may; exit code, what each rank has printed, and stderr."""
    command = ["-np", "4", "-H", "host0:2,host1:2", *arguments, sys.executable, "-c", HEAD + script]
    environment = {"HVDLAB_SSH": shell.client, "HVDLAB_RELAYS": relays, "OMP_NUM_THREADS": "1"}
    code, out, err = finished(
        network.hosts[0], [sys.executable, "-m", "hvdlab", "run", *command], environment, 120
    )
    lines = [json.loads(line.partition(":")[2]) for line in out.splitlines()]
    if fails >= 0:  # nothing was left there that could remove it
        for left in network.hosts[fails].directory.glob("hvdlab-*"):
            shutil.rmtree(left)
    eventually(lambda: not relays_of(network))
    return code, {line[0]: line[1:] for line in lines}, err


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
    code, found, err = run(network, shell, killed("relay", number, by=3))
    assert code == 0, err
    assert found == {rank: [[rank], False, 1] for rank in range(4)}
    assert "the relay of host1 is lost" in err
    assert "another coordinator took over within" in err
    assert ("the relay of this host is killed: its process is stopped" in err) == (number == "SIGSTOP")


def test_a_coordinator_that_dies_costs_no_rank_its_memory(network: Network, shell: RemoteShell) -> None:
    code, found, err = run(network, shell, killed("coordinator", "SIGKILL", by=0))
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


# The agent must see all ends before it is told to start a rank anew. A process can be waited for once all of its threads have ended.
KILL_TOGETHER = """
kill -STOP $0
kill -KILL $@
for child; do until [ "$(ps -o state= -p $child) $(ls /proc/$child/task)" = "Z $child" ]; do :; done; done
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
            if WHAT == "agent":
                os.kill(os.getppid(), signal.SIGKILL)
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


def test_ranks_of_a_host_that_comes_back_have_a_relay_though_they_are_started_one_by_one(
    network: Network, shell: RemoteShell, tmp_path: Path
) -> None:
    script = ELASTIC.replace("DIRECTORY", repr(str(tmp_path))).replace("WHAT", repr("agent"))
    code, found, err = run(network, shell, script, "--min-np", "4", "--reset-limit", "3")
    assert code == 0, err
    assert {rank: found[rank] for rank in (2, 3)} == {rank: [4, 60, True] for rank in (2, 3)}, err


def test_elastic_training_goes_on_without_a_host_that_fails_with_its_relay(
    network: Network, shell: RemoteShell, tmp_path: Path
) -> None:
    script = ELASTIC.replace("DIRECTORY", repr(str(tmp_path))).replace("WHAT", repr("host"))
    code, found, err = run(network, shell, script, "--min-np", "2", "--reset-limit", "0", fails=1)
    assert code == 0, err
    # Which is heard of first, the end of the relay or those of its ranks, says whether the coordinator ends as well.
    assert {rank: said[:2] for rank, said in found.items()} == {rank: [2, 60] for rank in range(2)}, err


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
