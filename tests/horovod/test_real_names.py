"""Names, calls, variables and flags that public code for Horovod has, as `tests/data/real_names.json` counts them.

Each module is imported as its users write it, in an interpreter of its own: a name that another import happens to bind would be missing for them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.knobs.table import KNOBS
from hvdlab.runner.flags import FLAGS
from patience import PATIENCE

REAL = json.loads((Path(__file__).parents[1] / "data" / "real_names.json").read_text())
NEEDS = {
    "horovod.mxnet": "mxnet",
    "horovod.ray": "ray",
    "horovod.spark": "pyspark",
    "horovod.tensorflow": "tensorflow",
}
"""Packages without which these modules and those below them can't be imported."""

_UNSET = "without initial_lr, which Horovod wants as well"
MISSING = {
    "horovod.keras: callbacks.LearningRateScheduleCallback(end_epoch=, multiplier=, start_epoch=)": _UNSET,
    "horovod.keras: callbacks.LearningRateScheduleCallback(multiplier=, start_epoch=)": _UNSET,
    "horovod.keras: callbacks.LearningRateWarmupCallback(verbose=, warmup_epochs=)": _UNSET,
    "horovod.run.runner: the module": "gone since Horovod 0.20",
    "horovod.tensorflow.keras: callbacks.LearningRateWarmupCallback(verbose=, warmup_epochs=)": _UNSET,
    "horovod.torch: DistributedOptimizer(_, algorithm_name=, algorithm_params=, named_parameters=, partition_threshold=, threshold=)": "of a fork of Horovod",
    "horovod.torch: allgath": "a slip of the program's",
    "horovod.torch: profiled": "of a fork of Horovod",
}
"""Names and calls that do not work, each with the reason. The list may only shrink."""

VARIABLES_OF_BUILDS = (
    *(
        "BUILD",
        "BUILT",
        "CMAKE",
        "CPU_ALLREDUCE",
        "CUDA_",
        "DDL_",
        "GPU",
        "MIXED",
        "MPICXX",
        "NCCL_",
        "RCCL",
        "ROCM",
    ),
    *("VERSION", "WITH", "ALLOW_MIXED", "CPU_OPERATIONS_DEFAULT"),
)
"""Beginnings of variables that Horovod's build reads, after `HOROVOD_`."""
OTHERS_VARIABLES = {
    "HOROVOD_AUTOTUNE_LOG_FILEPATH": "of determined, which sets HOROVOD_AUTOTUNE_LOG from it",
    "HOROVOD_CCL_BGT_AFFINITY": "of oneCCL",
    "HOROVOD_GROUPED_ALLREDUCES": "of determined",
    "HOROVOD_STARTUP_TIMEOUT_SECONDS": "of determined",
}
OF_PROGRAMS = {
    *(
        "--batch_size",
        "--capture",
        "--column_slice_threshold",
        "--distributed_backend",
        "--model",
        "--optimizer",
    ),
    *("--interleave", "-k", "-m", "-n", "-rxs", "-s"),
}
"""Flags of the programs, of `srun`, `numactl` and pytest on the same command lines."""

CHECK = """
import hvdlab, importlib, inspect, json, sys
hvdlab.install_as_horovod()
module, names = json.loads(sys.stdin.read())
BELOW = ("torch", "tensorflow", "keras", "spark", "ray", "mxnet")
failures = []
try:
    there = importlib.import_module(module)
except ImportError as error:
    names, failures = {}, [f"{module}: the module"]
for name, use in names.items():
    if name == "*":
        continue
    value, path = there, module
    try:
        for part in name.split("."):
            path = f"{path}.{part}"
            if module == "horovod" and part in BELOW:  # written as `import horovod.spark; horovod.spark.run(...)`
                importlib.import_module(path)
            value = getattr(value, part)
    except ModuleNotFoundError as error:
        if error.name not in ("pyspark", "ray", "mxnet"):
            raise
        continue
    except AttributeError:
        failures.append(f"{module}: {name}")
        continue
    for count, keywords in use["calls"]:
        try:
            inspect.signature(value).bind(*[None] * count, **dict.fromkeys(keywords))
        except TypeError:
            arguments = ["_"] * count + [f"{keyword}=" for keyword in keywords]
            failures.append(f"{module}: {name}({', '.join(arguments)})")
        except ValueError:
            pass  # of a function in C, which tells no signature
print(json.dumps(failures))
"""


@pytest.mark.parametrize("module", sorted(set(REAL["names"]) - {"?"}))
def test_names_and_calls_of_users_code_are_there_after_its_own_import(module: str) -> None:
    for name, package in NEEDS.items():
        if (module == name or module.startswith(f"{name}.")) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps([module, REAL["names"][module]]),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == sorted(name for name in MISSING if name.startswith(f"{module}: "))


def test_variables_are_settings_or_of_horovods_build() -> None:
    known = {knob.variable for knob in KNOBS}
    page = (Path(__file__).parents[2] / "docs" / "reference" / "horovod.md").read_text()
    unknown = [
        name
        for name in REAL["variables"]
        if name not in known
        and f"`{name}`" not in page
        and name not in OTHERS_VARIABLES
        and not name.removeprefix("HOROVOD_").startswith(VARIABLES_OF_BUILDS)
    ]
    assert unknown == []
    assert not [name for name in OTHERS_VARIABLES if name in known]


def test_flags_of_the_launcher_are_there() -> None:
    known: set[Any] = {name for flag in FLAGS for name in (*flag.names, *flag.off)}
    assert set(REAL["flags"]) - known == OF_PROGRAMS
