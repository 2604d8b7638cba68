"""The plane `cuda/hierarchical`: CUDA tensors are reduced on the GPUs of each host, and exchanged between hosts by a plane of the host's memory.

``stage``  memory of the host that the GPU copies from and to
``plane``  the operations, composed of those of `cuda/ipc` and of the plane between hosts
"""
