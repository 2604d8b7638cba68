"""Parameter servers: processes that keep the values of stores and update them by workers' pushes.

``state`` decides and does no I/O, ``memory`` outlives a server, and ``process`` is the server's process. ``starting`` starts it,
``discovery`` finds it, ``connection`` is a worker's connection to it, and ``spans`` records the worker's requests.
"""
