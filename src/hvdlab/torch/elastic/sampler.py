"""The elastic sampler, as a data loader of torch takes it."""

from __future__ import annotations

import torch.utils.data

from hvdlab.bindings.elastic import sampler


class ElasticSampler(sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    __doc__ = sampler.ElasticSampler.__doc__
