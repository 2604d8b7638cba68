"""A real standalone cluster of Spark's on this machine: a master and two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from support.patience import PATIENCE

WORKERS = 2
_HERE = "127.0.0.1"


class SparkCluster:
    """Cluster, until the end of a ``with`` block.

    Args:
        directory: Where workers keep the logs of their executors.
        cores: How many tasks each worker runs at once.

    Attributes:
        address: Of the master, for ``setMaster``.
    """

    def __init__(self, directory: Path, cores: int = 1) -> None:
        self._directory, self._cores = directory, cores
        self._daemons: list[_Daemon] = []
        self.address = ""

    @property
    def environment(self) -> Mapping[str, str]:
        """For drivers: where the master is, which Python the executors run, and an address that all can reach."""
        return {"SPARK_MASTER": self.address, "SPARK_LOCAL_IP": _HERE, "PYSPARK_PYTHON": sys.executable}

    def executors(self) -> list[psutil.Process]:
        """Return the processes of executors."""
        return [
            child
            for daemon in self._daemons
            for child in psutil.Process(daemon.process.pid).children()
            if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline())
        ]

    def __enter__(self) -> Self:
        try:
            words: tuple[str, ...] = (
                "org.apache.spark.deploy.master.Master",
                "--host",
                _HERE,
                "--port",
                "0",
            )
            master = self._daemon(*words, "--webui-port", "0")
            self.address = master.until(r"Starting Spark master at (spark://\S+)")
            words = (
                "org.apache.spark.deploy.worker.Worker",
                "--host",
                _HERE,
                "--cores",
                str(self._cores),
                "--memory",
                "1g",
            )
            for number in range(WORKERS):
                self._daemon(
                    *words,
                    "--webui-port",
                    "0",
                    "--work-dir",
                    str(self._directory / f"w{number}"),
                    self.address,
                )
            for worker in self._daemons[1:]:
                worker.until("(Successfully registered) with master")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all."""
        for daemon in reversed(self._daemons):
            daemon.close()

    def _daemon(self, *words: str) -> _Daemon:
        daemon = _Daemon(words)
        self._daemons.append(daemon)
        return daemon


class _Daemon:
    """JVM of Spark's, and its log."""

    def __init__(self, words: tuple[str, ...]) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        environment = os.environ | {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": _HERE,
            "SPARK_DAEMON_MEMORY": "256m",
        }
        self.process = subprocess.Popen(
            [str(home / "bin/spark-class"), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="spark-daemon", daemon=True)
        self._reader.start()

    def until(self, pattern: str) -> str:
        """Wait for a line like this; returns its first group."""
        found: Any = None

        def said() -> bool:
            nonlocal found
            found = next((match for line in self._lines if (match := re.search(pattern, line))), None)
            return found is not None or self.process.poll() is not None

        with self._changed:
            assert self._changed.wait_for(said, 2 * PATIENCE), self._lines
        assert found is not None, self._lines
        return str(found[1])

    def close(self) -> None:
        """End it, and wait for that."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
