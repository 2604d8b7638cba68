"""Joining a world that somebody else's launcher started: ``mpirun``, ``srun``, ``torchrun``, ``jsrun`` or a person.

Such a launcher says in its variables who a rank is, but knows nothing of a coordinator. Rank 0 starts one, and the
others learn where it is and how to be let in. :func:`hvdlab.collectives.bootstrap.find.find` is the way in.
"""
