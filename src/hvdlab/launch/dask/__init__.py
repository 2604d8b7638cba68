"""Ranks on Dask's workers: an actor on each worker runs the agent that forks the ranks there.

::

    launcher ── pipes ── client's event loop ── calls of an actor ──▶ worker: actor ── pipes ──▶ agent ── forks ──▶ ranks

Dask carries orders and reports alone. Cells, output and collectives go over hvdlab's own channel, as on other hosts.
"""
