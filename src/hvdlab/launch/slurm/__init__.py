"""Ranks in a job of Slurm's: one job holds their room, and a step of it on each node runs the agent that forks them.

::

    launcher ── sbatch ──▶ job (a script that waits)          holds the room; ended by scancel, by a process of its own
       └─────── srun  ──▶ step on a node: agent ── forks ──▶ ranks      orders and reports over srun's pipes
"""
