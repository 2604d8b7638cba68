"""The host agent: one process on each host that starts programs as ranks, and reports their output and their ends.

:mod:`~hvdlab.launch.host_agent.agent` runs on each host; :mod:`~hvdlab.launch.host_agent.connection` is the other end of the
connection to it, which ``hvdlab run`` uses, and :mod:`~hvdlab.launch.host_agent.starter`, by which pools have ranks on
other hosts.
"""
