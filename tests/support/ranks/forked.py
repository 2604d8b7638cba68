"""Processes forked from one that has imported their modules, where tests start many: importing torch takes seconds.

``fork("support.ranks.worker", ["support.network.skewed_clock"], environment, fds=[5])`` runs ``support.ranks.worker.main()`` in a new process whose
``sys.argv`` is ``["support.ranks.worker", "<its number of descriptor 5>", "support.network.skewed_clock"]``. The working directory, standard output
and standard error are those of the caller at that moment, the environment is the one given. Variables that the
interpreter reads only when it starts (``PYTHON…``, ``OMP_…``) are those of :data:`FIXED`.

With ``host``, the first process of one of ``support/network/namespaces.py``, the new process is on that host.

There is one server for each list of modules, started when first needed; it lives as long as the test run. It has a
single thread and no other descriptors, so that its children are as good as fresh.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


LIGHT = ("numpy", "numpy.testing", "pytest", "hvdlab.collectives.context")
WITH_TORCH = (*LIGHT, "torch")
FOR_TRAINING = (*WITH_TORCH, "torch._dynamo", "hvdlab.torch")
"""The first optimizer that a process makes imports ``torch._dynamo``, which takes as long as torch itself."""
FOR_EXAMPLES = (*FOR_TRAINING, "sklearn.datasets")
WITH_TENSORFLOW = (*LIGHT, "hvdlab.keras", "tf_keras", "sklearn.model_selection", "sklearn.datasets")
FIXED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}
_LARGEST = 1 << 17
"""Bytes of a message: mostly the environment."""
_STANDARD = 2
"""Descriptors that each request begins with: standard output and error."""


class ForkedProcess:
    """Process of a server, to be used as one of ``subprocess.Popen``."""

    def __init__(self, server: _Server, pid: int, *, on_host: bool) -> None:
        self._server, self.pid = server, pid
        self._on_host = on_host
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if not self._on_host:
            os.kill(self.pid, number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(_only_child(self.pid), number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            # Only this process makes the server reap it, so the number is its own until then.
            pidfd = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                if poller.poll(None if timeout is None else timeout * 1000):
                    self.returncode = self._server.reap(self.pid)
            finally:
                os.close(pidfd)
        return self.returncode


class _Server:
    """Our end of a server. Thread-safe."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                env={**os.environ, **FIXED},
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self,
        main: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        fds: Sequence[int],
        host: int | None,
    ) -> int:
        request = [main, list(arguments), dict(environment), os.getcwd(), host]
        return self._ask(request, [1, 2, *fds])

    def reap(self, pid: int) -> int:
        return self._ask(pid, [])

    def close(self) -> None:
        self.socket.close()
        self.process.wait()

    def _ask(self, request: object, fds: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self.socket, [json.dumps(request).encode()], fds)
            answer = self.socket.recv(_LARGEST)
        if not answer:
            raise RuntimeError(f"the process that forks has ended: {self.process.wait()}")
        return int(answer)


_servers: dict[tuple[str, ...], _Server] = {}


def fork(
    main: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    fds: Sequence[int] = (),
    modules: tuple[str, ...] = LIGHT,
    host: int | None = None,
) -> ForkedProcess:
    """Run ``main()`` of the module ``main``, one of this directory, in a new process that has imported ``modules``."""
    server = _servers.get(modules)
    if server is None:
        server = _servers[modules] = _Server(modules)
    pid = server.fork(main, arguments, environment, fds, host)
    return ForkedProcess(server, pid, on_host=host is not None)


def server_pids() -> set[int]:
    return {server.process.pid for server in _servers.values()}


def server_fds() -> set[int]:
    return {server.socket.fileno() for server in _servers.values()}


def _only_child(pid: int) -> int:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not text:
        raise ProcessLookupError(pid)
    return int(text[0])


@atexit.register
def _close_servers() -> None:
    while _servers:
        _servers.popitem()[1].close()


# -- the server ---------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> tuple[str, list[str]] | None:
    """Answer requests until the other end is closed; in a new process, return its task."""
    while True:
        data, fds, _, _ = socket.recv_fds(channel, _LARGEST, 16)
        if not data:
            return None
        request = json.loads(data)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            return _settle_in(request, fds)
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


def _settle_in(
    request: tuple[str, list[str], dict[str, str], str, int | None], fds: list[int]
) -> tuple[str, list[str]]:
    main, arguments, environment, directory, host = request
    if host is not None:
        _enter(host)
    for number, fd in enumerate(fds[:_STANDARD], start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the server, if one of its imports has asked for it
    os.chdir(directory)
    if environment.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    return main, [str(fd) for fd in fds[_STANDARD:]] + arguments


def _enter(host: int) -> None:
    """Go on in the namespaces of a process. Only children get into its process namespace: this process waits for one."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Opened before any is entered, since /proc is another one then.
    namespaces = [
        os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "ipc", "pid", "mnt")
    ]
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    if child := os.fork():
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # pages that the collector never touches are never copied
    if order := _serve(channel):
        _run(*order)


def _run(main: str, arguments: list[str]) -> None:
    """The rest of a process's life. Taking the interpreter apart would copy most of its memory, which takes longest."""
    code = 1
    try:
        sys.argv = [main, *arguments]
        importlib.import_module(main).main()
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: joins all but daemons
        code = 0
    except BaseException:  # noqa: BLE001  # the last one that it meets
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as multiprocessing does in its children
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()
