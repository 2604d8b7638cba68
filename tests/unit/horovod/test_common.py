"""``horovod.common``: helpers, errors, and the object that has Horovod's functions."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import pytest

import hvdlab.torch as hvd
from hvdlab.collectives.elastic import HostsUpdatedInterrupt
from hvdlab.collectives.types import ReduceOp
from hvdlab.horovod.common import basics, exceptions, util


def test_files_of_compiled_modules() -> None:
    suffix = util.get_ext_suffix()
    assert suffix.endswith(".so")
    assert util.get_extension_full_path("/a/b/c.py", "lib") == f"/a/b/lib{suffix}"
    assert util.get_extension_full_path("/a/b/c.py", "d", "lib") == f"/a/b/d/lib{suffix}"
    with pytest.raises(ValueError, match="name"):
        util.get_extension_full_path("/a/b/c.py")


def test_check_extension(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"no horovod\.caffe; it has horovod\.torch, .*horovod\.mxnet"):
        util.check_extension("horovod.caffe", "HOROVOD_WITH_CAFFE", __file__, "mpi_lib")
    monkeypatch.setitem(sys.modules, "mxnet", None)
    with pytest.raises(ImportError, match=r"horovod\.mxnet needs mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    (tmp_path / f"mine{util.get_ext_suffix()}").touch()
    util.check_extension("horovod.mine", "", str(tmp_path / "__init__.py"), "mine")
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not util.extension_available("torch")
    with pytest.raises(ImportError, match="torch, which is not installed"):
        util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")


def test_queries_print_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert not util.ddl_built(verbose=True)
    assert util.gloo_built(verbose=True)
    assert util.extension_available("torch", True)
    assert not util.gpu_available("mxnet")
    assert capsys.readouterr().out.splitlines() == [
        "hvdlab: DDL can be used: no",
        "hvdlab: Gloo can be used: yes",
        "hvdlab: the binding of torch can be used: yes",
    ]
    assert (util.mpi_built(), util.nccl_built(), util.ccl_built()) == (False, False, False)


def test_versions() -> None:
    assert util.is_version_greater_equal_than("1.10.0", "1.9.2")
    assert util.is_version_greater_equal_than("2.0.0+cpu", "2.0.0")
    assert not util.is_version_greater_equal_than("2.0.0rc1", "2.0.0")
    for wrong in ((1.0, "1.0.0"), ("1.0.0", 1), ("1.0.0", "1.0")):
        with pytest.raises(ValueError, match=r"[Vv]ersion"):
            util.is_version_greater_equal_than(*wrong)
    util.check_installed_version("pytorch", "9.9.9")


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELD", "before")
    monkeypatch.delenv("MADE", raising=False)
    monkeypatch.setenv("LEFT", "alone")
    with pytest.raises(KeyError), util.env(HELD="in", MADE="in", LEFT=None):  # noqa: PT012
        assert (os.environ["HELD"], os.environ["MADE"], os.environ["LEFT"]) == ("in", "in", "alone")
        raise KeyError
    assert os.environ["HELD"] == "before"
    assert "MADE" not in os.environ


def test_average_and_op() -> None:
    chosen = util.get_average_backwards_compatibility_fun(basics.HorovodBasics)
    assert chosen(None, None) is ReduceOp.AVERAGE
    assert chosen(ReduceOp.MAX, None) is ReduceOp.MAX
    for average, op in ((True, ReduceOp.AVERAGE), (False, ReduceOp.SUM)):
        with pytest.warns(DeprecationWarning, match="average="):
            assert chosen(None, average) is op
    with pytest.raises(ValueError, match="average="):
        chosen(ReduceOp.SUM, False)


def test_small_helpers() -> None:
    assert [n for n in range(-2, 17) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 3) == [[1], [], []]
    values: tuple[object, ...] = ([], "", iter(()), 3, None)
    assert [util.is_iterable(x) for x in values] == [True, True, True, False, False]
    assert util.EXTENSIONS == ["tensorflow", "torch", "mxnet"]


def test_errors() -> None:
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt is HostsUpdatedInterrupt
    error = exceptions.HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.0")
    assert str(error) == exceptions.get_version_mismatch_message("torch", "2.1", "2.0")


def test_basics_are_the_world_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("HVDLAB_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    world = basics.HorovodBasics(__file__, "mpi_lib")
    with pytest.raises(ValueError, match=r"hvd\.init"):
        world.rank()
    world.init(process_sets="dynamic")
    assert hvd.is_initialized()
    assert (world.rank(), world.size(), world.local_size(), world.is_homogeneous()) == (0, 1, 1, True)
    queries = [name for name in dir(world) if name.endswith(("_built", "_enabled"))]
    assert len(queries) == 9
    assert {name: getattr(world, name)() for name in queries} == {n: getattr(hvd, n)() for n in queries}
    world.shutdown()
    assert not world.is_initialized()
    assert "comm" in inspect.signature(world.init).parameters
