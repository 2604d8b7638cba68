"""Links between the GPUs of two ranks, as the library reports them on a machine with several."""

from __future__ import annotations

import pytest

from hvdlab.collectives.planes.base import NVLINK, PCIE, SAME_GPU
from hvdlab.collectives.planes.gpu.gpu_plane import gpus, links_between
from support.ranks.resident import Ranks


def other_gpus() -> int:
    """Return how many GPUs a process sees beside the first."""
    from cuda.bindings import driver

    driver.cuInit(0)
    return int(driver.cuDeviceGetCount()[1]) - 1


def between_all() -> list[tuple[bool, list[str]]]:
    """Return for each GPU beside the first whether that reaches its memory, and the reported links."""
    first = gpus().open(0)
    found = []
    for ordinal in range(1, other_gpus() + 1):
        other = gpus().open(ordinal)
        with first:
            reaches = first.reaches(other.identity)
        found.append((reaches, list(links_between(first.identity, [other.identity], [1]))))
    return found


def same() -> list[str]:
    first = gpus().open(0)
    return list(links_between(first.identity, [first.identity], [1]))


def test_the_same_gpu_is_known_without_the_library() -> None:
    with Ranks(1, init=False) as ranks:
        assert ranks.run(same, timeout=60) == [[SAME_GPU]]


def test_gpus_that_reach_each_other_are_linked_by_something_that_the_library_knows() -> None:
    pytest.importorskip("pynvml")
    with Ranks(1, init=False) as ranks:
        if not ranks.run(other_gpus, timeout=60)[0]:
            pytest.skip("this machine has one GPU")
        reached = [links for reaches, links in ranks.run(between_all, timeout=60)[0] if reaches]
    assert all(links in ([NVLINK], [PCIE]) for links in reached)
