"""From flags, configuration file and environment to a job. The command line wins over the file, both over variables.

A configuration file is Horovod's YAML, with a section for each group of flags and a key for each flag.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.settings import Settings, read_variables
from hvdlab.launch.host_discovery import COOLDOWN, FixedHosts, HostSource, as_host_source, check_cooldown
from hvdlab.launch.hosts import LOCALHOST, Host, parse_hosts, read_hostfile
from hvdlab.launch.options import split
from hvdlab.runner.flags import BY_DEST, FLAGS, LEVELS, Flag, FlagKind
from hvdlab.runner.job_spec import JobSpec, patience

START_TIMEOUT = 30.0
"""Seconds that ranks have to be started …"""
PRELOADED_START_TIMEOUT = 300.0
"""… and where they are forked by a process that imports modules before, which may take long where disks are slow."""
SCRIPT, HOST_LIST = "the host discovery script", "the list of hosts"
MPI = "mpi"
"""The launcher that takes the place of ``hvdlab run``: its process becomes mpiexec."""


class RunOptions:
    """Options of a run, by the ``dest`` of flags.

    Args:
        given: Values of the command line (or of ``hvdlab.run``).
        config: Values of a configuration file.
        environ: The environment.

    Raises:
        InvalidRequestError: A variable has a wrong value.
    """

    def __init__(
        self, given: Mapping[str, Any], config: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None:
        self.chosen: dict[str, Any] = {**config, **given}
        self._environ = environ
        read_variables({**environ, **self.variables()})

    def get(self, dest: str) -> Any:
        """Return the value of a flag; ``None`` if neither command line nor file nor environment gives one.

        Raises:
            InvalidRequestError: The flag's variable has a wrong value.
        """
        if dest in self.chosen:
            return self.chosen[dest]
        flag = BY_DEST[dest]
        text = self._environ.get(flag.variable, "").strip() if flag.variable else ""
        if not text:
            return None
        try:
            if flag.kind is FlagKind.NUMBER:
                return int(text) // flag.scale
            return float(text) if flag.kind is FlagKind.REAL else text
        except ValueError:
            raise InvalidRequestError(
                f"{flag.variable}={text!r}: a {flag.kind.value} was expected."
            ) from None

    def variables(self) -> dict[str, str]:
        """Return the variables that the given flags stand for."""
        return {
            flag.variable: flag.value_of_variable(self.chosen[flag.dest])
            for flag in FLAGS
            if flag.variable and flag.dest in self.chosen
        }

    def warnings(self) -> list[str]:
        """Return a line for each given flag that has no effect."""
        given = [BY_DEST[dest] for dest in self.chosen]
        return [f"{flag.name} has no effect here: {flag.ineffective}" for flag in given if flag.ineffective]

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that the operator named; empty if none.

        Raises:
            InvalidRequestError: They were given in two ways, or can't be read.
        """
        hosts, hostfile = self.get("hosts"), self.get("hostfile")
        if hosts and hostfile:
            raise InvalidRequestError("-H and --hostfile both name hosts; give one of them.")
        if hostfile:
            return tuple(read_hostfile(Path(hostfile)))
        return tuple(parse_hosts(hosts)) if hosts else ()

    def job(self, command: Sequence[str], function: bytes = b"", *, stdin: bool = False) -> JobSpec:
        """Return the job that the operator asks for.

        Raises:
            InvalidRequestError: Something does not fit together.
            UnsupportedError: The operator asks for an ability that does not exist here.
        """
        self._refuse()
        hosts = self.hosts()
        minimum, maximum = self.get("min_num_proc"), self.get("max_num_proc")
        size = self.get("num_proc")
        source = self._source(hosts)
        if source is not None and minimum is None:
            minimum = 1
        if size is None:
            size = minimum if source is not None else sum(host.slots for host in hosts) or minimum
        if size is None:
            raise InvalidRequestError("how many ranks? Give -np N, or hosts by -H or --hostfile.")
        if minimum is not None and not 1 <= minimum <= size:
            raise InvalidRequestError(f"--min-np {minimum} must be from 1 to -np {size}.")
        if maximum is not None and maximum < size:
            raise InvalidRequestError(f"--max-np {maximum} must be -np {size} at least.")
        start, limit = self.get("start_timeout"), self.get("reset_limit")
        preload = tuple(filter(None, map(str.strip, (self.get("preload") or "").split(","))))
        cooldown, elastic_timeout = self.get("cooldown_range"), self.get("elastic_timeout")
        if cooldown is not None:
            check_cooldown(*cooldown)
        grows = source is not None
        return JobSpec(
            tuple(command),
            size,
            () if grows else hosts or (Host(LOCALHOST, size),),
            source=source,
            source_name=SCRIPT if self.get("host_discovery_script") is not None else HOST_LIST,
            max_ranks=MOST_RANKS if maximum is None else maximum,
            cooldown=COOLDOWN if cooldown is None else (float(cooldown[0]), float(cooldown[1])),
            elastic_timeout=600.0 if elastic_timeout is None else float(elastic_timeout),
            named=bool(hosts) and not grows,
            function=function,
            environment=self._environment(),
            plane=self.get("plane") or "auto",
            interfaces=tuple(filter(None, (self.get("network_interfaces") or "").split(","))),
            ssh=self.ssh(),
            launcher=self.launcher(hosts, grows=grows),
            launcher_options=split(self.get("launcher_options") or ()),
            stdin=stdin,
            preload=preload,
            start_timeout=float(start or (PRELOADED_START_TIMEOUT if preload else START_TIMEOUT)),
            join_timeout=float(start)
            if start
            else patience({**self._environ, **self.variables()}, Settings().start_timeout),
            min_ranks=minimum,
            reset_limit=10 if limit is None else limit,
        )

    def _environment(self) -> dict[str, str]:
        found = self.variables()
        found.pop("HVDLAB_SSH", None)
        if self.get("as_horovod"):
            from hvdlab.horovod.import_hook import environment

            found |= environment(self._environ, force=True)
        return found

    def _source(self, hosts: Sequence[Host]) -> HostSource | None:
        """Return where hosts come from while the job runs, or ``None`` if they are fixed.

        Fixed hosts are a source, too, where the job may add ranks to the first ones, or puts a host that failed aside for
        a while.
        """
        given = self.get("host_discovery_script")
        if given is not None:
            if hosts:
                raise InvalidRequestError(
                    "--host-discovery-script finds the hosts; give it without -H and --hostfile, or these alone."
                )
            return as_host_source(given, self.get("slots"))
        maximum, size = self.get("max_num_proc"), self.get("num_proc")
        grows = maximum is not None and size is not None and maximum > size
        if (
            hosts
            and self.get("min_num_proc") is not None
            and (grows or self.get("cooldown_range") is not None)
        ):
            return FixedHosts({host.name: host.slots for host in hosts})
        return None

    def _refuse(self) -> None:
        if self.get("use_jsrun"):
            raise UnsupportedError("--jsrun: call `jsrun … python train.py`, which needs no `hvdlab run`.")

    def launcher(self, hosts: Sequence[Host], *, grows: bool = False) -> str:
        """Return the name of the launcher that starts the ranks.

        Args:
            hosts: The hosts that the operator named.
            grows: Whether the job's hosts are found while it runs.
        """
        if self.get("launcher"):
            return str(self.get("launcher")).lower()
        if self.get("use_mpi"):
            return MPI
        return "ssh" if hosts or grows else "local"

    def ssh(self) -> tuple[str, ...]:
        """Return the command that reaches other hosts."""
        command = shlex.split(self.get("ssh") or "ssh")
        if os.path.basename(command[0]) != "ssh":
            return tuple(command)
        # BatchMode: ssh fails instead of waiting at a prompt for a password. ServerAliveInterval: the
        # connection to a host that is cut off ends after three messages without an answer.
        command += ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=5"]
        if self.get("ssh_port"):
            command += ["-p", str(self.get("ssh_port"))]
        if self.get("ssh_identity_file"):
            command += ["-i", self.get("ssh_identity_file")]
        return tuple(command)


_BY_KEY = {flag.config: flag for flag in FLAGS if flag.config}


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of a file by dest.

    Raises:
        InvalidRequestError: The file can't be read, or has an unknown name or value.
        UnsupportedError: PyYAML is not installed.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidRequestError(f"the configuration file {path} can't be read: {error.strerror}") from error
    return values(_load(text, path), str(path))


def _load(text: str, path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]  # has no types
    except ImportError as error:
        raise UnsupportedError("--config-file needs PyYAML: pip install 'hvdlab[yaml]'.") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path} is no YAML: {error}") from error


def values(tree: Any, source: str) -> dict[str, Any]:
    """Return the values of a loaded file by dest. ``-`` and ``_`` are the same in its keys.

    Raises:
        InvalidRequestError: A key is unknown, or a value is not of its kind.
    """
    found: dict[str, Any] = {}
    for key, value in _leaves({} if tree is None else tree, source):
        flag = _BY_KEY.get(key)
        if flag is None:
            near = difflib.get_close_matches(key, _BY_KEY, 1)
            raise InvalidRequestError(f"{source}: there is no {key}" + (f"; {near[0]}?" if near else "."))
        if value is not None:
            found[flag.dest] = _checked(flag, value, f"{source}: {key}")
    return found


def _leaves(tree: Any, source: str, above: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise InvalidRequestError(f"{source}: {above or 'the file'} must be a mapping.")
    for key, value in tree.items():
        name = f"{above}.{key}" if above else str(key)
        name = name.replace("_", "-")
        if isinstance(value, dict) or any(other.startswith(f"{name}.") for other in _BY_KEY):
            # YAML reads a section without entries as None.
            yield from _leaves({} if value is None else value, source, name)
        else:
            yield name, value


def _checked(flag: Flag, value: Any, where: str) -> Any:
    match flag.kind:
        case FlagKind.SWITCH:
            good = isinstance(value, bool)
        case FlagKind.NUMBER:
            # YAML's yes and true are bools, which are ints in Python, too.
            good = isinstance(value, int) and not isinstance(value, bool)
        case FlagKind.REAL:
            good = isinstance(value, int | float) and not isinstance(value, bool)
        case FlagKind.LEVEL:
            value = str(value).upper()
            good = value in LEVELS
        case FlagKind.TWO:
            good = isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value)
        case FlagKind.TEXTS:
            value = value if isinstance(value, list) else [value]
            good = not any(isinstance(part, list | dict) for part in value)
            value = [str(part) for part in value]
        case FlagKind.TEXT:
            value, good = str(value), not isinstance(value, list | dict)
    if not good:
        expected = "yes or no" if flag.kind is FlagKind.SWITCH else flag.kind.value
        raise InvalidRequestError(f"{where} is {value!r}; {expected} was expected.")
    return value
