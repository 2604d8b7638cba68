"""A process that keeps a pool: ``python keeper.py RANKS [CELL]``, with the name of a cell. Prints ``up``; ends with its
input.

The variables ``LAUNCHER`` and ``UNUSED_FOR`` choose the launcher, and its option ``unused_for``.

With an elastic cell it carries out each line of its input (see :data:`ACTS`), and prints ``did`` after each.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.cells import Chunk, Stream

sys.path.insert(0, str(Path(__file__).parents[3]))

from support.patience import PATIENCE
from support.pool_probe import PoolProbe

SET_UP = """
import os, time
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
me, mine = int(os.environ["RANK"]), os.getpid()
memory = np.random.default_rng(me).integers(0, 1 << 30, 1 << 16)
secret = hash(memory.tobytes())
"""
ELASTIC = """
import os, signal
import hvdlab.numpy as hvd
import numpy as np
from hvdlab.bindings.elastic_state import HandlerRegistry
from hvdlab.bindings.elastic_state import HandledState
from hvdlab.collectives.elastic import run_fn

hvd.init()
state = HandledState(HandlerRegistry([]), step=0, sizes={}, stop=0)
STOP = [0]
held = set()
signal.signal(signal.SIGUSR1, lambda *_: STOP.__setitem__(0, 1))

def train(state, *hold):
    rank, said = int(os.environ["RANK"]), 0
    while not state.stop:
        if said != hvd.size():
            said = hvd.size()
            print("size", said, flush=True)
        if rank in hold and rank not in held:
            held.add(rank)
            print("on", flush=True)
            open(f"{os.environ['DOOR']}{rank}").read()
        state.stop = int(hvd.allreduce(np.array([STOP[0]]), op=hvd.Sum, name="stop")[0] > 0)
        state.step += 1
        state.sizes[hvd.size()] = state.sizes.get(hvd.size(), 0) + 1
        state.commit()
        if state.step == 3:
            print("on", flush=True)
    return state.step, state.sizes

train = run_fn(train, lambda: None)
"""
CELLS = {
    "busy": "print('on', flush=True)\nwhile True: pass",
    "waiting": "print('on', flush=True)\nopen(f'{os.environ[\"DOOR\"]}{me}').read()\n"
    "for n in range(12):\n    print(str(n % 10) * (1 << 20))\nprint('the end')\nme",
    "talkative": "print('on', flush=True)\nfor written in range(1, 65):\n    print('x' * (1 << 20))",
    "elastic": "train(state)",
    "held": "train(state, 1)",
}


def let_go(pool: Pool) -> None:
    """Let the last rank go, which does not come to a commit."""
    # The call gives up by its time limit; the rank is to be let go all the same.
    with contextlib.suppress(StartError):
        pool.resize(pool.size - 1, timeout=0.1)


ACTS: dict[str, Callable[[Pool], object]] = {
    "grow": lambda pool: pool.resize(pool.size + 1),
    "let go": let_go,
    # All that this process does before it is killed in the middle of a resize.
    "start a rank": lambda pool: PoolProbe(pool).group.set_ranks(range(pool.size + 1), Deadline(60)),
}
"""What it can do while an elastic cell runs."""


class Begun(NullSink):
    """Sink that prints ``up`` at the first output, and no more."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        if any(isinstance(chunk, Stream) and "on\n" in chunk.text for chunk in chunks):
            print("up", flush=True)
            self.begun()

    def begun(self) -> None:
        sys.stdin.readline()  # takes no more


class BegunElastic(Begun):
    """Sink that prints ``up`` at the first output, and accepts all that follows."""

    def __init__(self) -> None:
        self._up = False

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        if not self._up:
            super().output(rank, chunks)

    def begun(self) -> None:
        self._up = True


def train(pool: Pool, cell: str) -> None:
    assert pool.run(ELASTIC).errors == {}
    pool.start_run(cell, out=BegunElastic(), label="[7]", elastic=Bounds(2, 3))
    for line in sys.stdin:
        ACTS[line.strip()](pool)
        print("did", flush=True)


def main() -> None:
    launcher, unused_for = os.environ.get("LAUNCHER", "local"), os.environ.get("UNUSED_FOR")
    options = {"unused_for": unused_for} if unused_for else {}
    pool = Pool.start(
        int(sys.argv[1]), keep="mine", launcher=launcher, launcher_options=options, timeout=2 * PATIENCE
    )
    if sys.argv[2:] and sys.argv[2] in ("elastic", "held"):
        train(pool, CELLS[sys.argv[2]])
        return
    assert pool.run(SET_UP).errors == {}
    if len(sys.argv) > 2:
        pool.run(
            CELLS[sys.argv[2]], ranks=[0] if sys.argv[2] == "talkative" else None, out=Begun(), label="[7]"
        )
        return
    print("up", flush=True)
    if sys.stdin.readline():
        pool.detach()
        print("detached", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
