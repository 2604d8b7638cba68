"""Shared part of the bindings of all frameworks, over one adapter: how collectives are called, waited for and differentiated.

A framework brings an :class:`~hvdlab.bindings.adapter.FrameworkAdapter` and public functions with Horovod's names; everything
between the user's tensor and the request of the collective core is here. See ``docs/design/bindings.md``.
"""
