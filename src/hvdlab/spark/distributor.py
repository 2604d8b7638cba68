"""``hvdlab.spark.TorchDistributor``: the signature of pyspark's, on ranks of hvdlab."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.runner.run_function import pickled, results
from hvdlab.runner.run_function import run as run_here
from hvdlab.spark.runner import active_context, run_tasks
from hvdlab.spark.task import RankTask


class TorchDistributor:
    """Distributor that runs a training function or script on ranks, each with the variables that torchrun sets.

    Args:
        num_processes: Number of ranks.
        local_mode: Whether they run on the driver's host; otherwise in Spark's tasks.
        use_gpu: Whether each rank sees the GPUs that Spark gave to it. False for CPUs.

    Raises:
        InvalidRequestError: ``num_processes`` is less than 1.
        RuntimeError: GPUs are requested, and Spark is not configured to give any.
        StartError: No SparkContext is active.
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        if num_processes < 1:
            raise InvalidRequestError(f"num_processes={num_processes}: there must be at least one.")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self._devices = self._find_devices() if use_gpu else []

    def _find_devices(self) -> list[str]:
        context = active_context()
        if self.local_mode:
            found = context.resources.get("gpu")
            if found is None or not found.addresses:
                raise RuntimeError(
                    "The driver was given no GPUs (spark.driver.resource.gpu.amount); use_gpu=False trains on CPUs."
                )
            return list(found.addresses)
        if not int(float(context.getConf().get("spark.task.resource.gpu.amount", "0"))):
            raise RuntimeError(
                "Tasks are given no GPUs (spark.task.resource.gpu.amount); use_gpu=False trains on CPUs."
            )
        return []

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Train, and return rank 0's result.

        Args:
            train_object: A function, called as ``train_object(*args, **kwargs)``, or the path of a script.
            args: Its arguments; a script's are texts.
            kwargs: Its keyword arguments; a script has none.

        Returns:
            The value of rank 0; ``None`` for a script.

        Raises:
            RankFailedError: A rank failed; also an instance of the class of its exception.
            InvalidRequestError: A script was given keyword arguments.
        """
        if isinstance(train_object, str):
            if kwargs:
                raise InvalidRequestError(
                    "a script has no keyword arguments; write them as texts (`--epochs`, `3`)."
                )
            function, args = _run_script, (train_object, [str(each) for each in args])
        else:
            function = train_object
        if not self.local_mode:
            task = RankTask(pickled(function, args, kwargs), {}, gpus=self.use_gpu)
            job = run_tasks(active_context(), task, self.num_processes)
            return results(job.done(), self.num_processes)[0]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._devices)} if self.use_gpu else {}
        return run_here(function, args, kwargs, num_proc=self.num_processes, env=devices)[0]


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
