"""The elastic sampler in a data loader of torch."""

from __future__ import annotations

import pytest
import torch

from hvdlab.bindings import elastic_sampler as module
from hvdlab.torch.elastic import ElasticSampler


def test_a_data_loader_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rank", lambda: 1)
    monkeypatch.setattr(module, "size", lambda: 2)
    data = torch.arange(10)
    sampler = ElasticSampler(data, shuffle=False)
    assert isinstance(sampler, torch.utils.data.Sampler)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2, sampler=sampler)
    batches = []
    for number, (batch,) in enumerate(loader):
        batches.append(batch.tolist())
        sampler.record_batch(number, 2)
    assert batches == [[1, 3], [5, 7], [9]]
    assert len(loader) == 3
    assert sampler.processed_indices == {1, 3, 5, 7, 9}


@pytest.mark.usefixtures("world_of_one")
def test_in_a_world_of_one_it_gives_out_everything() -> None:
    sampler = ElasticSampler(range(6))
    assert sorted(sampler) == [0, 1, 2, 3, 4, 5]
