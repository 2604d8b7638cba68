"""Joining a world that another launcher started: ``mpirun``, ``srun``, ``torchrun``, ``jsrun`` or a person.

Such a launcher gives each process its rank in environment variables, but knows nothing of a coordinator. Rank 0 starts one, and
publishes its address and secret for the others. :func:`hvdlab.collectives.rendezvous.discovery.discover` is the way in.
"""
