"""``import horovod`` means hvdlab where it was asked to, or where no other Horovod is installed; elsewhere it
doesn't."""

from __future__ import annotations

import os
from pathlib import Path

from hvdlab.horovod import environment
from hvdlab.horovod.import_hook import SHIM
from integration.horovod.conftest import Run

LINE = "hvdlab: `import horovod` means hvdlab"

NAMES = """
import importlib, sys, hvdlab.torch
import horovod, horovod.torch as hvd
assert hvd is hvdlab.torch and horovod.torch is hvd and sys.modules["horovod.torch"] is hvd
assert hvd.__name__ == hvd.__spec__.name == "hvdlab.torch"
from horovod import torch as again
assert again is hvd
from horovod.torch.mpi_ops import allreduce, size, Average, poll, synchronize
assert allreduce is hvd.allreduce
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    assert module.__name__.startswith("hvdlab."), module
    assert importlib.import_module(module.__name__) is module
    parent, _, child = name.rpartition(".")
    assert not parent or getattr(importlib.import_module(parent), child) is module
    scope = {}
    if parent:
        exec(f"from {parent} import {child}", scope)
        assert scope[child] is module, name
from horovod.common.process_sets import ProcessSet
assert ProcessSet is hvd.ProcessSet
from horovod.common.exceptions import HorovodInternalError
assert HorovodInternalError is hvd.HorovodInternalError
from horovod.common.util import split_list
assert horovod.common.util.split_list and horovod.common.process_sets.ProcessSet and hvd.mpi_ops.rank
from horovod.common.elastic import State, ObjectState, run_fn
from horovod.runner.elastic.worker import HostUpdateResult
assert HostUpdateResult.mixed == HostUpdateResult.added | HostUpdateResult.removed
for there in (horovod, horovod.common):
    assert not hasattr(there, "nonsense")
from horovod.torch.functions import broadcast_optimizer_state, broadcast_object
assert broadcast_optimizer_state is hvd.broadcast_optimizer_state
from horovod import run
import hvdlab
assert run is horovod.run is horovod.runner.run is hvdlab.run
assert horovod.__version__.startswith("0.28.1+hvdlab.")
import pickle
assert pickle.loads(pickle.dumps(hvd.Compression.fp16)) is hvd.Compression.fp16
assert pickle.loads(b"chorovod.torch.compression\\nFP16Compressor\\n.") is hvd.Compression.fp16
hvd.rank = lambda: 42
import horovod.torch
assert horovod.torch.rank() == 42
"""
MODULES = (
    "horovod,horovod.torch,horovod.torch.mpi_ops,horovod.torch.compression,horovod.torch.optimizer,"
    "horovod.torch.functions,horovod.common,horovod.common.basics,horovod.common.process_sets,"
    "horovod.common.exceptions,horovod.common.util,horovod.common.elastic,horovod.torch.sync_batch_norm,"
    "horovod.torch.elastic,horovod.torch.elastic.state,horovod.torch.elastic.sampler,horovod.data,"
    "horovod.data.data_loader_base,horovod.runner,horovod.runner.launch"
)


def test_names_resolve_to_hvdlab_after_install(python: Run) -> None:
    code = "import hvdlab\nassert hvdlab.install_as_horovod() is True\nassert hvdlab.install_as_horovod()\n"
    ran = python("-c", code + NAMES, MODULES)
    assert ran.stderr.count(LINE) == 1
    assert ran.stdout == ""


def test_names_resolve_to_hvdlab_by_the_path(python: Run) -> None:
    ran = python("-c", NAMES, MODULES, **environment({}))
    assert ran.stderr.count(LINE) == 1


def test_a_script_runs_unchanged(python: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, helper, multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], helper.process_sets.__name__)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(helper.name))\n"
    )
    (tmp_path / "helper.py").write_text(
        "from horovod.common import process_sets\nimport horovod\ndef name():\n    return horovod.__name__\n"
    )
    for arguments in (("train.py",), ("-m", "train")):
        ran = python("-m", "hvdlab.horovod", *arguments, "--lr", "0.1")
        assert ran.stdout == "['--lr', '0.1'] hvdlab.collectives.process_sets\nhvdlab.horovod\n"
    assert "script.py" in python("-m", "hvdlab.horovod", fails=True).stderr


def test_only_the_first_rank_says_so(python: Run) -> None:
    assert python("-c", "import horovod", HVDLAB_RANK="1", **environment({})).stderr == ""
    assert LINE in python("-c", "import horovod", HVDLAB_RANK="0", **environment({})).stderr


def test_logging_that_is_set_up_gets_the_line(python: Run) -> None:
    code = "import logging, hvdlab\nlogging.basicConfig(level='INFO')\nhvdlab.install_as_horovod()"
    assert python("-c", code).stderr.startswith("INFO:hvdlab:`import horovod` means hvdlab")


# -- a Horovod that is installed --------------------------------------------------------------------------------------

IS_REAL = "import horovod, horovod.torch\nassert horovod.REAL and horovod.torch.REAL\n"


def test_an_installed_horovod_is_not_hidden(python: Run, real_horovod: str) -> None:
    code = "import hvdlab\nassert hvdlab.install_as_horovod() is False\n"
    ran = python("-c", code + IS_REAL, PYTHONPATH=real_horovod)
    assert "stays the Horovod at" in ran.stderr
    before = os.pathsep.join([SHIM, real_horovod])  # in whichever order
    for path in (before, environment({"PYTHONPATH": real_horovod})["PYTHONPATH"]):
        assert python("-c", IS_REAL, PYTHONPATH=path).stderr == ""
    assert python("-c", "from hvdlab.horovod import offer\noffer()\n" + IS_REAL, PYTHONPATH=real_horovod)


def test_an_installed_horovod_is_hidden_if_asked(python: Run, real_horovod: str, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": real_horovod}
    code = "import hvdlab\nassert hvdlab.install_as_horovod(force=True)\n"
    python("-c", code + NAMES, MODULES, **variables)
    python("-c", NAMES, MODULES, **environment(variables, force=True))
    python(
        "-c", "import hvdlab.horovod as h\nh.offer()\n" + NAMES, MODULES, HVDLAB_AS_HOROVOD="1", **variables
    )
    (tmp_path / "script.py").write_text("import horovod.common.util\nprint(horovod.common.util.__name__)")
    assert python("-m", "hvdlab.horovod", "script.py", **variables).stdout == "hvdlab.horovod.common.util\n"


SPAWNED = """
import multiprocessing, horovod

def name():
    from horovod.common.basics import HorovodBasics

    world = HorovodBasics(__file__)
    world.init()
    return HorovodBasics.__module__, world.size()

if __name__ == "__main__":
    print(horovod.run(name, np=2))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(name))
"""


def test_processes_started_from_here_do_the_same(python: Run, real_horovod: str, tmp_path: Path) -> None:
    first = "import hvdlab\nhvdlab.install_as_horovod({})\n"
    for force, variables in (("", {}), ("force=True", {"PYTHONPATH": real_horovod})):
        (tmp_path / "script.py").write_text(first.format(force) + SPAWNED)
        ran = python("script.py", **variables)
        assert ran.stdout.splitlines()[-2:] == [
            "[('hvdlab.horovod.common.basics', 2), ('hvdlab.horovod.common.basics', 2)]",
            "('hvdlab.horovod.common.basics', 1)",
        ]


def test_horovod_itself_imported_before(python: Run, real_horovod: str) -> None:
    code = IS_REAL + "import hvdlab\nassert hvdlab.install_as_horovod() is False\n" + IS_REAL
    assert "was imported from" in python("-c", code, PYTHONPATH=real_horovod).stderr
    code = "import horovod, hvdlab\nhvdlab.install_as_horovod(force=True)"
    ran = python("-c", code, fails=True, PYTHONPATH=real_horovod)
    assert "ImportError: Horovod itself was imported already" in ran.stderr


def test_a_directory_of_that_name_is_no_horovod(python: Run, tmp_path: Path) -> None:
    (tmp_path / "horovod" / "docs").mkdir(parents=True)
    code = "import hvdlab\nassert hvdlab.install_as_horovod()\n"
    python("-c", code + NAMES, MODULES)
    python("-c", "from hvdlab.horovod import offer\noffer()\n" + NAMES, MODULES)


def test_the_switch_turns_it_off(python: Run, real_horovod: str) -> None:
    variables = {**environment({}), "HVDLAB_AS_HOROVOD": "0"}
    assert "No module named 'horovod'" in python("-c", "import horovod", fails=True, **variables).stderr
    variables["PYTHONPATH"] += os.pathsep + real_horovod
    python("-c", IS_REAL, **variables)
    code = "from hvdlab.horovod import offer\noffer()\nimport horovod"
    assert "No module named 'horovod'" in python("-c", code, fails=True, HVDLAB_AS_HOROVOD="0").stderr


def test_nothing_happens_unasked(python: Run) -> None:
    for code in ("import horovod", "import hvdlab, hvdlab.torch\nimport horovod"):
        assert "No module named 'horovod'" in python("-c", code, fails=True).stderr


def test_uninstall(python: Run, real_horovod: str) -> None:
    code = (
        "import sys, hvdlab, hvdlab.horovod as h\npath, finders = sys.path[:], sys.meta_path[:]\n"
        "hvdlab.install_as_horovod(force=True)\nimport horovod.torch as before\nimport horovod.common.util\n"
        "h.uninstall()\nassert (path, finders) == (sys.path, sys.meta_path)\n"
        "import os\nassert 'HVDLAB_AS_HOROVOD' not in os.environ and os.environ['PYTHONPATH'] in path\n"
        "assert not [name for name in sys.modules if name.startswith('horovod')]\n"
    )
    python(
        "-c", code + IS_REAL + "import hvdlab.torch\nassert hvdlab.torch is before", PYTHONPATH=real_horovod
    )


# -- missing features -------------------------------------------------------------------------------------------------


def test_modules_that_are_not_there_say_what_to_use(python: Run) -> None:
    code = (
        "import importlib.util, hvdlab\nhvdlab.install_as_horovod()\n"
        "for name in 'runner.driver runner.elastic.driver'.split():\n"
        "    for how in ('import horovod.{}', 'from horovod.{} import x'):\n"
        "        try:\n            exec(how.format(name))\n"
        "        except ImportError as error:\n            assert 'Use `hvdlab run' in str(error), error\n"
        "        else:\n            raise AssertionError(name)\n"
        "try:\n    import horovod.nonsense\n"
        "except ModuleNotFoundError as error:\n    assert str(error) == \"No module named 'horovod.nonsense'\"\n"
    )
    python("-c", code)


def test_the_stand_in_is_light(python: Run) -> None:
    heavy = "('numpy', 'torch', 'IPython', 'ipyparallel', 'mpi4py')"
    code = f"import sys, horovod\nassert not [name for name in {heavy} if name in sys.modules]"
    python("-c", code, **environment({}))


def test_the_environment_keeps_what_was_there() -> None:
    assert environment({}) == environment({"PYTHONPATH": ""}) == {"PYTHONPATH": SHIM}
    assert environment({"PYTHONPATH": "/a:/b"}) == {"PYTHONPATH": f"/a:/b:{SHIM}"}
    forced = {"PYTHONPATH": f"{SHIM}:/a:/b", "HVDLAB_AS_HOROVOD": "1"}
    assert environment({"PYTHONPATH": f"/a:/b:{SHIM}"}, force=True) == forced


def test_empty_entries_of_the_python_path_are_kept() -> None:
    # They stand for the working directory.
    assert environment({"PYTHONPATH": "/a::/b"}) == {"PYTHONPATH": f"/a::/b:{SHIM}"}
    assert environment({"PYTHONPATH": f":/a:{SHIM}"}, force=True)["PYTHONPATH"] == f"{SHIM}::/a"


def test_horovodrun_as_a_module(python: Run) -> None:
    assert (
        "Available Controllers"
        in python("-m", "horovod.runner.launch", "--check-build", **environment({})).stdout
    )
    code = (
        "import sys\nfrom horovod.runner import launch\n"
        "assert launch.parse_args().num_proc == 3 and launch.parse_args().command == ['python', 'x.py']\n"
        "launch.check_build(False)\nassert launch.is_gloo_used() and not launch.is_gloo_used(use_mpi=True)\n"
    )
    assert "hvdlab v" in python("-c", code, "-np", "3", "python", "x.py", **environment({})).stdout
