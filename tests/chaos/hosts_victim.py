"""A rank of an elastic job whose hosts come and go: ``python hosts_victim.py SEED DIRECTORY``, started by ``hvdlab run``.

Until there is a file ``stop`` in the directory it trains; its state then is in ``result-RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hvdlab.numpy as hvd
from chaos.journal import COMMIT_EVERY, Journal, factor, with_step
from hvdlab.bindings.elastic_state import HandledState, HandlerRegistry
from hvdlab.collectives import context
from hvdlab.collectives.elastic import run_fn

SIZE = 20_000
"""Elements of the model."""


def main(seed: int, directory: Path) -> None:
    hvd.init()
    host = os.environ["HOROVOD_HOSTNAME"]
    journal = Journal(str(directory / "mail"))
    memory = np.random.default_rng([seed, journal.rank]).standard_normal(20_000)
    state: Any = HandledState(
        HandlerRegistry([]), weights=np.zeros(SIZE), momentum=np.zeros(SIZE), step=0, groups=[]
    )

    def step(state: Any) -> bool:
        """Run one step, and commit if it is due. Return whether the campaign asks the job to end."""
        ranks, number = context.engine().ranks(), state.step
        mine = np.full(SIZE, float((journal.rank + 1) * factor(number)))
        gradient = hvd.allreduce(mine, name="gradient", op=hvd.Sum)
        state.momentum = state.momentum + np.asarray(gradient)
        state.weights = state.weights - state.momentum
        state.step, state.groups = number + 1, with_step(state.groups, ranks)
        journal.done = state.step
        ends = np.array([(directory / "stop").exists()], np.int64)
        over = bool(np.asarray(hvd.allreduce(ends, name="over", op=hvd.Sum)).any())
        if over or state.step % COMMIT_EVERY == 0:
            journal.committed = state.step  # the state is saved before anything in a commit can fail
            state.commit()
            journal.tell(ranks, f"{hash(memory.tobytes())}", host)
        return over

    def train(state: Any) -> None:
        journal.begin(state.step)
        while not step(state):
            pass

    run_fn(train, lambda: None)(state)
    result = {
        "groups": state.groups,
        "step": state.step,
        "weights": np.unique(state.weights).tolist(),
        "momenta": np.unique(state.momentum).tolist(),
    }
    (directory / f"result-{journal.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
