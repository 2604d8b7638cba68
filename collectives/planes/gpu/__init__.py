"""Planes for tensors on GPUs.

``gpu_plane``    the common part of both planes: CUDA buffers, and members that join at the first operation
``gpu_group``    the life of a member of such a group: operations on their way, their ends, giving up
``device``       the interface of one GPU
``driver``       that interface by CUDA's driver and NVIDIA's compiler; the only module that imports NVIDIA's bindings
``jobs``         from collectives to tables of jobs for ``kernels.cu``
``checked_plane`` the plane that the engine uses: it chooses one of the following, and checks it before anything depends on it
``staged_plane`` the way through the host, where there is none, or where it failed its check
``ipc_plane``    ``cuda/ipc``: ranks of one host whose GPUs work on each other's memory, or that share a GPU (NCCL refuses several ranks on one GPU)
``ipc_group``    its members: announcing, working, copying back, stopping
``ipc_memory``   memory that members open to each other, and the shared memory in which they announce it
``nccl_plane``   ``cuda/nccl``: ranks that have a GPU each, on any hosts
``nccl_group``   its members, and how a communicator is aborted without wrong data
``nccl_library`` NCCL's own functions
"""
