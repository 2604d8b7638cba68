"""Starting ranks: one protocol for all launchers, and those of hvdlab itself.

:mod:`~hvdlab.launch.forkserver` forks ranks on this host; :mod:`~hvdlab.launch.exits` and
:mod:`~hvdlab.launch.processes` say what can be known of a process and of its end.
"""
