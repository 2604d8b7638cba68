"""``horovod.runner.common``: of it only ``util.env`` is here."""
