"""``horovod.runner.common.util``: of it only ``env`` is here."""
