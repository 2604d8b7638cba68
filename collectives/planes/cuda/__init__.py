"""Ranks of one host whose GPUs work on each other's memory, be it one GPU for all, without NCCL, which refuses several ranks on one GPU."""
