"""Names, calls, variables and flags that public code for Horovod has, as `tests/data/real_names.json` counts them.

Each module is imported as its users write it, in a process of its own: a name that another import happens to bind would be missing for them.
The processes are forked from one that has imported the frameworks, which takes seconds, and nothing of hvdlab.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.settings import VARIABLES
from hvdlab.runner.flags import FLAGS
from support.ranks.program import printed

REAL = json.loads((Path(__file__).parents[2] / "data" / "real_names.json").read_text())
NEEDS = {
    "horovod.mxnet": "mxnet",
    "horovod.ray": "ray",
    "horovod.spark": "pyspark",
    "horovod.tensorflow": "tensorflow",
}
"""Packages without which these modules and those below them can't be imported."""

FRAMEWORKS = tuple(
    name for name in ("numpy", "torch", "tensorflow", "tf_keras") if importlib.util.find_spec(name)
)
"""Modules that each process finds imported."""

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


def _printed(script: str, given: object) -> Any:
    """Return the last line printed by a script in a process of its own, from JSON."""
    return printed(script, given, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, FRAMEWORKS)


def _skip_without(module: str) -> None:
    for name, package in NEEDS.items():
        if (module == name or module.startswith(f"{name}.")) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("module", sorted(set(REAL["names"]) - {"?"}))
def test_names_and_calls_of_users_code_are_there_after_its_own_import(module: str) -> None:
    _skip_without(module)
    found = _printed(CHECK, [module, REAL["names"][module]])
    assert sorted(found) == sorted(name for name in MISSING if name.startswith(f"{module}: "))


SUBMODULES = {
    "horovod": ("common", "runner"),
    "horovod.data": ("data_loader_base",),
    "horovod.keras": ("callbacks", "elastic"),
    "horovod.mxnet": ("compression", "functions", "mpi_ops"),
    "horovod.ray": ("adapter", "elastic", "elastic_v2", "runner", "strategy", "worker"),
    "horovod.spark": ("runner",),
    "horovod.tensorflow": (
        *(
            "compression",
            "elastic",
            "functions",
            "gradient_aggregation",
            "mpi_ops",
            "sync_batch_norm",
            "util",
        ),
    ),
    "horovod.tensorflow.keras": ("callbacks", "elastic"),
    "horovod.torch": (
        *("compression", "elastic", "elastic.sampler", "elastic.state", "functions", "mpi_ops", "optimizer"),
        "sync_batch_norm",
    ),
}
"""Modules that Horovod's packages bind by their own imports: programs use them after the import of the package alone."""
COMMON = ("basics", "elastic", "exceptions", "process_sets", "util")
"""Modules of ``horovod.common`` that are there once a binding has been imported."""

CHECK_SUBMODULES = """
import hvdlab, importlib, json, operator, sys
hvdlab.install_as_horovod()
module, submodules, common = json.loads(sys.stdin.read())
there = importlib.import_module(module)
root = sys.modules["horovod"]
found = [(f"{module}.{name}", there, name) for name in submodules]
found += [(f"horovod.common.{name}", root, f"common.{name}") for name in common]
values = [(full, operator.attrgetter(name)(owner)) for full, owner, name in found]
# Only now: an import binds the module that it imports.
print(json.dumps([full for full, value in values if value is not importlib.import_module(full)]))
"""


@pytest.mark.parametrize("module", SUBMODULES)
def test_submodules_are_there_after_the_import_of_their_package_alone(module: str) -> None:
    _skip_without(module)
    common = COMMON if module in ("horovod.mxnet", "horovod.tensorflow", "horovod.torch") else ()
    assert _printed(CHECK_SUBMODULES, [module, SUBMODULES[module], common]) == []


OF_HOROVOD = {
    "_allreduce": ("keras", "legacy", "scaling"),
    "_allreduce_grads": ("keras", "legacy", "scaling"),
    "_optimizer": ("tensorflow",),
    "skip_synchronize": ("torch",),
    "synchronize": ("torch",),
}
"""Attributes that Horovod's optimizers have and plain ones lack, and the kinds of optimizer that have them."""
OF_ITS_FRAMEWORK = {
    "__class__": ("torch", "tensorflow", "keras"),
    "_compute_gradients": ("legacy",),
    "add_param_group": ("torch",),
    "apply_gradients": ("tensorflow", "keras"),
    "compute_gradients": ("tensorflow",),
    "from_config": ("keras",),
    "get_config": ("keras",),
    "get_scaled_loss": ("scaling",),
    "get_unscaled_gradients": ("scaling",),
    "get_weights": ("legacy",),
    "iterations": ("keras",),
    "load_state_dict": ("torch",),
    "lr": ("legacy",),
    "minimize": ("tensorflow", "legacy"),
    "param_groups": ("torch",),
    "state_dict": ("torch",),
    "step": ("torch",),
    "variables": ("tensorflow", "keras"),
    "zero_grad": ("torch",),
}
"""Attributes of plain optimizers, and kinds that have them: TensorFlow 1's, those of Keras 2's ``legacy``, and Keras 2's loss scaling."""
OF_THE_PROGRAM = ("local_var_registed", "raw_allreduce", "raw_allreduce_grads")
"""Attributes that programs give an optimizer of Horovod's, to find them again."""
OF_NO_OPTIMIZER = {
    "backward": "of apex's FP16_Optimizer, which the program puts around it",
    "items": "of a dictionary of optimizers",
    "set_jit": "of tf.config.optimizer",
}
"""Attributes of other objects that the programs call ``optimizer``."""

CHECK_OPTIMIZERS = """
import importlib.util, json, sys
import hvdlab
hvdlab.install_as_horovod()
import horovod.torch as hvd
import torch
names, own = json.loads(sys.stdin.read())

def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)

hvd.init()
pairs = {"torch": (sgd(), hvd.DistributedOptimizer(sgd())), "torch, Adasum": (sgd(), hvd.DistributedOptimizer(sgd(), op=hvd.Adasum))}
if importlib.util.find_spec("tensorflow"):
    import horovod.keras, horovod.tensorflow, horovod.tensorflow.keras, keras, tensorflow as tf
    kinds = {"tensorflow": (horovod.tensorflow, lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1))}
    for package in ("keras", "tf_keras"):
        if importlib.util.find_spec(package):
            there = importlib.import_module(package)
            def sgd(there=there):
                return there.optimizers.SGD(0.1)
            def scaled(there=there):
                return there.mixed_precision.LossScaleOptimizer(there.optimizers.SGD(0.1))
            for number, binding in enumerate((horovod.tensorflow, horovod.keras, horovod.tensorflow.keras)):
                kinds[f"keras, {package} {number}"] = binding, sgd
            kinds[f"{'keras' if package == 'keras' else 'scaling'}, {package} with loss scaling"] = binding, scaled
    if importlib.util.find_spec("tf_keras"):
        import tf_keras
        kinds["legacy, tf_keras"] = horovod.tensorflow.keras, lambda: tf_keras.optimizers.legacy.SGD(0.1)
    for kind, (binding, make) in kinds.items():
        pairs[kind] = make(), binding.DistributedOptimizer(make())

def has(value, name):
    try:
        getattr(value, name)
    except AttributeError:
        return False
    return True

found = {}
for kind, (plain, made) in pairs.items():
    lost = [name for name in names if has(plain, name) and not has(made, name)]
    there = [name for name in names if has(made, name)]
    for name in own:
        mark = object()
        setattr(made, name, mark)
        if getattr(made, name) is not mark:
            lost.append(name)
    for name in ("_allreduce", "_allreduce_grads"):  # which programs replace
        if has(made, name):
            mark = lambda *arguments: arguments
            setattr(made, name, mark)
            if getattr(made, name) is not mark:
                lost.append(name)
    found[kind] = there, lost
print(json.dumps(found))
"""


def test_attributes_of_optimizers_are_there() -> None:
    names = [name for name in REAL["optimizer_attributes"] if name not in OF_THE_PROGRAM]
    assert set(names) == {*OF_HOROVOD, *OF_ITS_FRAMEWORK, *OF_NO_OPTIMIZER}
    found = _printed(CHECK_OPTIMIZERS, [names, OF_THE_PROGRAM])
    assert {kind: lost for kind, (_, lost) in found.items() if lost} == {}
    for kind, (there, _) in found.items():
        first = kind.partition(",")[0]
        expected = {
            name
            for table in (OF_HOROVOD, OF_ITS_FRAMEWORK)
            for name, kinds in table.items()
            if first in kinds
        }
        assert expected - set(there) == set(), kind
        assert set(there) & set(OF_NO_OPTIMIZER) == set(), kind


def test_variables_are_settings_or_of_horovods_build() -> None:
    known = {variable.name for variable in VARIABLES}
    page = (Path(__file__).parents[3] / "docs" / "reference" / "horovod.md").read_text()
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
