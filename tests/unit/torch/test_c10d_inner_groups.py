"""Inner groups of NCCL's over a fake of torch's backend, and the ends of their operations, which only a look at the device shows."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Backend, HashStore

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.protocol.messages import Abort
from hvdlab.torch.c10d import inner_groups
from hvdlab.torch.c10d.inner_groups import make_inner
from hvdlab.torch.c10d.launch_ring import COLLECTIVES, LaunchSlot
from hvdlab.torch.c10d.watched_work import Generation, WatchedWork
from support.fakes import torch_nccl
from support.fakes.torch_nccl import FakeProcessGroupNCCL
from support.patience import PATIENCE

LIMIT = timedelta(seconds=PATIENCE)
Fake = type[FakeProcessGroupNCCL]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return the fake that torch has in this test."""
    return torch_nccl.install(monkeypatch)


class OwnStore(HashStore):
    """Store of one process, which can be closed as hvdlab's can."""

    def close(self) -> None: ...


def made(rank: int = 0, size: int = 1, store: Any = None) -> Any:
    """Make an inner group of NCCL's, and connect it."""
    inner = make_inner("nccl", cast(Any, store or OwnStore()), rank, size, LIMIT)
    inner.connect()
    return inner


# -- the group ------------------------------------------------------------------------------------------------------------


def test_torch_without_nccl_has_no_inner_group_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UnsupportedError, match="'nccl'"):
        made()


def test_its_waits_outlive_those_of_the_outer_group(nccl: Fake) -> None:
    inner = made()
    (backend,) = nccl.made
    assert backend.timeout == 2 * LIMIT
    assert (inner.group.rank(), inner.group.size()) == (0, 1)
    inner.close()


def test_its_backend_is_that_of_cuda_tensors(nccl: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    on_cpu = inner_groups._in_group

    def noted(backend: Any, store: Any, rank: int, size: int, device: str, kind: Any) -> Any:
        devices.append(device)
        assert kind == dist.ProcessGroup.BackendType.NCCL
        return on_cpu(backend, store, rank, size, device, kind)

    monkeypatch.setattr(inner_groups, "_in_group", noted)
    made().close()
    assert devices == ["cuda"]


def test_ranks_reduce_in_it(nccl: Fake) -> None:
    store, found = OwnStore(), dict[int, list[float]]()

    def reduce(rank: int) -> None:
        inner, tensor = made(rank, 2, store), torch.full((3,), float(rank + 1))
        work = inner.group.allreduce([tensor], AllreduceOptions())
        work.wait()
        assert work.is_completed()
        found[rank] = tensor.tolist()
        inner.close()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [3.0] * 3, 1: [3.0] * 3}


# -- its end --------------------------------------------------------------------------------------------------------------


def test_an_abort_is_torchs_and_a_close_after_it_adds_nothing(nccl: Fake) -> None:
    inner = made()
    (backend,) = nccl.made
    inner.abort()
    assert backend.ends == ["abort"]
    assert inner.group is not None  # a thread that launches sees that torch refuses
    inner.close()
    assert backend.ends == ["abort"]
    assert inner.group is None


def test_a_close_drops_torchs_backend(nccl: Fake) -> None:
    inner = made()
    backend = weakref.ref(nccl.made.pop())
    assert backend() is not None
    inner.close()
    inner.close()
    assert backend() is None


def test_an_abort_that_comes_after_the_close_does_nothing(nccl: Fake) -> None:
    """The control thread aborts the group of a generation that ends, while a user's thread destroys the group."""
    inner = made()
    (backend,) = nccl.made
    inner.close()
    inner.abort()
    assert backend.ends == []


def test_a_backend_of_torchs_has_the_calls_that_end_it() -> None:
    assert {"abort", "shutdown"} <= set(dir(Backend))


# -- its operations -------------------------------------------------------------------------------------------------------


class StreamWork:
    """Torch's object of an operation on a GPU: a wait for it lets the stream wait, and returns at once."""

    def __init__(self) -> None:
        self.is_done, self.waits = False, 0
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> bool:
        self.waits += 1
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.future


class Supervisor:
    """Watched group of CUDA tensors, in which nothing fails by itself."""

    on_device = True
    error = InvalidRequestError("rank 1 finished its cell without it")

    def report_failed(self, work: WatchedWork, /) -> None:
        raise AssertionError("torch's backend did not fail it")

    def give_up(self, work: WatchedWork, seconds: float, /) -> None:
        raise AssertionError("no thread waits for a GPU")

    def withdraw_interrupted(self) -> None:
        raise AssertionError("the user did not interrupt")

    def error_of(self, work: WatchedWork, /) -> Exception:
        return self.error

    def future_asked_for(self) -> None:
        """No interrupt is held."""

    def passed_to_native(self, error: Exception, /) -> None:
        raise AssertionError("no native code got an error")


def begun() -> tuple[WatchedWork, StreamWork]:
    """Return an operation that was handed over, and torch's object of it."""
    slot = LaunchSlot(1, COLLECTIVES, 1, 1, "all_reduce", None, None, "train.py:7", "", 0)
    work, inner = WatchedWork(Supervisor(), Generation(3), slot, PATIENCE), StreamWork()
    work.begun(inner, [])
    return work, inner


class UnmarkedWork:
    """A work of Gloo's between the end of its future and the mark that it has ended."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        raise RuntimeError("Work needs to be completed before calling result().")


def test_result_is_there_after_the_wait_before_gloo_has_marked_the_work() -> None:
    supervisor, outputs = Supervisor(), [torch.ones(2)]
    supervisor.on_device = False
    slot = LaunchSlot(1, COLLECTIVES, 1, 1, "all_reduce", None, None, "train.py:7", "", 0)
    work = WatchedWork(supervisor, Generation(3), slot, PATIENCE)
    work.begun(UnmarkedWork(outputs), [])
    assert work.wait()
    assert work.result() == outputs


def test_an_operation_on_a_gpu_is_over_once_the_gpu_has_done_it() -> None:
    work, inner = begun()
    assert not work.is_completed()
    assert work.wait()
    assert inner.waits == 1
    assert not work.is_completed()  # the stream waits for it, and the thread did not
    inner.is_done = True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def test_its_future_is_torchs_own() -> None:
    work, inner = begun()
    assert work.get_future() is inner.future


def test_its_wait_after_the_end_of_its_generation_has_the_error() -> None:
    work, inner = begun()
    work.generation.ended = Abort(0, 3, "failed", (1,), "", "")
    with pytest.raises(InvalidRequestError, match="rank 1 finished its cell without it"):
        work.wait()
    assert inner.waits == 0  # which could let the stream wait for ever
