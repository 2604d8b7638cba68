"""The elastic sampler as a ``torch.utils.data.Sampler``, for torch's data loaders."""

from __future__ import annotations

import torch.utils.data

from hvdlab.bindings.elastic import sampler


class ElasticSampler(sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    __doc__ = sampler.ElasticSampler.__doc__
