"""The process of one rank; see ``support/ranks/resident.py``. Runs functions that come over a connection until it is closed."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupts:
    """SIGINT raises only while a function runs, as in a notebook's engine."""

    def __init__(self) -> None:
        self.running = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.running:
            self.running = False
            raise KeyboardInterrupt


def load(file: str, module: str) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def call(
    interrupts: Interrupts, file: str, module: str, name: str, args: tuple[Any, ...]
) -> tuple[bool, Any]:
    try:
        function = reduce(getattr, name.split("."), load(file, module))
        interrupts.running = True
        try:
            return True, function(*args)
        finally:
            interrupts.running = False
    except BaseException as error:  # noqa: BLE001  (any error goes to the test)
        error.add_note("".join(traceback.format_tb(error.__traceback__)))  # which does not travel with it
        return False, error


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # for looking at ranks that hang
    connection = Connection(int(sys.argv[1]))
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    interrupts = Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    while True:
        try:
            file, module, name, args = connection.recv()
        except (EOFError, ConnectionError):  # the test's end of the job
            break
        outcome = call(interrupts, file, module, name, args)
        try:
            data = pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001  (the test learns which object could not be sent)
            data = pickle.dumps((False, RuntimeError(f"can't send {outcome!r}: {error!r}")))
        connection.send_bytes(data)
    from hvdlab.collectives import context

    context.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
