"""Horovod's names for TensorFlow and Keras are there, under Horovod's modules, with its parameters in its order."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.ranks.resident import Ranks

NAMES = Path(__file__).parents[3] / "docs" / "reference" / "horovod" / "tensorflow.toml"
FREE = ("*args", "**kwargs")
"""Parameters that stand for any others."""


def differences(known: dict[str, dict[str, str]]) -> list[str]:
    import hvdlab

    hvdlab.install_as_horovod()
    found = []
    for module, names in known.items():
        there = importlib.import_module(module)
        for name, described in names.items():
            value = getattr(there, name, None)
            if value is None:
                found.append(f"{module}.{name} is missing")
            elif described != "*" and not set(FREE) & set(described.split()):
                parameters = [each for each in inspect.signature(value).parameters if each != "kwargs"]
                if parameters[: len(described.split())] != described.split():
                    found.append(f"{module}.{name}({', '.join(parameters)}) is not ({described})")
    return found


def test_names_and_parameters(two: Ranks) -> None:
    known = tomllib.loads(NAMES.read_text())
    assert two.run(differences, known, ranks=[0], timeout=100) == [[]]


def submodules() -> None:
    """Further modules of Horovod from which scripts import, besides those in its documentation."""
    import hvdlab

    hvdlab.install_as_horovod()
    for module, names in {
        "mpi_ops": "allreduce grouped_allreduce reducescatter grouped_reducescatter barrier add_process_set "
        "remove_process_set global_process_set ProcessSet size rank join",
        "functions": "broadcast_variables broadcast_object allgather_object BroadcastGlobalVariablesHook",
        "gradient_aggregation": "LocalGradientAggregationHelper",
        "util": "vars_to_refs refs_to_vars",
    }.items():
        there = importlib.import_module(f"horovod.tensorflow.{module}")
        assert [name for name in names.split() if not hasattr(there, name)] == []


def refused() -> None:
    """Check that if TensorFlow is missing or too old, the import's error names the packages to install."""
    import sys
    from types import SimpleNamespace
    from unittest.mock import patch

    from hvdlab.tensorflow.installed import OLDEST, _imported

    with patch.dict(sys.modules, {"tensorflow": None}), pytest.raises(ImportError, match="pip install"):
        _imported()
    old: Any = SimpleNamespace(__version__="2.12.1")
    with (
        patch.dict(sys.modules, {"tensorflow": old}),
        pytest.raises(ImportError, match=f"TensorFlow {OLDEST} and newer; this is 2.12.1"),
    ):
        _imported()


def test_further_modules_and_installations(two: Ranks) -> None:
    two.run(submodules, ranks=[0])
    two.run(refused, ranks=[0])
