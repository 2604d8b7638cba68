"""Horovod's names for TensorFlow and Keras are there, under Horovod's modules, with its parameters in its order."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path

from ranks import Ranks

NAMES = Path(__file__).parents[2] / "docs" / "reference" / "horovod" / "tensorflow.toml"
FREE = ("*args", "**kwargs")
"""Parameters that stand for any."""


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
