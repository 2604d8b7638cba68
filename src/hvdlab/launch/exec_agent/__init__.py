"""The exec agent: starts programs as ranks on a host, here or elsewhere, and reports their output and end.

:mod:`~hvdlab.launch.exec_agent.agent` runs on each host; :mod:`~hvdlab.launch.exec_agent.link` is the other end of the
connection to it, which ``hvdlab run`` uses, and :mod:`~hvdlab.launch.exec_agent.starter`, by which pools have ranks on
other hosts.
"""
