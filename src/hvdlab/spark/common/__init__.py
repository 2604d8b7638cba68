"""``horovod.spark.common``: stores, backends, and the parts that estimators of all frameworks share."""
