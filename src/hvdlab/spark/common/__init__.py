"""``horovod.spark.common``: stores, backends, and what estimators of all frameworks share."""
