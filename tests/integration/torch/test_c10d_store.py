"""The store of process groups in a world: its values, also through torch's C++, and the events that end a wait for a
value."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvdlab.collectives import context
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, InvalidRequestError
from hvdlab.torch.c10d.store import KeeperAnswer, KeeperRequest, StoreLink, StoreState
from hvdlab.torch.c10d.world import C10dWorld
from support.patience import HOUR, PATIENCE
from support.ranks.resident import RankGone, Ranks


class Asking:
    """Ranks that ask for values of one space."""

    def __init__(self) -> None:
        self.state = StoreState()
        self._number = 0

    def __call__(
        self, rank: int, operation: str, *keys: str, space: str = "s", **what: Any
    ) -> list[tuple[int, KeeperAnswer]]:
        self._number += 1
        return self.state.handle(rank, KeeperRequest(self._number, space, operation, keys, **what))


def test_what_waits_for_keys_is_answered_once_all_are_there() -> None:
    ask = Asking()
    assert ask(1, "get", "a", "b") == []
    assert ask(2, "wait", "b") == []
    assert ask(0, "set", "a", values=(b"1",)) == [(0, KeeperAnswer(3))]
    assert ask(0, "append", "b", values=(b"2",)) == [
        (0, KeeperAnswer(4)),
        (1, KeeperAnswer(1, (b"1", b"2"))),
        (2, KeeperAnswer(2)),
    ]


def test_what_is_asked_again_is_answered_as_it_was() -> None:
    state = StoreState()
    add = KeeperRequest(7, "s", "add", ("n",), amount=2)
    assert state.handle(1, add) == state.handle(1, add) == [(1, KeeperAnswer(7, amount=2))]
    assert state.handle(2, add) == [(2, KeeperAnswer(7, amount=4))]  # the same number, by another rank
    wait = KeeperRequest(8, "s", "get", ("late",))
    assert state.handle(1, wait) == state.handle(1, wait) == []
    assert state.handle(2, KeeperRequest(9, "s", "set", ("late",), (b"x",))) == [
        (2, KeeperAnswer(9)),
        (1, KeeperAnswer(8, (b"x",))),
    ]


def test_who_gave_up_gets_no_answer_and_a_new_group_ends_waits_of_the_one_before() -> None:
    ask = Asking()
    assert ask(1, "get", "a") == []
    assert ask(1, "forget", amount=1) == []
    assert ask(0, "set", "a", values=(b"1",)) == [(0, KeeperAnswer(3))]
    assert ask(2, "get", "c") == []
    assert ask(1, "get", "c", space="t") == []
    assert ask(0, "open", space="t") == [(2, KeeperAnswer(4, gone=True)), (0, KeeperAnswer(6))]
    assert ask(0, "check", "a", space="t") == [(0, KeeperAnswer(7, amount=0))]
    assert ask(0, "set", "c", space="t", values=(b"2",)) == [
        (0, KeeperAnswer(8)),
        (1, KeeperAnswer(5, (b"2",))),
    ]


def test_what_is_asked_of_a_former_group_is_answered_at_once() -> None:
    ask = Asking()
    ask(0, "open", space="s")
    ask(0, "set", "a", space="s", values=(b"1",))
    ask(0, "open", space="t")
    assert ask(1, "get", "never", space="s") == [(1, KeeperAnswer(4, gone=True))]
    assert ask(1, "set", "a", space="s", values=(b"2",)) == [(1, KeeperAnswer(5, gone=True))]
    assert ask(1, "get", "b", space="u") == [], "its ranks have met, and the keeper has not opened it yet"
    assert ask(0, "open", space="u") == [(0, KeeperAnswer(7))]
    assert ask(1, "check", "a", space="s") == ask.state.handle(1, KeeperRequest(8, "s", "check", ("a",)))
    assert ask(0, "set", "b", space="u", values=(b"3",)) == [
        (0, KeeperAnswer(9)),
        (1, KeeperAnswer(6, (b"3",))),
    ]


def _used() -> None:
    dist.init_process_group("hvdlab")
    rank, size = dist.get_rank(), dist.get_world_size()
    default: Any = dist.distributed_c10d._get_default_store()
    former = context.companion(C10dWorld).store
    assert former is not None
    prefixed: Any = dist.distributed_c10d.PrefixStore("prefix", default)
    for name, store in (("direct", default), ("prefix", prefixed)):
        store.set("bytes", bytes(range(256)))
        assert store.get("bytes") == bytes(range(256))
        store.add("count", rank + 1)
        dist.barrier()
        assert store.add("count", 0) == sum(range(1, size + 1))
        if rank == 0:
            assert store.compare_set("once", "", "first") == b"first"
            assert store.compare_set("once", "other", "second") == b"first"
            assert store.compare_set("never", "other", "second") == b"other"
            store.append("text", "a")
            store.append("text", "b")
            store.multi_set(["x", "y"], ["1", "2"])
        store.wait(["once", "text", "x", "y"], timedelta(seconds=60))
        assert store.multi_get(["x", "y"]) == [b"1", b"2"]
        assert store.check(["x", "y"])
        assert not store.check(["x", "never"])
        dist.barrier()
        if rank == 1:
            assert store.get("text") == b"ab"
            assert store.num_keys() >= 5
            assert store.delete_key("text")
            assert not store.delete_key("text")
            assert store.clone().get("x") == b"1"
            with pytest.raises(dist.DistStoreError, match=r"no rank has set .*nothing within 0\.1 s"):
                store.wait(["nothing"], timedelta(seconds=0.1))
        dist.barrier()
        assert not store.check(["text"]), name
    gloo = dist.new_group(backend="gloo")  # Gloo's C++ uses the store
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=gloo)
    assert tensor[0] == size
    dist.destroy_process_group()
    with pytest.raises(InvalidRequestError, match="rank 5 of 9"):
        dist.init_process_group("hvdlab", rank=5, world_size=9)
    dist.init_process_group("hvdlab")
    assert dist.distributed_c10d._get_default_store().num_keys() == 0  # nothing of the former group
    with pytest.raises(AbortedError, match="was made anew"):
        former.wait(["never"], timedelta(seconds=HOUR))
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("hvdlab")
    assert "MASTER_ADDR" not in os.environ
    dist.destroy_process_group()


_MET = threading.Event()


def _listen() -> None:
    context.init().on_mail("it waits", lambda sender, body: _MET.set())


def _waits(how: str) -> str:
    """Return the error that ended a rank's wait for a rank that never comes."""
    if how == "init":
        engine: Any = context.init()
        submit = engine.submit

        def submit_and_tell(request: Request, **kwargs: Any) -> Handle:
            handle: Handle = submit(request, **kwargs)
            engine.flush()
            engine.post("it waits", b"", [1])
            return handle

        engine.submit = submit_and_tell
        with pytest.raises(AbortedError) as caught:
            dist.init_process_group("hvdlab")
        return str(caught.value)
    dist.init_process_group("hvdlab")
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(AbortedError) as caught:
        dist.distributed_c10d.PrefixStore("p", store).get("never")
    return str(caught.value)


def _dies(how: str) -> None:
    if how == "store":
        dist.init_process_group("hvdlab")
    else:
        assert _MET.wait(PATIENCE)
    os._exit(3)


def _too_late() -> str:
    with pytest.raises(AbortedError) as caught:
        dist.init_process_group("hvdlab", timeout=timedelta(seconds=0.2))
    return str(caught.value)


def test_values_through_python_and_cpp_and_no_wait_outlives_a_rank() -> None:
    with Ranks(2, init=False, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_used, timeout=60)
        assert "timeout of the process group" in ranks.run(_too_late, ranks=[0], timeout=60)[0]
        for how, expected in (("init", "init_process_group"), ("store", "store.get `0//p/never`")):
            if how == "init":
                ranks.run(_listen, ranks=[1])
            running = ranks.start(_waits, how, ranks=[0])
            assert isinstance(ranks.outcomes(_dies, how, ranks=[1], timeout=60)[0], RankGone)
            text = running.results(60)[0]
            assert expected in text, text
            assert "rank 1 died" in text, text
            ranks.renew()


class OwnPost:
    """Engine of a rank that keeps the values itself: its mail comes back at once."""

    closed, living, rank = False, (0,), 0

    def __init__(self) -> None:
        self._callbacks: dict[str, Any] = {}

    def on_mail(self, topic: str, callback: Any) -> None:
        self._callbacks[topic] = callback

    def post(self, topic: str, body: bytes, to: Any) -> None:
        self._callbacks[topic](0, body)

    def on_world(self, callback: Any) -> None: ...

    on_leave = on_reconnected = on_world


def test_a_rank_s_successor_does_not_get_the_answers_of_its_predecessor() -> None:
    keeper = StoreState()
    values = []
    for value in (b"before", b"after"):  # two processes, one after the other, under one rank's number
        link = StoreLink(OwnPost())  # type: ignore[arg-type]
        link._state = keeper
        link.ask(0, (0,), "s", "set", PATIENCE, keys=("a",), values=(value,))
        values.append(link.ask(0, (0,), "s", "get", PATIENCE, keys=("a",)).values)
    assert values == [(b"before",), (b"after",)]
