"""The kernel whose cells run on all ranks."""
