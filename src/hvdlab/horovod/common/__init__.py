"""``horovod.common``: what Horovod has for all frameworks."""
