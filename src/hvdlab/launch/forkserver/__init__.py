"""The fork server: a process that imports the ranks' modules once, forks the ranks, and learns at once when one ends.

Its children run a :class:`~hvdlab.launch.forkserver.program.ForkedProgram`, which it finds by name. This
package stays light: the fork server itself imports it, and must be able to answer before anything heavy was imported.

This fork server is for pools: it survives its owner if it is asked to, and adopts the ranks of a predecessor. A zygote
(:mod:`hvdlab.launch.host_agent.zygote`) is the other one, for ``hvdlab run --preload``: it forks programs that become
children of the host agent, and lives and dies with that.
"""
