"""The plane for ranks of one host whose GPUs work on each other's memory, or that share a GPU, without NCCL.

(NCCL refuses several ranks on one GPU.)
"""
