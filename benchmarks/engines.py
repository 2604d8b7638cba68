"""Costs of ranks on engines in common use: their start beside that of the engines' own trainers, an estimator's epoch,
an allreduce.

::

    make engines   # once: it makes out/engines
    out/engines/bin/python benchmarks/engines.py --json benchmarks/results/engines.json --page docs/reference/costs.md   # half an hour

Each part runs on one real engine on this machine, and the contenders take turns on it:

* ``ray``: a pool of four on a cluster of two nodes, from nothing to the first step of a training, beside Ray Train's TorchTrainer from ``fit()``
  to its first step; and the pool's next cell, which has no peer;
* ``spark``: the same on a standalone cluster of two workers, beside Spark's own TorchDistributor from ``run()``;
* ``estimator``: an epoch of ``TorchEstimator.fit`` on rows of Parquet, beside a plain loop over pyarrow (``spark_estimator.py``);
* ``allreduce``: 16 MiB between two ranks of one host under Ray, Slurm, ssh and Spark, each beside two ranks of the launcher ``local``.

A step is one of a linear layer of 1,000 inputs and outputs; all ranks use one thread. Figures are medians over the rounds. Slurm and sshd come from Debian's packages and
need root; unavailable engines are left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from pages import conditions, publish

RANKS = 4
WIDTH, BATCH = 1000, 8
ROWS = 200_000  # rows of Parquet in an epoch
NBYTES = 16 << 20  # bytes of an allreduce
CACHE = ROOT / "out/engines"
PREPARE = f"""
import torch, hvdlab.torch as hvd
hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear({WIDTH}, {WIDTH})
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones({BATCH}, {WIDTH})).square().mean().backward()
    optimizer.step()
step()
"""
"""The pool's first cell: torch, a model, and a step."""
MEASURED = f"""
import time
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
assert hvd.local_size() == 2, "the ranks are on two hosts"
source = np.ones({NBYTES} // 4, np.float32)
def rounds(count):
    times = []
    for _ in range(count):
        hvd.barrier()
        begin = time.perf_counter()
        hvd.allreduce(source, op=hvd.Sum, name="measured")
        times.append(time.perf_counter() - begin)
    return times
rounds(3)
"""
"""The first cell of ranks that reduce."""
ASKED = {
    "start on Ray": 0.5,
    "start on Spark": 0.5,
    "epoch of an estimator": 1.3,
    "allreduce under ray": 1.2,
    "allreduce under slurm": 1.2,
    "allreduce under ssh": 1.2,
    "allreduce under spark": 1.2,
}
"""The most that hvdlab's median may be, in units of its peer's."""
ASKED_SECONDS = {"next cell on Ray": 0.05, "next cell on Spark": 0.05}
"""The most that hvdlab's median may be, in seconds, where there is no peer."""
Times = dict[str, list[float]]
"""Seconds of each round, by what took them."""


# -- a step of the peers ----------------------------------------------------------------------------------------------


def peer_step(directory: str) -> None:
    """On a worker with a process group: a model, a step, and the time by this machine's clock in a file of its own."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    Path(directory, f"{os.getpid()}.step").write_text(str(time.monotonic()))


def spark_peer(directory: str) -> None:
    """Run as TorchDistributor's function."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    peer_step(directory)
    dist.destroy_process_group()


def last_step(directory: str) -> float:
    """Return when the last worker had done its step. Raises ``RuntimeError`` if one has not."""
    ends = [float(path.read_text()) for path in Path(directory).glob("*.step")]
    if len(ends) != RANKS:
        raise RuntimeError(f"{len(ends)} of {RANKS} workers of the peer did a step")
    return max(ends)


def timed_peer(run: Callable[[str], object]) -> float:
    """Return seconds from a call to the last worker's first step."""
    with tempfile.TemporaryDirectory() as directory:
        begin = time.monotonic()
        run(directory)
        return last_step(directory) - begin


def timed_pool(launcher: str, options: Mapping[str, str]) -> tuple[float, float]:
    """Return seconds from nothing to the first step of a pool, and those of its next cell."""
    from hvdlab.kernel_ext.notebook.pool import Pool

    begin = time.monotonic()
    with Pool.start(RANKS, launcher=launcher, launcher_options=options, timeout=600) as pool:
        checked(pool, PREPARE)
        first = time.monotonic()
        checked(pool, "step()")
        return first - begin, time.monotonic() - first


def checked(pool: Any, source: str) -> Any:
    """Return a cell's result. Raises ``RuntimeError`` if it failed."""
    results = pool.run(source)
    if results.errors:
        raise RuntimeError(str(results.errors))
    return results


# -- the parts --------------------------------------------------------------------------------------------------------


def ray_part(rounds: int) -> dict[str, Times]:
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    from support.clusters.ray import started

    scaling = ray.train.ScalingConfig(num_workers=RANKS, placement_strategy="SPREAD")
    starts: Times = {"hvdlab": [], "TorchTrainer": []}
    cells: Times = {"hvdlab": []}
    with ExitStack() as ended, tempfile.TemporaryDirectory() as results:
        cluster = started(2, num_cpus=8, object_store_memory=100 << 20)
        ended.callback(cluster.shutdown)
        ray.init(address=cluster.address, log_to_driver=False)
        ended.callback(ray.shutdown)

        def fit(directory: str) -> None:
            TorchTrainer(
                lambda config: peer_step(config["directory"]),
                train_loop_config={"directory": directory},
                scaling_config=scaling,
                run_config=ray.train.RunConfig(storage_path=results),
            ).fit()

        for _ in range(rounds):
            start, cell = timed_pool("ray", {"placement": "spread"})
            starts["hvdlab"].append(start)
            cells["hvdlab"].append(cell)
            starts["TorchTrainer"].append(timed_peer(fit))
    return {"start on Ray": starts, "next cell on Ray": cells}


def spark_context(master: str) -> Any:
    from pyspark import SparkConf, SparkContext

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
    }
    context = SparkContext(conf=SparkConf().setMaster(master).setAppName("hvdlab").setAll(settings.items()))
    context.setLogLevel("OFF")
    return context


def spark_part(rounds: int) -> dict[str, Times]:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    from engines.spark.spark_cluster import SparkCluster

    starts: Times = {"hvdlab": [], "TorchDistributor": []}
    cells: Times = {"hvdlab": []}
    with ExitStack() as ended, tempfile.TemporaryDirectory() as directory:
        cluster = ended.enter_context(SparkCluster(Path(directory), cores=RANKS // 2))
        os.environ.update(cluster.environment)
        context = spark_context(cluster.address)
        ended.callback(context.stop)
        SparkSession(context)  # the peer asks for one
        context.parallelize(range(RANKS), RANKS).map(str).collect()  # executors are there for both

        def run(place: str) -> None:
            TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(spark_peer, place)

        for _ in range(rounds):
            start, cell = timed_pool("spark", {})
            starts["hvdlab"].append(start)
            cells["hvdlab"].append(cell)
            starts["TorchDistributor"].append(timed_peer(run))
    return {"start on Spark": starts, "next cell on Spark": cells}


def estimator_part(rounds: int) -> dict[str, Times]:
    import spark_estimator as rows

    from hvdlab.runner.run_function import run

    epochs, batch = 3, 256
    found: Times = {"hvdlab": [], "plain loop": []}
    with tempfile.TemporaryDirectory() as place:
        rows.write(Path(place), ROWS)
        for _ in range(rounds):
            found["plain loop"] += run(rows.plain, (place, batch, epochs + 1), num_proc=1)[0][1:]
            found["hvdlab"] += rows.estimated(place, batch, epochs)
    return {"epoch of an estimator": found}


def allreduce_part(rounds: int) -> dict[str, Times]:
    found = {}
    for launcher, measured in (
        ("ray", under_ray), ("slurm", under_slurm), ("ssh", under_ssh), ("spark", under_spark)
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            times = measured(Path(directory), rounds)
        if isinstance(times, str):
            say(f"allreduce under {launcher} is left out: {times}")
        else:
            found[f"allreduce under {launcher}"] = times
    return found


PARTS: dict[str, Callable[[int], dict[str, Times]]] = {
    "ray": ray_part,
    "spark": spark_part,
    "estimator": estimator_part,
    "allreduce": allreduce_part,
}


# -- two ranks of one host --------------------------------------------------------------------------------------------


def under_ray(directory: Path, rounds: int) -> Times | str:
    from support.clusters.ray import started

    cluster = started(1, num_cpus=8, object_store_memory=100 << 20)
    try:
        return in_turns("ray", rounds, environment={"RAY_ADDRESS": cluster.address})
    finally:
        cluster.shutdown()


def under_slurm(directory: Path, rounds: int) -> Times | str:
    from support.clusters.debian_packages import Unavailable
    from support.clusters.slurm import SlurmCluster

    try:
        cluster = SlurmCluster.made(directory)
    except Unavailable as error:
        return str(error)
    with cluster:
        environment = {**cluster.environment, "IPYTHONDIR": str(directory)}
        return in_turns("slurm", rounds, options={"nodes": "1"}, environment=environment)


def under_ssh(directory: Path, rounds: int) -> Times | str:
    from support.clusters.debian_packages import Unavailable
    from support.clusters.sshd import serving
    from support.network import namespaces as hosts

    if reason := hosts.missing():
        return str(reason)
    with hosts.Network(2) as network:
        first, second = network.hosts
        try:
            with serving(second, CACHE / "sshd", directory) as shell:
                return in_turns(
                    "ssh",
                    rounds,
                    on=f"{second.name}:2",
                    options={"shell": shell},
                    environment={**first.environment(), "IPYTHONDIR": str(directory)},
                    wrapped=first.command,
                )
        except Unavailable as error:
            return str(error)


def under_spark(directory: Path, rounds: int) -> Times | str:
    from engines.spark.spark_cluster import SparkCluster

    with SparkCluster(directory) as cluster:
        return in_turns("spark", rounds, environment=cluster.environment)


def in_turns(
    launcher: str,
    rounds: int,
    *,
    on: str = "",
    options: Mapping[str, str] | None = None,
    environment: Mapping[str, str],
    wrapped: Callable[[Sequence[str]], list[str]] = list,
) -> Times:
    """Return the findings of a separate process, which has a pool of this launcher and a local one."""
    words = [sys.executable, str(Path(__file__).resolve()), "--pool-of", launcher, "--rounds", str(rounds)]
    more = ["--hosts", on, "--options", json.dumps(dict(options or {}))]
    return found_by([*wrapped([*words, *more])], environment)


def two_pools(launcher: str, on: str, options: Mapping[str, str], rounds: int) -> Times:
    """Return seconds of each round of two pools of two ranks, the slower rank's."""
    from hvdlab.kernel_ext.notebook.pool import Pool

    found: Times = {"hvdlab": [], "local": []}
    with ExitStack() as ended:
        if launcher == "spark":
            ended.callback(spark_context(os.environ["SPARK_MASTER"]).stop)
        pools = {
            "hvdlab": Pool.start(
                2, launcher=launcher, hosts=on or None, launcher_options=options, timeout=600
            ),
            "local": Pool.start(2),
        }
        for pool in pools.values():
            ended.enter_context(pool)
            checked(pool, MEASURED)
        for _ in range(5 * rounds):
            for name, pool in pools.items():
                results = checked(pool, "rounds(5)")
                found[name] += [max(pair) for pair in zip(results[0], results[1], strict=True)]
    return found


# -- report -----------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def found_by(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """Return the last line of a process's output, as JSON."""
    # Workers of peers import their function by its name.
    path = os.pathsep.join(
        filter(None, (str(ROOT / "benchmarks"), str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
    )
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **(environment or {}), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def summary(found: Mapping[str, Times]) -> dict[str, Any]:
    """Return medians, and the ratio of hvdlab's to its peer's beside its limit."""
    result: dict[str, Any] = {}
    for name, times in found.items():
        medians = {who: round(statistics.median(each), 4) for who, each in times.items()}
        result[name] = {"seconds": medians}
        peers = [seconds for who, seconds in medians.items() if who != "hvdlab"]
        if peers:
            result[name] |= {"ratio": round(medians["hvdlab"] / peers[0], 3), "asked": ASKED[name]}
        else:
            result[name] |= {"asked_seconds": ASKED_SECONDS[name]}
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result file, for a page."""
    lines = [["", "hvdlab", "beside it", "ratio", "asked"], ["---", "---:", "---:", "---:", "---:"]]
    for name, found in result["figures"].items():
        seconds = dict(found["seconds"])
        ours = seconds.pop("hvdlab")
        peer = "".join(f"{who} {duration(value)}" for who, value in seconds.items())
        ratio = f"{found['ratio']:.2f}" if "ratio" in found else ""
        asked = f"{found['asked']:.2f}" if "asked" in found else duration(found["asked_seconds"])
        lines.append([name, duration(ours), peer, ratio, asked])
    table = ["| " + " | ".join(line) + " |" for line in lines]
    about = f"{result['rounds']} rounds by turns, {result['cores']} cores, Python {result['python']}, load average {result['load_average']}."
    return "\n".join([about, "", *table])


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="page whose table is written anew")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--pool-of", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", default="", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.pool_of:
        print(json.dumps(two_pools(given.pool_of, given.hosts, given.options, given.rounds)))
        return
    if given.part:
        print(json.dumps(PARTS[given.part](given.rounds)))
        return
    found: dict[str, Times] = {}
    for part in given.only or PARTS:
        # A process has one driver of each engine.
        words = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--rounds", str(given.rounds)]
        found |= found_by(words)
        say(f"{part}: {json.dumps(summary(found))}")
    result = {**conditions("engines", given.rounds), "figures": summary(found)}
    publish(result, markdown, json_file=given.json, page=given.page)


if __name__ == "__main__":
    # Workers look functions up in the module that this file is, which is not theirs named __main__.
    from engines import main as run_main

    run_main()
