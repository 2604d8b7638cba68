"""Parameter servers: processes that keep the values of stores and update them by what workers push.

``state`` decides and does no I/O, ``memory`` is what outlives a server, ``process`` is the server's process, ``starting`` starts and
finds it, and ``link`` is a worker's connection to it.
"""
