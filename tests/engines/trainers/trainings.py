"""A small model that is trained in three steps: by plain torch in one process, and by libraries on all ranks.

Each of :data:`LIBRARIES` is used as its own documentation describes. It trains on the rows that a loader without
shuffling gives each rank, and returns the model as it is in the end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)

STEPS, ROWS = 3, 4
"""Steps of a training, and the rows of a rank's batch."""
RATE = 0.05
WORDS, LENGTH = 20, 6
"""Of the language model: how many words there are, and how many a row has."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of words, of which a rank can't read some.

    Args:
        fails_on: The rank that raises when it has read its first batch; -1 for none.
        waits_on: The rank that reads no row after its first batch, for as long as its cell runs; -1 for none.
    """

    def __init__(self, fails_on: int = -1, waits_on: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._words = torch.randint(WORDS, (STEPS * ROWS * max(size, 2), LENGTH), generator=generator)
        self._fails_on, self._waits_on = fails_on, waits_on
        self._read = 0

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self._read += 1
        if self._read > ROWS and dist.is_initialized():
            if dist.get_rank() == self._fails_on:
                raise ValueError(f"row {number} is bad")
            if dist.get_rank() == self._waits_on:
                print("waits", flush=True)
                while True:
                    pass
        return {"input_ids": self._words[number], "labels": self._words[number]}


class Loss(nn.Module):
    """Language model that gives its loss, as those of ``transformers`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.embedding(input_ids))))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def made() -> Loss:
    """Return the model at its beginning, the same on all ranks."""
    torch.manual_seed(0)
    return Loss()


def begin_anew() -> None:
    """Forget the libraries' and torch's state of an earlier training."""
    from accelerate.state import (  # type: ignore[import-not-found]  # only `make engines` installs it
        AcceleratorState,
        GradientState,
        PartialState,
    )

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def alone(size: int) -> nn.Module:
    """Return the model after one process has trained it on the batches of all ranks."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    rows = Rows()
    for step in range(STEPS):
        optimizer.zero_grad()
        numbers = range(step * ROWS * size, (step + 1) * ROWS * size)
        batch = [rows[number] for number in numbers]
        inputs = torch.stack([row["input_ids"] for row in batch])
        model(inputs, inputs)["loss"].backward()
        optimizer.step()
    return model


def by_accelerate(rows: Rows) -> nn.Module:
    """Train in a loop of one's own."""
    from accelerate import Accelerator  # type: ignore[import-not-found]  # only `make engines` installs it

    accelerator = Accelerator(cpu=True)
    model: Any = made()
    optimizer: Any = torch.optim.SGD(model.parameters(), RATE)
    loader: Any = DataLoader(rows, ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
    losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
    assert losses.shape == (accelerator.num_processes,)
    found: nn.Module = accelerator.unwrap_model(model)
    return found


def by_lightning(rows: Rows) -> nn.Module:
    """Train by a Trainer, which makes the process group if there is none."""
    import lightning.pytorch as pl  # type: ignore[import-not-found]  # only `make engines` installs it
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found]  # as above

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = made()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), RATE)

    size, rank = world()
    sampler: Any = DistributedSampler(rows, size, rank, shuffle=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend="hvdlab"),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(rows, ROWS, sampler=sampler))
    assert trainer.callback_metrics["loss"].isfinite()
    return module.model


def by_transformers(rows: Rows) -> nn.Module:
    """Train by a Trainer of ``transformers``, which evaluates and saves, too."""
    from transformers import (  # type: ignore[import-not-found]  # only `make engines` installs it
        Trainer,
        TrainingArguments,
    )

    class InOrder(Trainer):  # type: ignore[misc]  # transformers has no types here
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    arguments = TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = InOrder(made(), arguments, train_dataset=rows, eval_dataset=Rows())
    assert trainer.args.world_size == world()[0]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model()
    assert trainer.model is not None
    found: nn.Module = trainer.model
    return found


LIBRARIES: dict[str, Callable[[Rows], nn.Module]] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "transformers": by_transformers,
}


def world() -> tuple[int, int]:
    """Return how many ranks there are, and which of them this one is."""
    import hvdlab.torch as hvd

    hvd.init()
    return hvd.size(), hvd.rank()


def difference(model: nn.Module) -> float:
    """Return the largest difference of a parameter to that of a model that one process has trained."""
    assert dist.get_backend() == "hvdlab"
    other = alone(dist.get_world_size())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((one - another).detach().abs().max()) for one, another in pairs)


def main() -> None:
    """Print as a script how far a library's model is from that of one process."""
    if sys.argv[1] != "lightning":  # which makes the group itself
        dist.init_process_group("hvdlab")
    model = LIBRARIES[sys.argv[1]](Rows())
    print(f"rank {world()[1]} differs by {difference(model)}")


if __name__ == "__main__":
    main()
