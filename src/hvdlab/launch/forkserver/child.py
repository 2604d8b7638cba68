"""From a fork of the fork server to a rank or a controller: what is the child's own is set up here."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import re
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from hvdlab.collectives.system import die_with_parent, name_process
from hvdlab.launch.forkserver.forking import Role
from hvdlab.launch.forkserver.lifeline import depend_on
from hvdlab.launch.forkserver.messages import CONTROLLER
from hvdlab.launch.forkserver.program import ForkedProgram, Preloads


def become(role: Role, program: ForkedProgram, *, open_files: int) -> NoReturn:
    """Be what the role says, in a forked child, and end the process with it.

    Args:
        program: What runs in children.
        open_files: Soft limit on open files.
    """
    code = 1
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        _set_up(role, program)
        code = _run(role, program)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:  # noqa: BLE001  (the end of the process; its last words say why)
        # Not to sys.stderr, which cells write to: the thread that sends that may be what could not be started.
        traceback.print_exc(file=sys.__stderr__)
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End a forked process: run exit handlers and flush, but don't tear down what is shared with the fork server.

    An orderly end of the interpreter would touch, and so copy, every object that the fork shares.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=_end_after, args=(3.0, code), name="hvdlab-exit", daemon=True).start()
    # atexit has no public way to run the handlers that the user's code registered without ending the interpreter.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def _end_after(seconds: float, code: int) -> None:
    """Exit even if an exit handler hangs."""
    threading.Event().wait(seconds)
    os._exit(code)


def _set_up(role: Role, program: ForkedProgram) -> None:
    order = role.order
    os.setsid()  # Ctrl-C in the notebook's terminal must reach the pool alone, which passes it on
    if order.number == CONTROLLER:
        die_with_parent(role.parent)
    _connect_standard_descriptors(role)
    depend_on(role.lifeline)
    if not os.read(role.leave_to_live, 1):
        # The pool may not know of this process; then a successor of the fork server forks another one.
        os.write(2, b"The process that forked this one died before it could tell so.\n")
        os._exit(1)
    os.close(role.leave_to_live)
    signal.signal(signal.SIGINT, _ignore_interrupt)
    os.environ.clear()
    os.environb.update(order.environment)
    os.chdir(order.directory if os.path.isdir(order.directory) else os.path.expanduser("~"))
    sys.path[:] = map(os.fsdecode, order.path)
    sys.argv[:] = [""]
    faulthandler.enable()
    gc.enable()
    if order.number == CONTROLLER:
        name_process("hvd-controller", "hvdlab: ipyparallel controller")
    else:
        name_process(f"hvd-rank-{order.number}", f"hvdlab: rank {order.number}")
        refresh_libraries(program)


def _connect_standard_descriptors(role: Role) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (role.log, 1), (role.log, 2)):
        os.dup2(source, target, inheritable=True)
    for source in (nothing, role.log):
        if source > 2:
            os.close(source)
    # The inherited objects may have been made for a terminal or a file.
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(descriptor, mode, buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _ignore_interrupt(number: int, frame: object) -> None:
    """A handler in place of SIG_IGN, which programs that the rank starts would inherit."""


def _run(role: Role, program: ForkedProgram) -> int:
    if role.order.number == CONTROLLER:
        return program.run_controller(role.order.argv, role.channel)
    return program.run_rank(role.order.argv, role.pipes, role.unsent)


# -- libraries that were imported before the fork -----------------------------------------------------------------------


def refresh_libraries(program: Preloads) -> None:
    """Undo what a fork must not share: random states, and thread pools sized for one process."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1") or 1)
    _size_openblas(threads)
    program.refresh(threads)


def _size_openblas(threads: int) -> None:
    """The fork server loads OpenBLAS with one thread, so that none runs at the fork; give the rank its own number."""
    if threads <= 1:
        return
    pattern = re.compile(r"\S*openblas\S*\.so\S*")
    libraries = set(pattern.findall(Path("/proc/self/maps").read_text()))
    names = (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads",
    )
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in names:
            if hasattr(library, name):
                getattr(library, name)(threads)
                break
