"""The launcher ``slurm``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import cast

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.environment import default_python, exported
from hvdlab.launch.options import Kind, Option
from hvdlab.launch.slurm.job import COMMANDS, SCRIPT, Slurm
from hvdlab.launch.slurm.starter import SlurmStarter
from hvdlab.launch.starter import Capabilities, Capability, LaunchRequest, RankObserver

#: Options of the launcher that are options of ``sbatch`` by the same name, or by another one.
_OF_SBATCH = {
    "partition": ("partition", "partition of the job"),
    "account": ("account", "account that it is charged to"),
    "time": ("time", "time limit of the job, such as 2:00:00"),
    "qos": ("qos", "quality of service"),
    "constraint": ("constraint", "features that its nodes must have"),
    "reservation": ("reservation", "reservation that it runs in"),
    "nodes": ("nodes", "how many nodes (default: as Slurm chooses)"),
    "nodelist": ("nodelist", "nodes that it must have"),
    "exclude": ("exclude", "nodes that it must not have"),
    "mem": ("mem", "memory on each node, such as 64G"),
    "mem_per_cpu": ("mem-per-cpu", "memory for each processor, such as 4G"),
    "gres": ("gres", "other resources on each node, such as gpu:a100:4"),
    "cpus_per_rank": ("cpus-per-task", "processors of a rank (default: 1)"),
    "gpus_per_rank": ("gpus-per-task", "GPUs of a rank (default: none)"),
    "job_name": ("job-name", "name of the job (default: hvdlab)"),
}
_KEPT = ("HOME", "LOGNAME", "SHELL", "USER")
_KEPT_OF_SLURM = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_DEBUG", "SLURM_JWT")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class SlurmLauncher:
    """Starts ranks in one job of Slurm's, which it submits and cancels."""

    name = "slurm"
    capabilities = Capabilities.all_but(
        {Capability.KEEP: "the job that they run in belongs to the notebook that asked Slurm for it"}
    )
    forks = False

    def __init__(self) -> None:
        self._starter: SlurmStarter | None = None

    def options(self) -> Sequence[Option]:
        """Options about what the job asks for, and what is started in it."""
        return (
            *(Option(name, text) for name, (_, text) in _OF_SBATCH.items()),
            Option(
                "slots", "ranks that the job has room for (default: as many as it begins with)", Kind.COUNT
            ),
            Option("args", "further arguments of sbatch", Kind.WORDS),
            Option("srun_args", "further arguments of srun, which starts an agent on each node", Kind.WORDS),
            Option("python", "interpreter of the ranks on every node (default: the path of this one)"),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raises ``StartError`` without Slurm's commands, ``InvalidRequestError`` if hosts are named or a job lacks room."""
        missing = [name for name in COMMANDS if shutil.which(name) is None]
        if missing:
            raise StartError(
                f"the launcher `slurm` needs Slurm's commands, and `{missing[0]}` is not on the PATH; start it on a host "
                "of the cluster from which jobs are submitted, or choose another launcher, such as local."
            )
        if hosts:
            raise InvalidRequestError(
                "the launcher `slurm` has its nodes from Slurm: name no hosts, but for --launcher-option nodelist=…"
            )
        if self._starter is not None:
            self._starter.check_room(size)

    def is_far(self, hosts: str) -> bool:
        """Always True: nodes are, or may be, other hosts."""
        return True

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> SlurmStarter:
        """What starts the ranks of a job. Nothing is asked of Slurm yet.

        Raises:
            InvalidRequestError: The program's hosts come and go, which the nodes of a job don't.
        """
        if request.program is not None and not request.size:
            raise InvalidRequestError(
                "the launcher `slurm` has the nodes of one job, which do not come and go: run it without a script that finds hosts."
            )
        options = request.options
        self._starter = SlurmStarter(
            request,
            ranks,
            _submission(options),
            room=int(str(options.get("slots", 0))),
            slurm=Slurm(_environment(os.environ)),
            python=str(options.get("python") or default_python()),
            step=cast("tuple[str, ...]", options.get("srun_args", ())),
        )
        return self._starter


def _submission(options: Mapping[str, object]) -> list[str]:
    """Arguments of ``sbatch``. The job writes no file, is not run a second time, and outlives the loss of a node."""
    found = [
        "--parsable",
        "--no-requeue",
        "--no-kill",
        "--chdir=/",
        "--output=/dev/null",
        "--error=/dev/null",
    ]
    # The script needs no more variables than these; none may show a secret to users that can see the job.
    found += ["--export=PATH,LD_LIBRARY_PATH", "--job-name=hvdlab"]
    found += [f"--{option}={options[name]}" for name, (option, _) in _OF_SBATCH.items() if name in options]
    return [*found, *cast("tuple[str, ...]", options.get("args", ())), f"--wrap={SCRIPT}"]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's commands, and by ``srun`` of agents: without what a job or a display has given this process."""
    found = {
        name: value
        for name, value in exported(environ).items()
        if not name.startswith("SLURM") and name not in _DEVICES
    }
    return found | {name: environ[name] for name in (*_KEPT, *_KEPT_OF_SLURM) if name in environ}
