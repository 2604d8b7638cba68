"""Faults on real pools: how soon the user knows, and whether anything hangs, is lost or is left over.

    python benchmarks/chaos.py                                                  # 100 faults, about three minutes
    python benchmarks/chaos.py --count 1000 --json benchmarks/results/chaos.json
    python benchmarks/chaos.py --seed 4 --plane gloo --first 17 --count 1 -v      # one trial again, with its story
    python benchmarks/chaos.py --shared-memory 64                               # with 64 MiB of it, as in a container
    python benchmarks/chaos.py --fault DDP                                      # only faults of wrapped models
    python benchmarks/chaos.py --partitions 30                                  # hosts that are cut off, instead of pools
    python benchmarks/chaos.py --elastic 1000                                   # ranks that come and go while they train
    python benchmarks/chaos.py --elastic 100 --hosts                            # whole hosts that do (needs root)
    python benchmarks/chaos.py --gpu 200                                        # ranks that share a GPU
    python benchmarks/chaos.py --gpu 20 --device cpu                            # the same as far as it goes without one
    python benchmarks/chaos.py --watched gloo --ranks 2                         # watched groups, with Gloo inside
    python benchmarks/chaos.py --watched nccl --ranks 4                         # with NCCL inside (needs a GPU)

Half of the faults befall a pool whose ranks share memory, half one that uses Gloo. The faults, their places and the
checks afterwards are in ``tests/chaos``. The exit code is 1 if anything hung, was lost, leaked or
was wrong; times above their limits are counted, and matter on a quiet machine only.
"""

from __future__ import annotations

import abc
import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pages import write

from chaos.campaign import Campaign
from chaos.elastic import LEAST, MOST, ElasticCampaign
from chaos.elastic_hosts import HOSTS, SLOTS, ElasticHosts
from chaos.faults import (
    DEATHS_OF_PARTS,
    ENDS_GLOO,
    FAULTS,
    GPU,
    KERNELS,
    ON_DEVICES,
    RESIZES,
    STALL,
    WATCHED,
    WRAPPED,
    Fault,
)
from chaos.figures import Outcome, markdown, rows, story, table
from chaos.partitions import Partitions
from chaos.scarcity import little_shared_memory
from support.network.namespaces import missing
from support.real_gpu import why_no_gpu

EVERYTHING = (*FAULTS, *DEATHS_OF_PARTS, *KERNELS, *RESIZES, *WRAPPED)


def chosen(words: list[str], among: Sequence[Fault]) -> list[Fault]:
    """Return the faults whose name has one of these words; all without words."""
    found = [fault for fault in among if not words or any(word in fault.name for word in words)]
    if not found:
        sys.exit(f"no fault has {' or '.join(words)} in its name: {', '.join(f.name for f in among)}")
    return found


def tell(outcome: Outcome, began: float, *, verbose: bool) -> None:
    """Print a line for a trial that was played, and its story if asked for or needed."""
    seconds = "never" if outcome.report is None else f"{outcome.report:6.3f} s"
    verdict = "" if outcome.ok else "   WRONG"
    late = "   late" if outcome.report is None or outcome.report > outcome.limit else ""
    print(
        f"{time.monotonic() - began:7.1f} {outcome.plane:4} {outcome.number:4} {outcome.fault:42} {outcome.phase:9} "
        f"rank {outcome.victim}  {seconds}{late}{verdict}",
        flush=True,
    )
    if verbose or not outcome.ok:
        print(outcome, flush=True)


class Played(Protocol):
    """Campaign that is under way.

    Attributes:
        started: How many pools, or jobs, there were.
    """

    started: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

    def play(self, count: int, first: int) -> Iterator[Outcome]:
        """Play ``count`` trials, beginning with the one that has this number."""


P = TypeVar("P", bound=Played)


class Kind(abc.ABC, Generic[P]):
    """Kind of campaign, with its part of the command line. The defaults are those of the one on pools.

    Args:
        given: The command line.

    Attributes:
        name: As in the result file.
        planes: Each has a share of the trials.
        count: Trials, over all planes.
        ranks: How many ranks there are at once.
    """

    name = "chaos"

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.planes: Sequence[str] = given.plane or ["shm", "gloo"]
        self.count: int = given.count
        self.ranks: int | str = given.ranks

    @abc.abstractmethod
    def start(self, plane: str) -> P:
        """Return a campaign on one plane."""

    def break_off(self, played: P) -> list[str]:
        """End the trial under way when the time is over. Returns its errors."""
        return []

    @abc.abstractmethod
    def stop(self, played: P) -> list[str]:
        """End the campaign. Returns its leftovers."""

    def drive(self, plane: str) -> tuple[list[Outcome], dict[str, Any]]:
        """Play one plane's share. Returns the outcomes, and the campaign's entries of the result file."""
        outcomes: list[Outcome] = []
        began, interrupted = time.monotonic(), False
        with self.start(plane) as played:
            try:
                for outcome in played.play(self.count // len(self.planes), self.given.first):
                    outcomes.append(outcome)
                    tell(outcome, began, verbose=self.given.verbose)
                    if time.monotonic() - began > self.given.minutes * 60:
                        outcome.wrong += self.break_off(played)
                        break
            except KeyboardInterrupt:
                interrupted = True
            left = self.stop(played)
        entries = {"plane": plane, "pools": played.started, "left_at_the_end": left}
        return outcomes, {**entries, **({"interrupted": True} if interrupted else {})}


class PoolFaults(Kind[Campaign]):
    """Faults on pools.

    Attributes:
        among: The faults that are drawn from.
        device: Where the ranks' tensors are; see :class:`Campaign`.
        inner: Torch's backend inside of the wrapped model's group, if that is watched.
    """

    among: Sequence[Fault] = EVERYTHING
    device = ""
    inner = ""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.faults = chosen(given.fault, self.among)
        if set(self.faults) <= set(WRAPPED):
            self.name = "ddp"  # which has a table of its own

    def start(self, plane: str) -> Campaign:
        given = self.given
        return Campaign(
            given.seed,
            plane,
            size=given.ranks,
            faults=self.faults,
            views=not given.without_views,
            device=self.device,
            inner=self.inner,
        )

    def stop(self, played: Campaign) -> list[str]:
        return played.stop()


class GpuFaults(PoolFaults):
    """Faults on pools whose ranks share the first GPU."""

    name = "gpu"
    among = (*ON_DEVICES, *GPU, DEATHS_OF_PARTS[0])

    def __init__(self, given: argparse.Namespace) -> None:
        self.device = given.device
        if given.device == "cpu":
            self.among = (*ON_DEVICES, DEATHS_OF_PARTS[0])
        elif reason := why_no_gpu():
            sys.exit(reason)
        super().__init__(given)
        self.planes, self.count = ["shm"], given.gpu


class WatchedFaults(PoolFaults):
    """Faults on ranks that train a wrapped model on a watched group."""

    name = "watched"
    among = WATCHED

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.inner, self.name = given.watched, f"watched_{given.watched}_{given.ranks}"
        left_out = [ENDS_GLOO] if given.watched == "gloo" else []
        if given.ranks == 2:
            left_out.append("SIGKILL of two ranks at once")  # no rank would be left
        self.faults = [fault for fault in self.faults if fault.name not in left_out]
        if self.inner == "nccl":
            import torch

            if not torch.cuda.is_available():
                sys.exit("Watched groups with NCCL need a GPU: torch finds none here.")
        self.planes = ["shm"]  # of what the ranks do beside the model; the bytes of the model go another way


class PoolChanges(Kind[ElasticCampaign]):
    """Ranks of pools that come and go while they train."""

    name = "elastic"

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.count, self.ranks = given.elastic, f"{LEAST} to {MOST}"

    def start(self, plane: str) -> ElasticCampaign:
        return ElasticCampaign(self.given.seed, plane, views=not self.given.without_views)

    def stop(self, played: ElasticCampaign) -> list[str]:
        return played.stop()


class OnHosts(Kind[P]):
    """Jobs on hosts of their own, which are joined over TLS, and of which nothing can be left."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        if reason := missing():
            sys.exit(reason)
        self.planes = ["tls"]

    def stop(self, played: P) -> list[str]:
        return []


class HostChanges(OnHosts[ElasticHosts]):
    """Whole hosts that come and go while their ranks train."""

    name = "elastic-hosts"

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.count, self.ranks = given.elastic, f"1 to {1 + SLOTS * (HOSTS - 1)}"

    def start(self, plane: str) -> ElasticHosts:
        return ElasticHosts(self.given.seed)

    def break_off(self, played: ElasticHosts) -> list[str]:
        return played.end_training()


class HostCuts(OnHosts[Partitions]):
    """Hosts that are cut off."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.count = given.partitions

    def start(self, plane: str) -> Partitions:
        return Partitions(self.given.seed)


def kind_of(given: argparse.Namespace) -> Kind[Any]:
    """Return the campaign that the command line asks for."""
    if given.hosts:
        return HostChanges(given)
    if given.partitions:
        return HostCuts(given)
    if given.gpu:
        return GpuFaults(given)
    if given.watched:
        return WatchedFaults(given)
    return PoolChanges(given) if given.elastic else PoolFaults(given)


def publish(result: dict[str, Any], page: Path | None) -> None:
    """Write the table of a result into a page, or print it."""
    text = markdown(result)
    if page is None:
        print(text)
    else:
        write(page, result.get("campaign", "chaos"), text)


def with_shared_memory(mebibytes: int) -> None:
    """Start again with a ``/dev/shm`` of this size; does nothing if it has that size."""
    found = os.statvfs("/dev/shm")
    if found.f_frsize * found.f_blocks == mebibytes << 20:
        return
    prefix = little_shared_memory(mebibytes)
    if not prefix:
        sys.exit("this process may not mount a /dev/shm of its own")
    os.execvp(prefix[0], [*prefix, sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="faults, over all planes (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial (default: 0)")
    parser.add_argument("--plane", action="append", choices=("shm", "gloo"), help="(default: both)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--fault", action="append", default=[], metavar="WORD", help="only faults with it in their name"
    )
    parser.add_argument("--without-views", action="store_true", help="open no views on the pools")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="for each plane; it stops when they are over"
    )
    parser.add_argument(
        "--shared-memory", type=int, metavar="MIB", help="size of /dev/shm (needs the right to mount)"
    )
    parser.add_argument(
        "--partitions", type=int, metavar="N", help="cut hosts off N times, and nothing else (needs root)"
    )
    parser.add_argument(
        "--elastic",
        type=int,
        metavar="N",
        help="change the ranks of elastic training N times, and nothing else",
    )
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="with --elastic: whole hosts come and go, instead of ranks of a pool (needs root)",
    )
    parser.add_argument(
        "--gpu", type=int, metavar="N", help="N faults on ranks that share the first GPU, and nothing else"
    )
    parser.add_argument(
        "--device",
        choices=("cuda:0", "cpu"),
        default="cuda:0",
        help="with --gpu: where the tensors are; cpu leaves out what only a GPU does (default: %(default)s)",
    )
    parser.add_argument(
        "--watched",
        choices=("gloo", "nccl"),
        help="faults on ranks that train on a watched group with this backend inside, and nothing else",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="page whose table is written anew")
    parser.add_argument(
        "--table-of", type=Path, metavar="JSON", help="play nothing; the table of this result"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="tell each trial's story")
    given = parser.parse_args()
    if given.table_of:
        publish(json.loads(given.table_of.read_text()), given.page)
        return
    if given.shared_memory:
        with_shared_memory(given.shared_memory)
    if given.hosts and not given.elastic:
        parser.error("--hosts belongs to --elastic")
    kind = kind_of(given)
    outcomes: list[Outcome] = []
    pools: list[dict[str, Any]] = []
    for plane in kind.planes:
        played, pool = kind.drive(plane)
        outcomes += played
        pools.append(pool)
        if "interrupted" in pool:
            break
    found = rows(outcomes)
    print(table(found))
    bad = [story(outcome) for outcome in outcomes if not outcome.ok]
    result = {
        "benchmark": "chaos",
        "campaign": kind.name,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "ranks": kind.ranks,
        "seed": given.seed,
        "stall_time_s": STALL,
        "faults": len(outcomes),
        "pools": pools,
        "rows": found,
        "not_well": bad,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.page:
        publish(result, given.page)
    sys.exit(bool(bad or any(pool["left_at_the_end"] or "interrupted" in pool for pool in pools)))


if __name__ == "__main__":
    main()
