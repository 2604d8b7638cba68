"""The page of attributes agrees with Horovod's objects as they are here, and an attribute that is set takes effect."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.collectives.errors import InvalidRequestError
from support.page_scripts import load_script
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

SCRIPT = Path(__file__).parents[3] / "docs" / "reference" / "horovod" / "attributes.py"

attributes = load_script(SCRIPT, "horovod_attributes")


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_the_page_is_what_is_found() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


class _Example:
    def __init__(self) -> None:
        self.plain = 1
        self.kept = 2

    def __setattr__(self, name: str, value: object) -> None:
        if name == "kept" and hasattr(self, "kept"):
            return  # without an error, and without effect
        super().__setattr__(name, value)

    @property
    def shown(self) -> str:
        return "x"


def test_what_is_found_by_reading_and_setting() -> None:
    example = _Example()
    found = {name: attributes.found(example, name) for name in ("plain", "kept", "shown", "gone")}
    assert found == {
        "plain": attributes.Attribute("int", True),
        "kept": attributes.Attribute("int", False),
        "shown": attributes.Attribute("str", False),
        "gone": attributes.Attribute("", False),
    }
    assert example.plain == 1


def test_a_reason_is_needed_just_where_something_does_not_work() -> None:
    works, is_read, is_gone = (
        attributes.Attribute(*each) for each in (("int", True), ("int", False), ("", False))
    )
    assert attributes.judged("x", works, "") == ""
    assert attributes.judged("x", is_read, "why") == "why"
    assert attributes.judged("x", is_gone, "why") == "why"
    assert attributes.judged("x", is_read, "property") == "as in Horovod"
    wrong = [(works, "why"), (is_read, ""), (is_gone, ""), (works, "property"), (is_gone, "property")]
    for seen, reason in wrong:
        with pytest.raises(attributes.Stale, match="x"):
            attributes.judged("x", seen, reason)


# -- distributed optimizers of torch ----------------------------------------------------------------------------------


two = resident_ranks(2, imports=["hvdlab.torch"])


def _step(optimizer: Any, parameter: torch.nn.Parameter) -> float:
    """Return how a step with the gradient `rank + 1` changes a parameter, with a learning rate of 1."""
    before = parameter.item()
    (parameter * (hvd.rank() + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return before - parameter.item()


def _settings_of_an_optimizer() -> list[Any]:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
    found = [_step(optimizer, parameter)]
    optimizer.op = hvd.Sum
    found.append(_step(optimizer, parameter))
    optimizer.op = hvd.Average
    optimizer.gradient_predivide_factor = 2.0
    found.append(_step(optimizer, parameter))
    optimizer.backward_passes_per_step = 2
    (parameter * 10).backward()
    found.append(_step(optimizer, parameter))
    optimizer.backward_passes_per_step = 1
    alone = hvd.add_process_set([0])
    optimizer.process_set = alone
    found.append(_step(optimizer, parameter))
    optimizer.process_set = hvd.global_process_set
    found.append(_step(optimizer, parameter))
    assert hvd.remove_process_set(alone)
    with pytest.raises(InvalidRequestError, match="not registered"):
        optimizer.process_set = alone
    for name, value in (
        ("op", hvd.Sum),
        ("op", hvd.Max),
        ("op", hvd.Adasum),
        ("gradient_predivide_factor", -1),
    ):
        with pytest.raises(InvalidRequestError):
            setattr(optimizer, name, value)  # a sum is not divided; the others are no settings
    parameter.sum().backward()
    with pytest.raises(InvalidRequestError, match="between a backward pass and step"):
        optimizer.gradient_predivide_factor = 1.0
    optimizer.step()
    optimizer.zero_grad()
    found.append(_step(optimizer, parameter))
    return found


def test_what_is_set_on_an_optimizer_counts_from_the_next_step(two: Ranks) -> None:
    for rank, found in enumerate(two.run(_settings_of_an_optimizer)):
        alone = float(rank + 1)
        assert found == [1.5, 3.0, 1.5, 11.5, alone, 1.5, 1.5]


def _sparse_gradients() -> list[list[int]]:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), op=hvd.Sum)
    found = []
    for optimizer.sparse_as_dense in (False, True, False):
        (table(torch.tensor([hvd.rank(), 3])) * torch.tensor([[1.0], [0.0]])).sum().backward()
        optimizer.synchronize()
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.to_dense()[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
        # Entries that are gathered are there even if they are zero; a dense gradient is made sparse again without them.
        found.append(gradient.coalesce().indices().tolist()[0])
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    return found


def test_sparse_gradients_are_reduced_as_it_is_set(two: Ranks) -> None:
    assert two.run(_sparse_gradients) == [[[0, 1, 3], [0, 1], [0, 1, 3]]] * 2


def _adasum_of_a_set() -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), op=hvd.Adasum)
    alone = hvd.add_process_set([0])
    optimizer.process_set = alone
    found = [_step(optimizer, parameter)]
    optimizer.process_set = hvd.global_process_set
    found.append(_step(optimizer, parameter))
    with pytest.raises(InvalidRequestError, match="Adasum"):
        optimizer.op = hvd.Sum
    assert hvd.remove_process_set(alone)
    return found


def test_the_process_set_of_adasum_is_set(two: Ranks) -> None:
    for rank, found in enumerate(two.run(_adasum_of_a_set)):
        # Adasum of parallel changes 1 and 2: the mean of them weighted by the formula, the same on both ranks.
        assert found[0] == rank + 1
        assert found[1] == pytest.approx(1 * (1 - 2 / 2) + 2 * (1 - 2 / 8))


def _ranks_of_a_set() -> list[Any]:
    chosen = hvd.ProcessSet([0])
    chosen.ranks = [1]
    hvd.add_process_set(chosen)
    found = [chosen.ranks, chosen.included()]
    for process_set in (chosen, hvd.global_process_set):
        with pytest.raises(InvalidRequestError, match="registered"):
            process_set.ranks = [0]
    assert hvd.remove_process_set(chosen)
    return found


def test_the_ranks_of_a_set_are_set_before_it_is_registered(two: Ranks) -> None:
    assert two.run(_ranks_of_a_set) == [[[1], False], [[1], True]]
