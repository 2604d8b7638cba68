"""A random rank is killed again and again, rank 0 included, while a small language model trains on CPUs: the steps that are left.

::

    python benchmarks/kills.py --kills 1000 --json benchmarks/results/kills.json --page docs/reference/faults.md
    python benchmarks/kills.py --kills 100 --seed 2 --json benchmarks/results/kills.json --add     # a hundred more
    python benchmarks/kills.py --kills 5 --steps 100 --every 60           # a rehearsal

A language model of one transformer layer trains on three ranks of ``hvdlab run --min-np 1 --preload torch``, and commits its state
to memory after each step. First it trains without kills. Then, for each ratio of ``--every``, a random rank gets SIGKILL whenever so
many times the median step without kills has passed; the launcher starts another process in its place. A step is to stand for one of
about a second: 60 and 15 of them are the published intervals of 60 and 15 seconds. Steps are shorter here (``--step``), and the
intervals are in the same ratio to them; the start of a process is not shorter, so it lasts for more steps than it would.
In each step a rank waits for most of its length, as it would for an accelerator: ranks that computed all the time would share the
cores, so that a step would be faster while one of them is missing.

A thousand kills take hours, so they may be made in several runs, each with a seed of its own: ``--add`` keeps the rows that the file has.
The table shows their sums: steps and times are added, of gaps and losses of steps the largest counts.

A rank is chosen among those that have completed a step since they came. While fewer than two have, the kill waits for them, since
the death of the only one loses the state of all memories; such kills are counted as postponed.

* ``efficiency``: steps that were committed, times the median step without kills, by the time from the first interval's begin to the
  last one's end. A step that is repeated counts once.
* ``ceiling``: the efficiency if a kill cost the step under way and nothing more, which is half a step on average: 1 - 1/2/ratio.
* ``of the ceiling``: the first by the second.
* ``ranks' share``: the sizes of the world in these steps, by that of all ranks: the rest is the time in which ranks are started.
* ``longest gap``: the longest time without a step of any rank, in steps.
* ``lost steps``: steps that all had committed and that were done once more. Above 0 some memory was lost.
* ``loss``: the mean training loss of the last hundred steps that both runs have, with kills and without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pages import conditions, publish
from recovery import end

RANKS = 3
WORDS, LENGTH, WIDTH = 64, 64, 128
"""Size of the vocabulary, words of a sequence, and width of the model."""
BATCH = 4  # sequences of a rank's batch
WARM_UP = 10
"""Steps that all ranks have done before anything is measured."""
PATIENCE = 180.0  # seconds without a step until the job counts as stuck
WINDOW = 100
"""Steps over which the loss is averaged."""


# -- in a rank --------------------------------------------------------------------------------------------------------


def train(directory: Path, length: float) -> None:
    """Train until the process ends, and write a line for each step."""
    import torch

    import hvdlab.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), layer, torch.nn.Linear(WIDTH, WORDS))
    successors = torch.randint(WORDS, (WORDS, 4))  # the language: each word has four that can follow it
    mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    def sentences(step: int) -> Any:
        chance = torch.Generator().manual_seed(step * RANKS + hvd.rank())
        words = [torch.randint(WORDS, (BATCH,), generator=chance)]
        for choice in torch.randint(4, (LENGTH, BATCH), generator=chance):
            words.append(successors[words[-1], choice])
        return torch.stack(words, 1)

    with (directory / f"{os.getpid()}.steps").open("a", buffering=1) as file:

        @hvd.elastic.run
        def steps(state: Any) -> None:
            while True:
                begin = time.monotonic()
                text = sentences(state.step)
                optimizer.zero_grad()
                guessed = model[2](layer(model[0](text[:, :-1]), src_mask=mask))
                loss = torch.nn.functional.cross_entropy(guessed.flatten(0, 1), text[:, 1:].flatten())
                time.sleep(max(0.0, begin + length - time.monotonic()))  # the accelerator computes
                loss.backward()
                optimizer.step()
                state.step += 1
                file.write(f"{state.step} {time.monotonic()} {hvd.size()} {loss.item()}\n")
                state.commit()

        steps(state)


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Step:
    """Step that one rank has completed.

    Attributes:
        at: When, by the clock of this machine.
        number: Which one it was, from 1 on.
        ranks: How many ranks took part.
        loss: On this rank's batch.
        pid: The rank's process.
    """

    at: float
    number: int
    ranks: int
    loss: float
    pid: int


class Job:
    """Job that trains, and the steps that its ranks have written down.

    Args:
        ended: Context that ends the job's processes.
        length: Seconds that a rank waits for in a step.
    """

    def __init__(self, ended: ExitStack, length: float) -> None:
        self._directory = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        #: Bytes of each file that were read, and the files of processes that have ended, which were read to their ends.
        self._read: dict[Path, int] = {}
        self._over: set[Path] = set()
        #: Steps that each process has completed.
        self._done: Counter[int] = Counter()
        self.steps: list[Step] = []
        script = [sys.executable, __file__, "--rank-in", str(self._directory), "--step", str(length)]
        log = ended.enter_context((self._directory / "output.txt").open("wb"))
        launcher = [sys.executable, "-m", "hvdlab", "run", "-np", str(RANKS), "--min-np", "1"]
        process = subprocess.Popen(
            [*launcher, "--reset-limit", "1000000", "--preload", "torch", *script],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        ended.callback(end, process)

    def read(self) -> None:
        """Read the steps that have been completed since."""
        new = []
        for path in self._directory.glob("*.steps"):
            if path in self._over:
                continue
            over = not _lives(int(path.stem))  # before it is read: afterwards nothing is added
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if over:
                self._over.add(path)
            if not whole:
                continue
            self._read[path] = self._read.get(path, 0) + len(whole) + 1
            for line in whole.splitlines():
                number, at, ranks, loss = line.split()
                new.append(Step(float(at), int(number), int(ranks), float(loss), int(path.stem)))
                self._done[int(path.stem)] += 1
        self.steps += sorted(new)

    def training(self) -> list[int]:
        """Return the processes that live and have completed a step."""
        return [pid for pid in self._done if _lives(pid)]

    def wait(self, until: float) -> None:
        """Read steps until that time. Raises ``TimeoutError`` if none comes for too long."""
        while time.monotonic() < until:
            time.sleep(min(0.25, max(0.0, until - time.monotonic())))
            self.read()
            self._check()

    def wait_for(self, ranks: int, steps: int) -> None:
        """Wait until so many living ranks have completed so many steps each. Raises ``TimeoutError`` if they do not."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.read()
            done = [self._done[pid] for pid in self.training()]
            if sum(count >= steps for count in done) >= ranks:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{ranks} ranks did not do {steps} steps in {PATIENCE:g} s:\n{self._output()}"
                )
            time.sleep(0.02)

    def _check(self) -> None:
        if self.steps and time.monotonic() - self.steps[-1].at > PATIENCE:
            raise TimeoutError(f"no step in {PATIENCE:g} s:\n{self._output()}")

    def _output(self) -> str:
        return (self._directory / "output.txt").read_text(errors="replace")[-3000:]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def play_without(steps: int, length: float) -> list[Step]:
    """Train for so many steps without kills. Return the steps after those that warm up."""
    with ExitStack() as ended:
        job = Job(ended, length)
        job.wait_for(RANKS, WARM_UP)
        while job.steps[-1].number < steps:
            job.wait(time.monotonic() + 0.2)
        return job.steps


def play_with(kills: int, interval: float, length: float, chance: random.Random) -> dict[str, Any]:
    """Train while ranks are killed. Return all steps, the instants of the kills, and the span that counts."""
    with ExitStack() as ended:
        job = Job(ended, length)
        job.wait_for(RANKS, WARM_UP)
        begin, at, postponed = time.monotonic(), [], 0
        for number in range(1, kills + 1):
            job.wait(begin + number * interval)
            if len(job.training()) < 2:
                postponed += 1
                job.wait_for(2, 1)
            os.kill(chance.choice(sorted(job.training())), signal.SIGKILL)
            at.append(time.monotonic())
            if number % 10 == 0:
                print(f"{number} kills, step {job.steps[-1].number}", file=sys.stderr, flush=True)
        job.wait(max(begin + (kills + 1) * interval, at[-1] + interval))
        return {"steps": job.steps, "begin": begin, "end": time.monotonic(), "postponed": postponed}


def step_seconds(steps: list[Step]) -> float:
    """Return the median time of a step without kills."""
    last = {step.number: step.at for step in steps}
    return statistics.median(last[n + 1] - last[n] for n in last if n >= WARM_UP and n + 1 in last)


def losses(steps: list[Step]) -> dict[int, float]:
    """Return the mean loss of the ranks, by step; of a step that was repeated, all count."""
    found: dict[int, list[float]] = {}
    for step in steps:
        found.setdefault(step.number, []).append(step.loss)
    return {number: statistics.fmean(each) for number, each in found.items()}


def figures(ratio: int, kills: int, played: dict[str, Any], without: list[Step]) -> dict[str, Any]:
    """Return the figures of a run with kills."""
    second, begin, until = step_seconds(without), played["begin"], played["end"]
    first = max(step.number for step in played["steps"] if step.at <= begin)
    span = [step for step in played["steps"] if begin < step.at <= until]
    done = max(step.number for step in span) - first
    efficiency, ceiling = done * second / (until - begin), 1 - 0.5 / ratio
    sizes = {step.number: step.ranks for step in span if step.number > first}
    reached, lost = first, 0
    for step in span:
        # The last step may be repeated. Those before were committed by all that took part in it.
        lost = max(lost, reached - step.number)
        reached = max(reached, step.number)
    ours, theirs = losses(played["steps"]), losses(without)
    both = sorted(ours.keys() & theirs.keys())[-WINDOW:]
    return {
        "steps_between_kills": ratio,
        "step_s": round(second, 3),
        "kills": kills,
        "postponed": played["postponed"],
        "seconds": round(until - begin, 1),
        "steps": done,
        "efficiency": round(efficiency, 4),
        "ceiling": round(ceiling, 4),
        "of_the_ceiling": round(efficiency / ceiling, 4),
        "ranks_share": round(statistics.fmean(sizes.values()) / RANKS, 4),
        "longest_gap_steps": round(max(b.at - a.at for a, b in pairwise(span)) / second, 1),
        "lost_steps": lost,
        "loss": round(statistics.fmean(ours[number] for number in both), 4),
        "loss_without_kills": round(statistics.fmean(theirs[number] for number in both), 4),
        "loss_until_step": both[-1],
    }


def in_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of several runs with the same ratio, as if they were one."""
    added = {name: sum(row[name] for row in rows) for name in ("kills", "postponed", "seconds", "steps")}
    ceiling = rows[0]["ceiling"]
    efficiency = sum(row["efficiency"] * row["seconds"] for row in rows) / added["seconds"]
    return {
        "steps_between_kills": rows[0]["steps_between_kills"],
        "runs": len(rows),
        "step_s": round(statistics.fmean(row["step_s"] for row in rows), 3),
        **added,
        "efficiency": efficiency,
        "ceiling": ceiling,
        "of_the_ceiling": efficiency / ceiling,
        "ranks_share": sum(row["ranks_share"] * row["steps"] for row in rows) / added["steps"],
        "longest_gap_steps": max(row["longest_gap_steps"] for row in rows),
        "lost_steps": max(row["lost_steps"] for row in rows),
        "loss": statistics.fmean(row["loss"] for row in rows),
        "loss_without_kills": statistics.fmean(row["loss_without_kills"] for row in rows),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result file, for a page."""
    heads = ("a kill every", "a step", "kills (postponed)", "runs", "steps", "efficiency", "ceiling", "of the ceiling", "ranks' share", "longest gap", "lost steps", "loss (without kills)")  # fmt: skip
    lines = [heads, ("---", *["---:"] * (len(heads) - 1))]
    ratios = sorted({row["steps_between_kills"] for row in result["rows"]}, reverse=True)
    for ratio in ratios:
        row = in_all([row for row in result["rows"] if row["steps_between_kills"] == ratio])
        shares = (row[name] for name in ("efficiency", "ceiling", "of_the_ceiling", "ranks_share"))
        lines.append(
            (
                f"{ratio} steps",
                f"{row['step_s']:.2f} s",
                f"{row['kills']:,} ({row['postponed']})",
                str(row["runs"]),
                f"{row['steps']:,}",
                *(f"{100 * share:.1f} %" for share in shares),
                f"{row['longest_gap_steps']:.0f} steps",
                str(row["lost_steps"]),
                f"{row['loss']:.3f} ({row['loss_without_kills']:.3f})",
            )
        )
    machine = f"{RANKS} ranks on {result['cores']} cores, Python {result['python']}."
    return "\n".join([machine, "", *("| " + " | ".join(line) + " |" for line in lines)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="for each ratio")
    parser.add_argument("--every", type=int, action="append", help="steps between kills (default: 60 and 15)")
    parser.add_argument("--steps", type=int, default=2000, help="of the run without kills")
    parser.add_argument("--step", type=float, default=0.25, help="seconds that a rank waits for in a step")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the runs that the file of --json has")
    parser.add_argument("--page", type=Path, help="page whose table is written again")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.add and given.json is None:
        parser.error("--add needs --json, the file whose runs are kept")
    if given.rank_in:
        train(given.rank_in, given.step)
        return
    without = play_without(given.steps, given.step)
    second = step_seconds(without)
    print(f"a step of {second:.3f} s without kills", file=sys.stderr, flush=True)
    former = json.loads(given.json.read_text())["rows"] if given.add else []
    rows = []
    for ratio in given.every or (60, 15):
        played = play_with(given.kills, ratio * second, given.step, random.Random(given.seed))
        rows.append({"seed": given.seed, **figures(ratio, given.kills, played, without)})
        print(rows[-1], file=sys.stderr, flush=True)
    result = {**conditions("kills", 1), "rows": [*former, *rows]}
    publish(result, markdown, json_file=given.json, page=given.page)


if __name__ == "__main__":
    main()
