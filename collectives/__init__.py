"""The collective core: protocol, coordinator, per-rank engine, data planes, timeline.

Knows no notebook and no framework. Import the sub-module that you need; this package imports nothing by itself,
so that the coordinator process starts without numpy.
"""
