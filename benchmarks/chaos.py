"""Faults on real pools: how soon the user knows, and whether anything hangs, is lost or is left over.

    python benchmarks/chaos.py                                                  # 100 faults, about three minutes
    python benchmarks/chaos.py --count 1000 --json benchmarks/results/chaos.json
    python benchmarks/chaos.py --seed 4 --plane gloo --first 17 --count 1 -v      # one trial again, with its story
    python benchmarks/chaos.py --shared-memory 64                               # with 64 MiB of it, as in a container
    python benchmarks/chaos.py --fault DDP                                      # only what befalls wrapped models
    python benchmarks/chaos.py --partitions 30                                  # hosts that are cut off, instead of pools
    python benchmarks/chaos.py --elastic 1000                                   # ranks that come and go while they train
    python benchmarks/chaos.py --elastic 100 --hosts                            # whole hosts that do (needs root)

Half of the faults befall a pool whose ranks share memory, half one that uses Gloo. What the faults are, where they
strike and what is looked at afterwards is in ``tests/chaos``. The exit code is 1 if anything hung, was lost, leaked or
was wrong; times above their limits are counted, and matter on a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pages import write

from chaos.campaign import Campaign
from chaos.elastic import LEAST, MOST, ElasticCampaign
from chaos.elastic_hosts import HOSTS, SLOTS, ElasticHosts
from chaos.faults import DEATHS_OF_PARTS, FAULTS, KERNELS, RESIZES, STALL, WRAPPED
from chaos.figures import Outcome, markdown, rows, story, table
from chaos.partitions import Partitions
from chaos.scarcity import little_shared_memory
from hosts import missing

EVERYTHING = (*FAULTS, *DEATHS_OF_PARTS, *KERNELS, *RESIZES, *WRAPPED)


def chosen(words: list[str]) -> list[Any]:
    """The faults whose name has one of these words; all without words."""
    found = [fault for fault in EVERYTHING if not words or any(word in fault.name for word in words)]
    if not found:
        sys.exit(f"no fault has {' or '.join(words)} in its name: {', '.join(f.name for f in EVERYTHING)}")
    return found


def campaign(given: argparse.Namespace, plane: str, count: int) -> tuple[list[Outcome], dict[str, Any]]:
    """Play one plane's share."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with Campaign(
        given.seed, plane, size=given.ranks, faults=chosen(given.fault), views=not given.without_views
    ) as played:
        for outcome in played.trials(count, given.first):
            outcomes.append(outcome)
            tell(outcome, began, verbose=given.verbose)
            if time.monotonic() - began > given.minutes * 60:
                break
        left = played.stop()
    return outcomes, {"plane": plane, "pools": played.pools, "left_at_the_end": left}


def tell(outcome: Outcome, began: float, *, verbose: bool) -> None:
    """A line for a trial that was played, and its story if it is wanted or needed."""
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


def partitions(given: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any]]:
    """Cut hosts off."""
    if reason := missing():
        sys.exit(reason)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with Partitions(given.seed) as played:
        for outcome in played.trials(given.partitions, given.first):
            outcomes.append(outcome)
            tell(outcome, began, verbose=given.verbose)
    return outcomes, {"plane": "tls", "pools": played.jobs, "left_at_the_end": []}


def elastic(given: argparse.Namespace, plane: str, count: int) -> tuple[list[Outcome], dict[str, Any]]:
    """Let ranks come and go on one plane while they train."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with ElasticCampaign(given.seed, plane, views=not given.without_views) as played:
        for outcome in played.play(count, given.first):
            outcomes.append(outcome)
            tell(outcome, began, verbose=given.verbose)
            if time.monotonic() - began > given.minutes * 60:
                break
        left = played.stop()
    return outcomes, {"plane": plane, "pools": played.pools, "left_at_the_end": left}


def elastic_hosts(given: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any]]:
    """Let whole hosts come and go while their ranks train."""
    if reason := missing():
        sys.exit(reason)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with ElasticHosts(given.seed) as played:
        for outcome in played.play(given.elastic, given.first):
            outcomes.append(outcome)
            tell(outcome, began, verbose=given.verbose)
            if time.monotonic() - began > given.minutes * 60:
                outcome.wrong += played.finish()
                break
    return outcomes, {"plane": "tls", "pools": played.jobs, "left_at_the_end": []}


def publish(result: dict[str, Any], page: Path | None) -> None:
    """Write the table of a result into a page, or print it."""
    text = markdown(result)
    if page is None:
        print(text)
    else:
        write(page, result.get("campaign", "chaos"), text)


def ranks_of(given: argparse.Namespace) -> int | str:
    """How many ranks there are at once."""
    if given.hosts:
        return f"1 to {1 + SLOTS * (HOSTS - 1)}"
    return f"{LEAST} to {MOST}" if given.elastic else int(given.ranks)


def with_shared_memory(mebibytes: int) -> None:
    """Begin anew with a ``/dev/shm`` of this size; does nothing if it has that size."""
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
    planes = given.plane or ["shm", "gloo"]
    outcomes: list[Outcome] = []
    pools: list[dict[str, Any]] = []
    if given.hosts and not given.elastic:
        parser.error("--hosts belongs to --elastic")
    if given.partitions or given.hosts:
        outcomes, pool = elastic_hosts(given) if given.hosts else partitions(given)
        pools.append(pool)
    for plane in () if given.partitions or given.hosts else planes:
        play, count = (elastic, given.elastic) if given.elastic else (campaign, given.count)
        played, pool = play(given, plane, count // len(planes))
        outcomes += played
        pools.append(pool)
    found = rows(outcomes)
    print(table(found))
    bad = [story(outcome) for outcome in outcomes if not outcome.ok]
    result = {
        "benchmark": "chaos",
        "campaign": "elastic-hosts" if given.hosts else "elastic" if given.elastic else "chaos",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "ranks": ranks_of(given),
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
    sys.exit(bool(bad or any(pool["left_at_the_end"] for pool in pools)))


if __name__ == "__main__":
    main()
