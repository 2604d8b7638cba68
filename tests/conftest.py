"""Leak checks for every test: threads, child processes, shared memory, sockets, pipes, memfds and signal handlers.

A test that leaks fails at teardown, with the stack of each leaked thread and the command line of each leaked process.
Processes and threads that a session-, package- or module-scoped fixture started before the test are no leak.

Kernels, ranks and networks that tests share are created again after a test that failed with them, so that its
leftovers do not make the next ones fail, too.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import hypothesis
import psutil
import pytest
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from support import scheduling, shared_memory
from support.patience import GONE
from support.ranks import forked as forked_workers

GRACE = GONE
"""Seconds that threads and processes get to finish what the test has already asked them to."""

OTHERS = 60.0 if "PYTEST_XDIST_WORKER" in os.environ else GRACE
"""Seconds within which a test in another worker removes what it has left in shared memory (MPI's does when it is killed)."""

SLOWEST = 20
"""Groups of tests that the end of a run names."""

_COUNTED_FDS = (
    "socket:",
    "pipe:",
    "/memfd:",
    "anon_inode:[eventpoll]",
    "anon_inode:[eventfd]",
    "anon_inode:[pidfd]",
)


# Its deadline for each example would be an assertion about time.
hypothesis.settings.register_profile("hvdlab", deadline=None)
hypothesis.settings.load_profile("hvdlab")

# In every notebook that a test starts, lines wait longer for those of other ranks than users would accept: a rank that
# a busy machine keeps waiting must not change which lines are shown as one, and in which order.
os.environ.setdefault("HVDLAB_OUTPUT_HOLD", "2")

# nbformat would have jsonschema compile 39 grammars for formats that no notebook has: three seconds of CPU in each worker.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # an import that fails

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background processes so, and every process that a test interrupts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _children() -> set[int]:
    """Return process ids of all descendants. From the kernel's lists, since psutil would read the whole process table.

    A browser that tests share starts and ends processes when it likes: they are not counted.
    """
    found: set[int] = set()
    browser = (
        chromium.shared_processes() if (chromium := sys.modules.get("support.jupyter.chromium")) else set()
    )
    todo = [os.getpid()]
    while todo:
        tasks = f"/proc/{todo.pop()}/task"
        for thread in _entries(tasks):
            try:
                with open(f"{tasks}/{thread}/children", "rb", buffering=0) as listing:
                    pids = {int(pid) for pid in listing.read().split()}
            except OSError:  # the thread has ended since the listing
                continue
            pids -= browser
            todo += pids - found
            found |= pids
    return found


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # the process has ended
        return []


def _is_tracker(pid: int) -> bool:
    """The resource tracker of multiprocessing belongs to the interpreter, not to the test that needed it first."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended, so it is no leak
        return True


def _new_children(before: set[int]) -> set[int]:
    servers = forked_workers.server_pids()
    return {pid for pid in _children() - before - servers if not _is_tracker(pid)}


def _fds() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(_COUNTED_FDS):
            found[int(name)] = target
    return found


def _handlers() -> dict[signal.Signals, Any]:
    """Return this process's handlers of the signals that end programs."""
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def _new_fds(before: dict[int, str]) -> list[tuple[int, str]]:
    # The resource tracker's pipe belongs to the interpreter, as the tracker itself does.
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    others = {tracker, *forked_workers.server_fds()}
    return [(fd, target) for fd, target in _fds().items() if before.get(fd) != target and fd not in others]


def _settled(remaining: Callable[[], object], deadline: float) -> None:
    while remaining() and time.monotonic() < deadline:
        time.sleep(0.005)


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    lines = "".join(traceback.format_stack(frame)) if frame else "  (no frame)\n"
    return f"thread {thread.name!r} (daemon={thread.daemon}):\n{lines}"


def _command(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"process {pid} [{process.status()}]: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {pid}: gone"


_TIMINGS = pytest.StashKey[scheduling.Timings]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Read how long tests took. Workers get that from the process that gives them tests: all must sort alike."""
    given = getattr(config, "workerinput", {}).get("group_seconds")
    config.stash[_TIMINGS] = (
        scheduling.Timings.read(config.rootpath) if given is None else scheduling.Timings(given)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["group_seconds"] = node.config.stash[_TIMINGS].groups


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of whole systems, and let the long groups begin."""
    for item in items:
        if scheduling.is_system_test(item.nodeid):
            item.add_marker("system")
    timings = config.stash[_TIMINGS]
    items.sort(key=lambda item: timings.order(scheduling.group_of(item.nodeid)))


def pytest_collection_finish() -> None:
    """Take everything that is there now out of the collector's sight: thousands of modules and tests, which stay.

    A full collection goes over all of them, and IPython asks for one whenever a shell ends: a second for each test of magics.
    """
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    """Print the slowest groups of a run of several, and keep all times for the next run."""
    timings = config.stash[_TIMINGS]
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                timings.count(report)
    if timings.ran:
        timings.write(config.rootpath)
    if len(slowest := timings.slowest(SLOWEST)) > 1:
        terminalreporter.section("slowest groups")
        for line in scheduling.report_lines(slowest):
            terminalreporter.line(line)
    return (yield)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> scheduling.GroupScheduling:
    return scheduling.GroupScheduling(config, log)


@runtime_checkable
class Renewable(Protocol):
    """Resource that tests share; ``closed`` once the last of them has run."""

    closed: bool

    def renew(self) -> None: ...


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    used = [one for one in getattr(item, "funcargs", {}).values() if isinstance(one, Renewable)]
    failed = item.stash.get(_FAILED, False)
    try:
        return (yield)
    except BaseException:
        failed = True
        raise
    finally:
        for one in {id(one): one for one in used}.values() if failed else ():
            if not one.closed:
                one.renew()


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Fail the test that leaves threads, processes, shared memory, sockets, pipes, memfds or signal handlers behind."""
    threads, children, memory, fds = _threads(), _children(), shared_memory.entries(), _fds()
    handlers = _handlers()
    yield
    deadline = time.monotonic() + GRACE
    _settled(lambda: {t for t in _threads() - threads if t.is_alive()}, deadline)
    _settled(lambda: _new_children(children), deadline)
    _settled(lambda: _new_fds(fds), deadline)
    leaks = [_stack(t) for t in _threads() - threads if t.is_alive()]
    leaks += [_command(p) for p in _new_children(children)]
    leaks += [f"/dev/shm/{e}" for e in shared_memory.left(memory, within=OTHERS)]
    leaks += [f"fd {fd} -> {target}" for fd, target in _new_fds(fds)]
    for number, handler in _handlers().items():
        if handler is not handlers[number]:
            leaks.append(f"{number!r} is handled by {handler}")
            # Otherwise programs that later tests start could ignore it, too.
            signal.signal(number, handlers[number])
    if leaks:
        pytest.fail("left behind by the test:\n" + "\n".join(leaks), pytrace=False)
