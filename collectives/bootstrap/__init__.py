"""Joining a world that another launcher started: ``mpirun``, ``srun``, ``torchrun``, ``jsrun`` or a person.

Such a launcher gives each process its rank in environment variables, but knows nothing of a coordinator. Rank 0 starts one, and
the other ranks learn its address and secret from rank 0's card. :func:`hvdlab.collectives.bootstrap.find.find` is the way in.
"""
