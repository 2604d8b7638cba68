"""The fork server: a process that imports what ranks need once, forks them, and learns at once when one ends.

Its children run a :class:`~hvdlab.launch.forkserver.program.ForkedProgram`, which it finds by name. This
package stays light: the fork server itself imports it, and must be able to answer before anything heavy was imported.
"""
