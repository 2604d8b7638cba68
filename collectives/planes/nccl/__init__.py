"""The plane for GPUs of several hosts, or of one: NCCL moves the data, and what it would round too often is added by our kernels."""
