"""How ranks find each other for ``torch.distributed`` on hvdlab: without a launcher, under one, and between hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from hvdlab.collectives import context, system
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.rendezvous.discovery import CoordinatorInfo, host_backend
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import host_key
from hvdlab.torch.c10d import world
from support import ordinary_user
from support.patience import PROGRAM_PATIENCE
from support.ranks.resident import Ranks

ROOT = Path(__file__).parents[3]


def _founded(path: str, size: int) -> list[float]:
    rank = int(os.environ["HVDLAB_RANK"])
    for name in [name for name in os.environ if name.startswith("HVDLAB_")]:
        del os.environ[name]
    dist.init_process_group("hvdlab", init_method=f"file://{path}", rank=rank, world_size=size)
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


def test_without_a_launcher_rank_0_starts_a_coordinator(tmp_path: Path) -> None:
    with Ranks(2, init=False, imports=["hvdlab.torch"]) as ranks:
        assert ranks.run(_founded, str(tmp_path / "store"), 2, timeout=60) == [[1.0, 1.0]] * 2


SCRIPT = """
import sys, torch
import torch.distributed as dist
assert "hvdlab.torch" not in sys.modules and "HVDLAB" in dist.Backend._plugins
dist.init_process_group("hvdlab")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 2 and dist.get_backend() == "hvdlab"
print("done", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def with_entry_point(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the entry point of this tree, not the installed package's."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["torch.backends"].items()]
    place = tmp_path / "entries"
    (place / "hvdlab_entry-1.dist-info").mkdir(parents=True)
    (place / "hvdlab_entry-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hvdlab-entry\nVersion: 1\n"
    )
    (place / "hvdlab_entry-1.dist-info" / "entry_points.txt").write_text(
        "\n".join(["[torch.backends]", *lines])
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("launcher", ["hvdlab run", "torchrun"])
def test_no_import_is_needed_under_a_launcher(
    tmp_path: Path, with_entry_point: dict[str, str], launcher: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if launcher == "torchrun":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
        ]
    else:
        main = "from hvdlab.runner.cli import main; main()"
        command = [sys.executable, "-c", main, "run", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(
        command, env=with_entry_point, capture_output=True, text=True, timeout=PROGRAM_PATIENCE, check=False
    )
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stdout + done.stderr


@pytest.mark.parametrize(("wanted", "backend"), [("1", "hvdlab"), ("0", "gloo")])
def test_the_users_wish_makes_groups_hvdlabs_under_hvdlab_run(
    tmp_path: Path, with_entry_point: dict[str, str], wanted: str, backend: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('backend', dist.get_backend())\n"
    )
    main = "from hvdlab.runner.cli import main; main()"
    command = [sys.executable, "-c", main, "run", "-np", "2", sys.executable, str(script)]
    environment = {**with_entry_point, "HVDLAB_C10D": wanted}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROGRAM_PATIENCE, check=False
    )
    assert (done.returncode, done.stdout.count(f"backend {backend}")) == (0, 2), done.stdout + done.stderr


def test_ranks_of_other_hosts_need_a_launcher() -> None:
    store: Any = HashStore()  # torch's stub knows no bytes
    store.set(
        f"hvdlab.world.{context.next_world() + 1}", CoordinatorInfo(2, "elsewhere", "unix:/nowhere").encode()
    )
    with pytest.raises(StartError, match="Rank 1 is on another host than rank 0"):
        world._founded(store, 1, 2, Settings())


# -- another user of the host, with access to torch's store -----------------------------------------------------------

SECRET = "5" * 64


def _watched(secret: str, port: int, again: bool) -> bytes:
    """Found a world over torch's TCP store, and return the card that any user of the host can read there.

    Args:
        again: Whether this process was in a world of its own before, which took the secret out of the environment.
    """
    rank = int(os.environ["HVDLAB_RANK"])
    for name in [name for name in os.environ if name.startswith("HVDLAB_")]:
        del os.environ[name]
    if secret:
        os.environ["HVDLAB_TOKEN"] = secret
    if again:
        context.init()
        context.shutdown()
    store: Any = TCPStore("127.0.0.1", port, 2, rank == 0)  # torch's stub knows no bytes
    key = f"hvdlab.world.{context.next_world() + 1}"
    world.world_of_group(store, rank, 2)
    assert "HVDLAB_TOKEN" not in os.environ
    seen = bytes(store.get(key))
    store.set(f"rank {rank} has read", b"1")
    if rank == 0:
        store.get("rank 1 has read")  # rank 0 serves the store
    context.shutdown()
    return seen


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("again", [False, True], ids=["first world", "second world"])
@pytest.mark.parametrize("secret", ["", SECRET], ids=["without a token", "with HVDLAB_TOKEN"])
def test_torchs_store_has_neither_token_nor_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, again: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Ranks(2, init=False, imports=["hvdlab.torch"]) as ranks:
        seen = ranks.run(_watched, secret, _free_port(), again, timeout=90)
    for card in seen:
        shown = json.loads(card)
        assert (shown["local"], shown["token"], bool(shown["seal"])) == ("", "", bool(secret))
        assert secret.encode() not in card or not secret
        assert b"/coordinator" not in card
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the card is left"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, Path]]:
    """Yield the listening socket of another user in a directory of theirs, which all may enter."""
    with (
        tempfile.TemporaryDirectory(prefix="hvd-w-", dir="/tmp") as place,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        os.chmod(place, 0o777)
        sock.bind(f"{place}/coordinator")
        os.chmod(f"{place}/coordinator", 0o777)
        if os.geteuid() == 0:
            ordinary_user.run(sock.listen)  # the kernel keeps the user that began to listen
        else:
            sock.listen()
            monkeypatch.setattr(system, "peer_credentials", lambda sock: (1, os.geteuid() + 1))
        sock.setblocking(False)
        yield sock, Path(place)


def _write(host: str, port: int, key: str, card: bytes) -> None:
    TCPStore(host, port, None, False, use_libuv=False).set(key, card)  # type: ignore[arg-type]  # torch's stub knows no bytes


def _written_by_another(key: str, card: bytes) -> Store:
    """Return a store with the card that another user has written at torch's port, which asks for no password."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=False)
    ordinary_user.run(_write, "127.0.0.1", server.port, key, card)
    store = HashStore()
    store.set(key, server.get(key))  # type: ignore[arg-type]  # torch's stub knows no bytes
    return store


@pytest.mark.parametrize("secret", ["", SECRET], ids=["without a token", "with HVDLAB_TOKEN"])
@pytest.mark.parametrize("shown", ["address", "path", "name"])
def test_no_rank_joins_the_coordinator_of_another_user(
    theirs: tuple[socket.socket, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
    secret: str,
) -> None:
    """Another user writes its own card into torch's store before rank 0 does, and a rank with that user's code in reach waits."""
    listener, place = theirs
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = f"unix:{listener.getsockname()}"
    forged = CoordinatorInfo(2, host_key(), address, token="attackers")
    if shown != "address":
        (place / "card").write_bytes(forged.encode())
        (place / "card").chmod(0o600)
        if os.geteuid() == 0:
            os.chown(place / "card", ordinary_user.NOBODY, ordinary_user.NOBODY)
        name = (
            f"c10d-{'0' * 32}" if shown == "name" else os.path.relpath(place / "card", tmp_path / "hvdlab-0")
        )
        forged = CoordinatorInfo(2, host_key(), file=name)
    store = _written_by_another(f"hvdlab.world.{context.next_world() + 1}", forged.encode())
    with pytest.raises(StartError, match=r"sealed|not rank 0's|is not in"):
        world._founded(store, 1, 2, Settings(token=secret))
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_rank_that_has_such_a_card_all_the_same_sends_it_nothing(
    theirs: tuple[socket.socket, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, _ = theirs
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    board = host_backend(os.environ, f"c10d-{'a' * 32}")
    board.publish(
        CoordinatorInfo(2, host_key(), f"unix:{listener.getsockname()}", token="attackers").encode()
    )
    store: Any = HashStore()  # torch's stub knows no bytes
    store.set(
        f"hvdlab.world.{context.next_world() + 1}", CoordinatorInfo(2, host_key(), file=board.key).encode()
    )
    with pytest.raises(StartError, match="is not trusted, and was sent nothing"):
        world._founded(store, 1, 2, Settings())
    peer, _ = listener.accept()
    with peer:
        assert peer.recv(1) == b""


def test_ranks_are_not_left_waiting_if_the_card_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.write_text("no directory")
    monkeypatch.setenv("HVDLAB_RENDEZVOUS_DIR", str(full))
    store = HashStore()
    number = context.next_world()
    with pytest.raises(StartError, match="can't tell the others"):
        world._founded(store, 0, 2, Settings())
    assert "can't tell the others" in CoordinatorInfo.decode(store.get(f"hvdlab.world.{number + 1}")).error


class GoneStore(HashStore):
    """Store whose server has ended."""

    def set(self, key: str, value: object) -> None:
        raise dist.DistStoreError("the store is gone")


def test_nothing_stays_of_a_world_that_torchs_store_could_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_RENDEZVOUS_DIR", str(tmp_path))

    with pytest.raises(dist.DistStoreError, match="the store is gone"):
        world._founded(GoneStore(), 0, 2, Settings())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_nothing_stays_of_a_world_whose_failure_torchs_store_could_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.write_text("no directory")
    monkeypatch.setenv("HVDLAB_RENDEZVOUS_DIR", str(full))

    with pytest.raises(dist.DistStoreError, match="the store is gone"):
        world._founded(GoneStore(), 0, 2, Settings())


def test_nothing_stays_of_a_world_whose_card_an_interrupt_kept_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_RENDEZVOUS_DIR", str(tmp_path))

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world._founded(HashStore(), 0, 2, Settings())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
