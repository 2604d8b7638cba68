"""A host that is reached by real ssh loses its cable for longer than the heartbeat allows: its rank keeps its process and its memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.network.namespaces import Network, Process
from support.patience import PATIENCE

SCRIPT = """\
import os, sys
import torch
import hvdlab.torch as hvd

hvd.init()
memory = []  # no other process has it, and no state

@hvd.elastic.run
def train(state):
    print("attempt", hvd.size(), os.getpid(), len(memory), flush=True)
    while not state.over:
        memory.append(state.batch)
        state.over = bool(hvd.allreduce(torch.tensor(float(os.path.exists(sys.argv[1]))), op=hvd.Max, name="over"))
        state.batch += 1
        state.commit()

state = hvd.elastic.TorchState(batch=0, over=False)
train(state)
print("done", hvd.size(), os.getpid(), len(memory), flush=True)
"""
LINE = re.compile(r"\[(\d)\]<stdout>:(attempt|done) (\d) (\d+) (\d+)\n")

Said = tuple[int, str, int, int, int]
"""The rank; what; how many ranks there were; its process; how many steps it remembers."""


def read_until(process: Process, rank: int, what: str, size: int) -> Said:
    """Read ranks' output until one prints this."""
    assert process.stdout is not None
    for line in process.stdout:
        found = LINE.fullmatch(line.decode())
        assert found is not None, line
        said = int(found[1]), found[2], int(found[3]), int(found[4]), int(found[5])
        if said[:3] == (rank, what, size):
            return said
    raise AssertionError(f"the job has ended: {process.communicate()[1].decode()}")


def test_a_rank_behind_ssh_keeps_its_memory_while_its_host_is_cut_off(
    network: Network, ssh: str, tmp_path: Path
) -> None:
    first, second = network.hosts
    script, over = tmp_path / "train.py", tmp_path / "over"
    script.write_text(SCRIPT)
    hosts = f"{first.name}:1,{second.name}:1"
    # ssh itself must not give the connection up on a machine that takes its time.
    shell = f"{ssh} -o ServerAliveCountMax=60"
    command = ["-m", "hvdlab", "run", "--min-np", "1", "-H", hosts, "--ssh", shell, sys.executable]
    process = first.popen(
        [sys.executable, *command, str(script), str(over)],
        env={"HVDLAB_PING_AFTER": "1", "HVDLAB_DEAD_AFTER": "3", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        before = read_until(process, 1, "attempt", 2)
        second.cut()
        read_until(process, 0, "attempt", 1)
        second.mend()
        back = read_until(process, 1, "attempt", 2)
        over.touch()
        done = read_until(process, 1, "done", 2)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        second.mend()
        process.kill()
    assert process.returncode == 0, err.decode()
    assert before[3] == back[3] == done[3], "it is the same process"
    assert 0 == before[4] < back[4] < done[4]
    said = err.decode()
    assert re.search(r"rank 1 was cut off for \d+ s, and is back with its memory", said), said
    assert "anew" not in said
