"""Failover: successors of a coordinator that has ended, and how each process finds one.

`supervisor` (rank 0) and `client_reconnect` (notebook, launcher) start a successor; `supervisor` also hands a coordinator over to
another process. `rank_reconnect` brings a rank to the successor with the facts of `rank_facts`; `successor` restores the world from them.
"""
