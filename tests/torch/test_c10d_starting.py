"""How ranks find each other for ``torch.distributed`` on hvdlab: without a launcher, under one, and between hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hvdlab.collectives.errors import StartError
from ranks import Ranks

ROOT = Path(__file__).parents[2]


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
    """An environment with the entry point of this tree, whatever the installed package has."""
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
        main = "from hvdlab.runner.command import main; main()"
        command = [sys.executable, "-c", main, "run", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(
        command, env=with_entry_point, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stdout + done.stderr


def test_ranks_of_other_hosts_need_a_launcher() -> None:
    from hvdlab.collectives import context
    from hvdlab.collectives.bootstrap.card import Card
    from hvdlab.collectives.settings import Settings
    from hvdlab.torch.c10d import world

    store = dist.HashStore()
    store.set(f"hvdlab.world.{context.next_world() + 1}", Card(2, "elsewhere", "unix:/nowhere").encode())
    with pytest.raises(StartError, match="Rank 1 is on another host than rank 0"):
        world._founded(store, 1, 2, Settings())
