"""``horovod.runner.elastic``: the part of it that elastic training itself uses."""
