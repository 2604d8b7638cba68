"""Stores on parameter servers, on real ranks: dist_async."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import ssl
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives import context
from hvdlab.collectives.event_loop import WakeUp
from hvdlab.collectives.kvstore import server_store
from hvdlab.collectives.kvstore.servers.discovery import servers_of
from hvdlab.collectives.kvstore.servers.messages import VERSION, Attach, encode
from hvdlab.collectives.kvstore.servers.process import STRANGERS, JobObserver
from hvdlab.collectives.protocol.handshake import TlsAddress, parse_address
from hvdlab.kvstore import KVStoreError, RowSparse
from hvdlab.kvstore.lr_scheduler import CosineScheduler, FactorScheduler
from support.ranks.resident import Ranks, resident_ranks


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        started.run(start_servers)
        yield started


@pytest.fixture(scope="module")
def two_servers() -> Iterator[Ranks]:
    with Ranks(3, env={"HVDLAB_KV_SERVERS": "2"}) as started:
        started.run(start_servers)
        yield started


own_ranks = resident_ranks(3, scope="function")


def waits_are_recorded() -> list[str]:
    """Every wait here, however short."""
    server_store._WAITED_SECONDS = 0.0
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", full(0))
    seen: list[tuple[str, float]] = []
    kv._record = lambda name, value: seen.append((name, value))
    kv.pushpull("w", full(1), out=full(0))
    kv.barrier()
    assert all(value >= 0 for _, value in seen)
    return [name for name, _ in seen]


def rows_of_dense_weights(name: str) -> None:
    """Lazy updates of weights in parts on two servers, whose border is in the middle of a row; one process is the reference."""
    kv, alone = kvstore.create("dist_async"), kvstore.create("local")
    settings: dict[str, Any] = {"momentum": 0.9, "wd": 0.1} if name == "sgd" else {}
    for store in (kv, alone):
        store.set_optimizer(kvstore.optimizer.create(name, learning_rate=0.1, **settings))
    rng = np.random.default_rng(4)
    for key, shape in ((0, (7, 3)), (1, (3, 2))):
        start = rng.standard_normal(shape).astype("f4")
        kv.init(key, start)
        alone.init(key, start)
        for _ in range(4):
            out, expected = np.empty(shape, "f4"), np.empty(shape, "f4")
            for turn in range(kv.num_workers):  # in turn, so that there is one order
                rows = np.sort(rng.choice(shape[0], 2, replace=False))
                pushed = RowSparse(rng.integers(-8, 8, (2, shape[1])).astype("f4"), rows, shape)
                if turn == kv.rank:
                    kv.push(key, pushed)
                    kv.pull(key, out=out)
                kv.barrier()
                alone.push(key, pushed)
            kv.pull(key, out=out)
            kv.barrier()
            alone.pull(key, out=expected)
            assert out.tobytes() == expected.tobytes()


def start_servers() -> None:
    """Start the servers. They live as long as the ranks, so a fixture's have to come before its first test."""
    kvstore.create("dist_async")


# -- on the ranks -----------------------------------------------------------------------------------------------------


def full(value: float, *shape: int, dtype: str = "float32") -> Any:
    return np.full(shape or (3,), value, dtype)


def pulled(kv: Any, key: Any) -> Any:
    out = full(np.nan)
    kv.pull(key, out=out)
    assert len(set(out.tolist())) == 1
    return out[0]


def secrets_go_through_the_coordinator() -> None:
    engine = context.engine()
    submit, moved = engine.submit, list[bytes]()

    def watched(request: Any, **how: Any) -> Any:
        if request.input is not None:
            moved.append(np.asarray(request.input).tobytes())
        return submit(request, **how)

    engine.submit = watched  # type: ignore[method-assign]
    try:
        kvstore.create("dist_async")
    finally:
        del engine.submit
    links = list(servers_of(engine)._links.values())
    assert links
    assert moved
    for link in links:
        assert len(link.address.token) >= 32
        assert not any(link.address.token.encode() in data for data in moved)


def asynchronous() -> None:
    for name in ("dist_async", "dist_device_async"):
        kv = kvstore.create(name)
        assert (kv.type, kv.is_capable("optimizer")) == (name, True)
        kv.init("early", full(0))
        with pytest.raises(KVStoreError, match="set_optimizer"):
            kv.push("early", full(1))
        kv.set_optimizer(kvstore.optimizer.Test())
        kv.init("a", full(kv.rank))
        count, value = (3, 1) if kv.rank == 0 else (11, 2)
        for number in range(count):
            kv.push("a", full(value))
            if number % 2:
                assert pulled(kv, "a") >= value * (number + 1)  # one's own pushes are in it
        pulled(kv, "a")
        kv.barrier()
        assert pulled(kv, "a") == 3 + 22 * (kv.num_workers - 1)
        kv.barrier()
        out = full(0)
        kv.pushpull("a", [full(1), full(1)], out=out)
        assert out[0] >= 2
        kv.broadcast("b", full(5), out=(outs := [full(0), full(0, dtype="float64")]))
        assert [o.tolist() for o in outs] == [[5] * 3] * 2
        (server,) = kv.servers()
        assert (server.index, server.keys, server.bytes) == (0, 3, 36)
        assert server.pid not in (os.getpid(), 0)
        for method in (kv.save_optimizer_states, kv.load_optimizer_states):
            with pytest.raises(AssertionError, match="states for distributed training"):
                method("nowhere")
        kv.barrier()


def refused() -> None:
    kv = kvstore.create("dist_async")
    for optimizer, text in (
        (lambda key, gradient, weight: None, "functions don't travel"),
        (
            kvstore.optimizer.SGD(lr_scheduler=lambda n: 0.1),
            "lr_scheduler one of FactorScheduler.* not a function",
        ),
        (OwnOptimizer(), "not OwnOptimizer"),
    ):
        with pytest.raises(KVStoreError, match=text):
            kv.set_optimizer(optimizer)
    kv.set_optimizer("test")
    kv.init("a", full(1))
    refusals: tuple[tuple[Callable[[], object], type[Exception], str], ...] = (
        (lambda: kv.init("a", full(1)), KVStoreError, "duplicate init of key a"),
        (lambda: kv.init(3, full(1)), KVStoreError, "Mixed key types"),
        (lambda: kv.push("b", full(1)), KVStoreError, "key b doesn't exist"),
        (lambda: kv.pull("b", out=full(1)), KVStoreError, "key b doesn't exist"),
        (lambda: kv.push("a", full(1, 5)), KVStoreError, r"key 'a' has shape \(3,\)"),
        (lambda: kv.push("a", full(1, dtype="float64")), KVStoreError, "they need one type"),
        (lambda: kv.pull("a", out=full(1, 5)), KVStoreError, r"key 'a' has shape \(3,\)"),
        (lambda: kv.pull("a", out=full(1), ignore_sparse=False), KVStoreError, "row_sparse_pull"),
    )
    for call, error, text in refusals:
        with pytest.raises(error, match=text):
            call()
        assert pulled(kv, "a") == 1


class OwnOptimizer(kvstore.optimizer.SGD):
    """Optimizer of a class that servers don't have."""


def trained(name: str, settings: dict[str, Any], dtype: str) -> list[float]:
    """Train on servers; the same in one process is the reference, to the bit."""
    rng = np.random.default_rng(1)
    served, local = kvstore.create("dist_async"), kvstore.create("device")
    n, rank = served.num_workers, served.rank
    optimizer = kvstore.optimizer.create(name, **settings)
    served.set_optimizer(optimizer)
    local.set_optimizer(kvstore.optimizer.create(name, **settings))
    optimizer.lr = 1e9  # servers have it as it was
    start = rng.standard_normal((10, 5)).astype(dtype)
    served.init(0, start + rank)
    local.init(0, start)
    weights, expected = np.empty_like(start), np.empty_like(start)
    for _ in range(4):
        gradients = [
            rng.integers(-8, 8, start.shape).astype(dtype) / np.dtype(dtype).type(8) for _ in range(n)
        ]
        for turn in range(n):  # in turn, so that there is one order
            if turn == rank:
                served.pushpull(0, gradients[rank], out=weights)
            served.barrier()
            local.pushpull(0, gradients[turn], out=expected)
        served.pull(0, out=weights)
        served.barrier()
        assert weights.tobytes() == expected.tobytes()
    return [float(weight) for weight in weights.flat]


def new_rates(where: str) -> None:
    """Check that the rate changes while pushes of other workers may still be on their way; states stay, and later ones
    are at the new rate."""
    kv = kvstore.create(where)
    n, keys = kv.num_workers, [0, 1]
    with pytest.raises(KVStoreError, match="no optimizer whose learning rate"):
        kv.set_learning_rate(0.5)
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    kv.init(keys, [full(0), full(0)])
    weight, velocity = np.float32(0), np.float32(0)
    for rate in (1.0, 0.5, 2.0):
        kv.set_learning_rate(rate)
        for _ in range(2):
            kv.push(keys, [full(-1)] * 2)
            if where == "dist_async":  # each push is an update
                for _ in range(n):
                    velocity = np.float32(0.5) * velocity + np.float32(rate)
                    weight += velocity
            else:
                velocity = np.float32(0.5) * velocity + np.float32(rate * n)
                weight += velocity
        if where == "dist_async":
            kv.pull(keys, out=[full(0), full(0)])  # nothing of this worker is on its way
    for key in keys:
        pulled(kv, key)
    kv.barrier()
    assert [pulled(kv, key) for key in keys] == [weight] * 2
    kv.barrier()
    kv.set_optimizer(kvstore.optimizer.SGD(lr_scheduler=FactorScheduler(2, 0.5)))
    with pytest.raises(UserWarning, match="lr_scheduler"):
        kv.set_learning_rate(0.5)
    kv.barrier()


def spread() -> None:
    """Check that a large key is in parts on all servers, a small one on one."""
    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=0.5))
    kv.init([0, 1, 2], [full(1, 1000, 1001), full(2, 7), full(3, 5)])
    first, second = kv.servers()
    assert (first.index, second.index, first.pid == second.pid) == (0, 1, False)
    assert (first.keys, second.keys) == (2 + 0, 2)  # keys 0 and 2 / 0 and 1
    assert (first.bytes, second.bytes) == (4 * (500_500 + 5), 4 * (500_500 + 7))
    outs = [full(0, 1000, 1001), full(0, 7), full(0, 5)]
    values = np.arange(1_001_000, dtype="f4").reshape(1000, 1001)
    kv.pushpull([0, 1, 2], [values, full(1, 7), full(1, 5)], out=outs)
    kv.barrier()
    kv.pull([0, 1, 2], out=outs)
    n = kv.num_workers
    assert (outs[0] == 1 - 0.5 * n * values).all()
    assert (outs[1] == 2 - 0.5 * n).all()
    assert (outs[2] == 3 - 0.5 * n).all()
    sparse = kvstore.create("dist_async")
    sparse.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0))
    shape = (2000, 600)
    sparse.init("s", RowSparse(np.ones(shape, "f4"), np.arange(2000), shape))
    rows = np.array([3, 1500 + sparse.rank])
    sparse.push("s", RowSparse(np.ones((2, 600), "f4"), rows, shape))
    out = RowSparse(np.zeros((0, 600), "f4"), [], shape)
    sparse.row_sparse_pull("s", out=out, row_ids=np.array([3]))
    sparse.barrier()
    sparse.row_sparse_pull("s", out=out, row_ids=np.array([3, 1500, 1999]))
    assert out.indices.tolist() == [3, 1500, 1999]
    assert out.data[:, 0].tolist() == [1 - n, 0, 1]
    dense = np.full((2, *shape), np.nan, "f4")
    sparse.pull("s", out=[dense[0], out, dense[1]])
    assert dense[:, [3, 1500, 1999], 0].tolist() == [[1 - n, 0, 1]] * 2
    assert not np.isnan(dense).any()
    assert out.indices.tolist() == [3, 1500, 1999]
    with pytest.raises(KVStoreError, match="row 2000 is out of range"):
        sparse.row_sparse_pull("s", out=out, row_ids=np.array([2000]))


def half_precision() -> None:
    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0, multi_precision=True))
    kv.init(kv.rank, np.ones(1, np.float16)) if kv.num_workers == 1 else kv.init(0, np.ones(1, np.float16))
    out = np.empty(1, np.float16)
    small = np.float16(2**-12)  # half of the least step from 1 in float16
    for number in range(1, 4):
        kv.push(0, np.full(1, -small))
        kv.pull(0, out=out)
        kv.barrier()
        kv.pull(0, out=out)
        assert out[0] == np.float16(np.float32(1) + number * kv.num_workers * np.float32(small))
        kv.barrier()


def compressed() -> None:
    kv = kvstore.create("dist_async")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_optimizer("test")
    kv.init(1, np.zeros(4, np.float32))
    gradient = np.array([0.3, -0.3, 0.1, 0.25], np.float32)
    out = np.empty(4, np.float32)
    kv.pushpull(1, [gradient, gradient], out=out)
    kv.barrier()
    kv.pull(1, out=out)
    assert out.tolist() == [kv.num_workers * value for value in (0.5, -0.5, 0, 0.5)]


def push_around_a_kill(kills: int) -> None:
    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    keys = list(range(4))
    kv.init(keys, [full(0)] * 4)
    pids = set()
    for _ in range(kills):
        for _ in range(5):
            kv.push(keys, [full(-1)] * 4)
        if kv.rank == 0:
            pids.add(kv.servers()[0].pid)
            os.kill(kv.servers()[0].pid, signal.SIGKILL)
        for _ in range(5):
            kv.push(keys, [full(-1)] * 4)
    for key in keys:
        pulled(kv, key)
    kv.barrier()
    count = 10 * kills * kv.num_workers
    weight, velocity = np.float32(0), np.float32(0)
    for _ in range(count):
        velocity = np.float32(0.5) * velocity + np.float32(1)
        weight = weight + velocity
    assert [pulled(kv, key) for key in keys] == [weight] * 4
    assert kv.rank > 0 or len(pids) == kills


def begins() -> None:
    global _kv
    _kv = kvstore.create("dist_async")
    _kv.set_optimizer("test")
    _kv.init("w", full(0))


def goes_on_alone() -> None:
    for number in range(1, 6):
        _kv.push("w", full(1))
        assert pulled(_kv, "w") >= number


def on_another_host(kill: bool) -> None:
    """Give each rank a host name of its own: the others reach its server over TLS only."""
    os.environ["HVDLAB_HOST"] = f"host{context.engine().rank}"
    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    n, large = kv.num_workers, 1_200_000
    kv.init([0, 1, 2], [full(1, large), full(2), full(3)])
    servers = kv.servers()
    assert [server.host for server in servers] == [f"host{rank}" for rank in range(n)]
    for round_ in range(4):
        for turn in range(n):
            if turn == kv.rank:
                kv.push([0, 1, 2], [full(1, large), full(1), full(1)])
                outs = [full(0, large), full(0), full(0)]
                kv.pull([0, 1, 2], out=outs)
            kv.barrier()
        if kill and round_ == 1 and kv.rank == 0:
            os.kill(servers[0].pid, signal.SIGKILL)
            os.kill(servers[1].pid, signal.SIGKILL)
    kv.pull([0, 1, 2], out=outs)
    weight, velocity = np.float32(0), np.float32(0)
    for _ in range(4 * n):
        velocity = np.float32(0.5) * velocity - np.float32(1)
        weight += velocity
    for start, out in enumerate(outs, 1):
        assert (out == start + weight).all()
    sparse = kvstore.create("dist_async")
    sparse.set_optimizer("sgd")
    sparse.init("s", RowSparse(np.ones((9, 4), "f4"), np.arange(9), (9, 4)))
    out = RowSparse(np.zeros((0, 4), "f4"), [], (9, 4))
    sparse.row_sparse_pull("s", out=out, row_ids=np.array([8, 2]))
    assert (out.indices.tolist(), out.data.tolist()) == ([2, 8], [[1] * 4] * 2)
    dense = np.full((9, 4), np.nan, "f4")
    sparse.pull("s", out=dense)
    assert dense.tolist() == [[1] * 4] * 9
    kv.barrier()


def hostile() -> None:
    """Check that clients that are no workers are refused, and workers continue."""
    (directory,) = {link.address.directory for link in _kv._links}
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 70,
        b"\x05\0\0\0hello",
        encode(Attach(1, "x", 0, 1, False)),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(f"{directory}/socket")
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(60)
            while sock.recv(1000):
                pass
    _kv.push("w", full(1))
    pulled(_kv, "w")


def most_memory(pid: int) -> int:
    """In bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10


def floods_within_tls(pid: int, at: tuple[str, int]) -> None:
    """Check that strangers that have shaken hands have much ready before the server looks: it holds little of that, and
    ends them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    floods = [context.wrap_socket(socket.create_connection(at, 60)) for _ in range(4)]
    before = most_memory(pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        for sock in floods:
            sock.settimeout(0.05)
            # The send ends by its time limit once the buffers of a stopped process are full.
            with contextlib.suppress(OSError):
                sock.sendall(struct.pack("<I", 64 << 10) + bytes(32 << 20))
    finally:
        os.kill(pid, signal.SIGCONT)
    for sock in floods:
        sock.settimeout(60)
        # A connection that is closed with unread bytes is reset, which is as good an end.
        with contextlib.suppress(OSError):
            assert sock.recv(1) == b""
        sock.close()
    grown = most_memory(pid) - before
    assert grown < 3 << 20, grown


def is_answered_behind_a_crowd(at: tuple[str, int]) -> None:
    """Check that a client that shows a token, if a wrong one, has its answer although others fill the places of
    strangers."""
    silent = [socket.create_connection(at, 60) for _ in range(STRANGERS + 20)]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(at, 60)) as sock:
        sock.sendall(encode(Attach(VERSION, "x", 0, 1, False)))
        assert b"wrong version or token" in sock.recv(1000)
    for one in silent:
        one.close()


def hostile_over_tls() -> None:
    """Strangers at the port for other hosts, more than the server may have files: they get nothing, and workers go on."""
    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0))
    kv.init("w", full(0))
    kv.barrier()
    if kv.rank == 0:
        links = kv._links
        servers = {server.host: server for server in kv.servers()}
        for link in links:
            server, where = servers[link.address.host], parse_address(link.address.tls_address)
            assert isinstance(where, TlsAddress)
            at = where.host, where.port
            floods_within_tls(server.pid, at)
            is_answered_behind_a_crowd(at)
            open_files = len(os.listdir(f"/proc/{server.pid}/fd"))
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_files + 8, open_files + 8))
            silent = [socket.create_connection(at, 60) for _ in range(32)]
            for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000):
                with socket.create_connection(at, 60) as sock, contextlib.suppress(OSError):
                    sock.sendall(data)
                    while sock.recv(1000):
                        pass
            for _ in range(20):  # gone, with a reset, before it is accepted
                sock = socket.create_connection(at, 60)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            for sock in silent:
                sock.close()
        assert [server.pid for server in kv.servers()] == [servers[link.address.host].pid for link in links]
    kv.push("w", full(1))
    kv.barrier()
    pulled(kv, "w")


def serve() -> str:
    server = kvstore.KVStoreServer(_kv)
    assert (server.kvstore, server.handle) == (_kv, None)
    _kv._send_command_to_servers(3, "")
    with pytest.raises(KVStoreError, match="set_optimizer"):
        _kv._send_command_to_servers(0, "")
    with pytest.raises(KVStoreError, match="local store has no servers"):
        kvstore.KVStoreServer(kvstore.create("local")).run()
    server.run()
    return "over"


def serve_once_it_is_over() -> str:
    left = threading.Event()
    context.engine().on_leave(lambda reason: left.set())
    assert left.wait(20)
    kvstore.KVStoreServer(_kv).run()
    return "over"


_kv: Any = None


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [asynchronous, refused, half_precision, compressed], ids=lambda f: f.__name__
)
def test_on_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


OPTIMIZERS = [
    ("test", {}, "float32"),
    ("sgd", {"learning_rate": 0.1, "wd": 0.01}, "float32"),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, "float32"),
    ("sgd", {"learning_rate": 0.1, "clip_gradient": 0.5}, "float64"),
    ("adam", {"wd": 0.01}, "float32"),
    ("nag", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, "float32"),
    ("adagrad", {"learning_rate": 0.1, "wd": 0.01}, "float64"),
    ("rmsprop", {"learning_rate": 0.1, "centered": True, "clip_weights": 2.0}, "float32"),
    ("sgd", {"momentum": 0.9, "lr_scheduler": FactorScheduler(2, 0.5, base_lr=0.2)}, "float32"),
    ("adam", {"lr_scheduler": CosineScheduler(6, base_lr=0.2, warmup_steps=2)}, "float32"),
]


def test_an_optimizer_gives_the_bits_that_it_gives_in_one_process(ranks: Ranks) -> None:
    for arguments in OPTIMIZERS:
        results = ranks.run(trained, *arguments)
        assert results == [results[0]] * ranks.size


def test_the_learning_rate_is_set_for_all_workers(ranks: Ranks) -> None:
    for where in ("dist_async", "dist_sync"):
        ranks.run(new_rates, where)


def test_values_are_spread_over_two_servers(two_servers: Ranks) -> None:
    two_servers.run(spread)
    two_servers.run(new_rates, "dist_async")


def test_rows_of_dense_weights_are_updated() -> None:
    settings = {"HVDLAB_KV_SERVERS": "2", "MXNET_KVSTORE_BIGARRAY_BOUND": "10"}
    with Ranks(3, env=settings) as ranks:
        for name in ("sgd", "adam"):
            ranks.run(rows_of_dense_weights, name)


def test_waits_and_staleness_are_metrics(two_servers: Ranks) -> None:
    assert two_servers.run(waits_are_recorded) == [["kv.wait", "kv.staleness"]] * 3


def test_a_killed_server_loses_and_repeats_no_push(own_ranks: Ranks) -> None:
    own_ranks.run(push_around_a_kill, 3, timeout=60)


def test_secrets_of_servers_do_not_travel_with_the_data(own_ranks: Ranks) -> None:
    own_ranks.run(secrets_go_through_the_coordinator)


def test_others_go_on_in_an_asynchronous_store(own_ranks: Ranks) -> None:
    own_ranks.run(begins)
    own_ranks.kill(2)
    own_ranks.run(goes_on_alone, ranks=[0, 1])


def test_workers_of_other_hosts_reach_servers_over_tls() -> None:
    with Ranks(2) as own_ranks:
        own_ranks.run(on_another_host, True, timeout=25)
        own_ranks.run(hostile_over_tls)


def test_strangers_are_turned_away(own_ranks: Ranks) -> None:
    own_ranks.run(begins)
    own_ranks.run(hostile)


def test_a_process_that_is_to_be_a_server_waits_for_the_end(own_ranks: Ranks) -> None:
    own_ranks.run(begins)
    serving = own_ranks.start(serve, ranks=[2])
    own_ranks.run(goes_on_alone, ranks=[0, 1])
    own_ranks.coordinator.close()
    assert serving.results() == ["over"]


def test_a_process_that_becomes_a_server_after_the_end_does_not_wait(own_ranks: Ranks) -> None:
    own_ranks.run(begins)
    own_ranks.coordinator.close()
    assert own_ranks.start(serve_once_it_is_over, ranks=[2]).results() == ["over"]


def test_the_end_of_the_job_is_reported_also_if_the_wake_up_pipe_is_full() -> None:
    wakeup = WakeUp()
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(wakeup.writer, bytes(4096))
    events: deque[Any] = deque()
    launch = SimpleNamespace(coordinator="", coordinator_token="", coordinator_certificate="", reattach=1.0)
    try:
        JobObserver(cast(Any, launch), events, wakeup)._notify(None)
    finally:
        wakeup.close()
    assert list(events) == [None]
