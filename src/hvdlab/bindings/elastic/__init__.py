"""Elastic training, as far as it is the same for all frameworks: handlers, the state made of them, the sampler."""
