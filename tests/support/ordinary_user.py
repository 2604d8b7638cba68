"""Rights of an ordinary user: a function in a forked child that is uid 65534, if the tests run as root."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

NOBODY = 65534  # uid and gid without any rights of their own


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` as another user than root, with no more descriptors than this process has; raise its
    exceptions.

    Its result goes through a pipe as a pickle. The child shares no thread with this process.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            with open(writer, "wb") as pipe:
                pickle.dump(_outcome(function, args), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    worked, value = pickle.loads(said)  # noqa: S301  (our own child wrote it)
    if not worked:
        raise value
    return value


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        return True, function(*args)
    except Exception as error:  # noqa: BLE001  (it is raised in the parent)
        return False, error
