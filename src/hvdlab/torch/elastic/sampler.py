"""The elastic sampler as a ``torch.utils.data.Sampler``, for torch's data loaders."""

from __future__ import annotations

import torch.utils.data

from hvdlab.bindings import elastic_sampler


class ElasticSampler(elastic_sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    __doc__ = elastic_sampler.ElasticSampler.__doc__
