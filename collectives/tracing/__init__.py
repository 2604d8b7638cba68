"""Tracing: work of ranks, recorded where it happens, matched over all ranks, shown and written to files.

Modules that need numpy are imported by neither the coordinator nor a rank; this package imports nothing by itself.
"""
