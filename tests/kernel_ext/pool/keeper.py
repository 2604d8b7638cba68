"""A process that keeps a pool: ``python keeper.py RANKS [busy|talkative|waiting]``. Says ``up``; ends with its input."""

from __future__ import annotations

import sys

from hvdlab.kernel_ext.cells.sink import NullSink
from hvdlab.kernel_ext.payloads import Chunk, Stream
from hvdlab.kernel_ext.pool import Pool

SET_UP = """
import os, time
import numpy as np
import hvdlab.collectives.api as hvd
from hvdlab.collectives import context
context.init()
me, mine = int(os.environ["RANK"]), os.getpid()
memory = np.random.default_rng(me).integers(0, 1 << 30, 1 << 16)
secret = hash(memory.tobytes())
"""
CELLS = {
    "busy": "print('on', flush=True)\nwhile True: pass",
    "waiting": "print('on', flush=True)\nopen(f'{os.environ[\"DOOR\"]}{me}').read()\n"
    "for n in range(12):\n    print(str(n % 10) * (1 << 20))\nprint('the end')\nme",
    "talkative": "print('on', flush=True)\nfor written in range(1, 65):\n    print('x' * (1 << 20))",
}


class Begun(NullSink):
    """Says ``up`` with the first output, and nothing else."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        if any(isinstance(chunk, Stream) and "on\n" in chunk.text for chunk in chunks):
            print("up", flush=True)
            sys.stdin.readline()  # takes no more


def main() -> None:
    pool = Pool.start(int(sys.argv[1]), keep="mine")
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
