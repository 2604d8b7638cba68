"""Numbers over time: those that users record, and those of each rank's process that are sampled.

They travel with the ranks' spans, as :class:`~hvdlab.collectives.tracing.record_format.Metric` events. Import the sub-module
that you need; this package imports nothing by itself.
"""
