"""A standalone cluster of Spark's: ranks on executors of two workers, executors that are lost, and the example notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.spark.spark_cluster import SparkCluster
from support.jupyter.notebook_in_kernel import run_notebook
from support.patience import PATIENCE

DRIVER = Path(__file__).with_name("on_executors.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("spark")) as cluster:
        yield cluster


def driven(cluster: SparkCluster, case: str, directory: Path) -> Any:
    """Return a driver's findings. It is a process of its own: a process has one SparkContext."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), case, str(directory), str(4 * PATIENCE)],
        cwd=directory,
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(found.removeprefix("found "))


@pytest.fixture(scope="module")
def fixed(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the findings of runs on two executors."""
    return driven(cluster, "fixed", tmp_path_factory.mktemp("fixed"))


@pytest.fixture(scope="module")
def dynamic(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the findings of runs on executors that Spark adds and removes."""
    return driven(cluster, "dynamic", tmp_path_factory.mktemp("dynamic"))


def test_ranks_on_two_executors_of_a_machine_share_its_memory(fixed: Any) -> None:
    found = fixed["run"]
    assert [each[0] for each in found] == [3.0, 3.0]
    assert {each[1] for each in found} == {"w0", "w1"}
    assert [each[2:] for each in found] == [[0, 2], [1, 2]]


def test_the_loss_of_an_executor_ends_a_run_and_says_so(fixed: Any) -> None:
    said = fixed["lost"]
    # As the coordinator or Spark was first to notice.
    assert said.startswith(("rank 1 failed: ", "Spark job has failed"))
    assert "\nSpark says: " in said
    assert [each[0] for each in fixed["run after"]] == [3.0, 3.0]


def test_elastic_ranks_go_on_without_a_lost_executor_and_with_the_next(fixed: Any) -> None:
    first, second = fixed["elastic"]
    assert first[0] == second[0] == [2, 1, 2]


def test_run_is_refused_while_spark_adds_and_removes_executors(dynamic: Any) -> None:
    kind, said = dynamic["refused"]
    assert kind == "StartError"
    assert "spark.dynamicAllocation.enabled to false" in said
    assert "hvdlab.spark.run_elastic" in said


def test_elastic_ranks_come_and_go_with_executors_that_spark_adds(dynamic: Any) -> None:
    at_first, grown, later = dynamic["executors"]
    assert (at_first, grown, later) == (0, 2, 0)
    assert dynamic["grown"] == [[1, 2], [1, 2]]
    one, other = dynamic["elastic"]
    assert one[0] == other[0] == [2, 1, 2]


def test_the_notebook(cluster: SparkCluster, tmp_path: Path) -> None:
    run_notebook("spark", tmp_path, cluster.environment)
