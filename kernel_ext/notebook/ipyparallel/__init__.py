"""ipyparallel beside a pool: a cluster whose engines are the ranks, and launchers of ipyparallel that start ranks."""
