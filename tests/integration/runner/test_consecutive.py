"""Numbers of ranks without gaps, as scripts for Horovod's elastic training expect them."""

from __future__ import annotations

import json

import pytest

from integration.runner.conftest import Launcher

SCRIPT = """
    import json, os, signal, sys
    import torch
    import hvdlab.torch as hvd

    hvd.init()
    born = int(os.environ["HVDLAB_RANK"])

    def numbers():
        # A rank that has just come begins with other parameters; those of rank 0 must be of one that was there.
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, state.batch)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        found = hvd.allgather_object((hvd.rank(), born), name="numbers")
        last = hvd.add_process_set([hvd.size() - 1])
        inside = hvd.allgather_object(born, name="last", process_set=last) if last.included() else None
        row = {
            "rank": hvd.rank(), "size": hvd.size(), "found": found, "world": hvd.global_process_set.ranks,
            "told": hvd.broadcast_object(born, root_rank=hvd.size() - 1), "weight": model.weight.item(),
            "batch": state.batch, "last": last.ranks, "mine": last.rank(), "inside": inside,
        }
        hvd.remove_process_set(last)
        return json.dumps(row)

    @hvd.elastic.run
    def train(state):
        print("numbers", numbers(), flush=True)
        # The very sampler of scripts, which refuses a rank that is not below the number of ranks.
        torch.utils.data.DistributedSampler(range(8), num_replicas=hvd.size(), rank=hvd.rank())
        while not (state.again and hvd.size() == 3):
            state.again = hvd.size() < 3 or state.again
            hvd.allreduce(torch.ones(1), name="x")
            state.batch += 1
            if born == 0 and state.batch == 5 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit()

    state = hvd.elastic.TorchState(batch=1, again=False)
    train(state)
    print("done", hvd.rank(), hvd.join(), flush=True)
"""


def rows(lines: list[str]) -> list[dict[str, object]]:
    return [json.loads(line.removeprefix("numbers ")) for line in lines if line.startswith("numbers ")]


def test_numbers_are_those_below_the_size_and_rank_0_was_there_before(launcher: Launcher) -> None:
    ran = launcher.python(3, SCRIPT, flags=("--min-np", "2"))
    assert ran.code == 0, ran.err
    # Output is labelled by the number that a rank was started with; the first process of rank 0 printed once, its next
    # once.
    told = {rank: rows(ran.of(rank)) for rank in range(3)}
    assert [[row["rank"] for row in told[rank]] for rank in range(3)] == [[0, 2], [1, 0, 0], [2, 1, 1]]
    assert [[row["size"] for row in told[rank]] for rank in (1, 2)] == [[3, 2, 3]] * 2
    begins, without, again = told[2]
    assert begins["found"] == [[0, 0], [1, 1], [2, 2]]
    assert without["found"] == [[0, 1], [1, 2]]
    assert again["found"] == [[0, 1], [1, 2], [2, 0]]
    for rank, each in told.items():
        for row in each:
            size = int(str(row["size"]))
            assert row["world"] == list(range(size))
            assert row["weight"] == row["batch"]
            assert row["last"] == [size - 1]
            assert row["mine"] == (0 if row["rank"] == size - 1 else None), (rank, row)
    assert [row["told"] for row in told[1]] == [2, 2, 0]
    assert [row["inside"] for row in told[2]] == [[2], [2], None]
    assert [ran.of(rank)[-1].split()[1] for rank in range(3)] == ["2", "0", "1"]
    (last,) = {int(ran.of(rank)[-1].split()[2]) for rank in range(3)}
    assert last in range(3)


def test_who_wants_to_keeps_the_numbers(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
        import os, signal
        import torch
        import hvdlab.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def train(state):
            while hvd.size() > 2:
                hvd.allreduce(torch.ones(1), name="x")
                if hvd.rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.commit()

        train(hvd.elastic.TorchState(batch=0))
        print("done", hvd.rank(), hvd.global_process_set.ranks)
    """
    monkeypatch.setenv("HVDLAB_RANK_NUMBERS", "stable")
    ran = launcher.python(3, script, flags=("--min-np", "1", "--reset-limit", "0"))
    assert ran.code == 0, ran.err
    assert [ran.of(rank)[-1] for rank in (1, 2)] == ["done 1 [1, 2]", "done 2 [1, 2]"]


WRAPPED = """
    import os, signal
    import torch, torch.distributed as dist
    import hvdlab.torch as hvd

    hvd.init()
    born = int(os.environ["HVDLAB_RANK"])
    model = torch.nn.Linear(2, 2)

    def gathered(value):
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.full((1,), float(value)))
        return torch.cat(parts).tolist()

    @hvd.elastic.run
    def train(state):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("hvdlab")
        print("numbers", dist.get_rank() == hvd.rank(), gathered(dist.get_rank()), gathered(born), flush=True)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        while not (state.again and hvd.size() == 3):
            state.again = hvd.size() < 3 or state.again
            wrapped(torch.full((2, 2), float(born))).sum().backward()
            state.batch += 1
            if born == 0 and state.batch == 5 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit()
        model.zero_grad()
        wrapped(torch.full((2, 2), float(born))).sum().backward()
        total = sum(parameter.grad.sum().item() for parameter in model.parameters())
        print("done", len(set(gathered(total))), flush=True)

    train(hvd.elastic.TorchState(model, batch=1, again=False))
"""


def test_a_model_is_wrapped_in_ddp_again_whatever_rank_was_lost(launcher: Launcher) -> None:
    ran = launcher.python(3, WRAPPED, flags=("--min-np", "2"))
    assert ran.code == 0, ran.err
    assert ran.launcher == ["rank 0: killed by SIGKILL; starting it anew (1 of 10)"]
    assert ran.of(2) == [
        "numbers True [0.0, 1.0, 2.0] [0.0, 1.0, 2.0]",
        "numbers True [0.0, 1.0] [1.0, 2.0]",
        "numbers True [0.0, 1.0, 2.0] [1.0, 2.0, 0.0]",
        "done 1",
    ]


def test_training_begins_with_the_checkpoint_that_rank_0_has_loaded(launcher: Launcher) -> None:
    """Whatever number that rank was started with: the first rank 0 is lost before training begins."""
    script = """
        import os, signal, time
        import torch
        import hvdlab.torch as hvd

        hvd.init()
        born = int(os.environ["HVDLAB_RANK"])
        if born == 0 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        while born == 1 and hvd.rank() != 0:
            time.sleep(0.01)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, 5.0 if hvd.rank() == 0 else 0.0)
        while hvd.size() < 2:
            time.sleep(0.01)

        @hvd.elastic.run
        def train(state):
            print("numbers", hvd.rank(), hvd.size(), "epoch", state.epoch, "weight", model.weight.item(), flush=True)

        train(hvd.elastic.TorchState(model, epoch=7 if hvd.rank() == 0 else 0))
    """
    ran = launcher.python(2, script, flags=("--min-np", "1"))
    assert ran.code == 0, ran.err
    assert ran.of(0) == ["numbers 1 2 epoch 7 weight 5.0"], ran.err
    assert ran.of(1) == ["numbers 0 2 epoch 7 weight 5.0"], ran.err
