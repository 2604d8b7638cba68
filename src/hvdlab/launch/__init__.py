"""Starting ranks: one protocol for all launchers, and those of hvdlab itself.

:mod:`~hvdlab.launch.starter` has the protocol, :mod:`~hvdlab.launch.registry` the launchers that there are.
:mod:`~hvdlab.launch.forkserver` forks ranks on this host, :mod:`~hvdlab.launch.host_agent` starts programs on any host;
:mod:`~hvdlab.launch.processes` finds the facts about a process and its end.
"""
