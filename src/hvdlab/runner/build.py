"""``hvdlab run --check-build``: what this installation can do here, found out by trying."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hvdlab
from hvdlab.collectives.planes import registry
from hvdlab.launch import mpi

Line = tuple[str, str]
"""What there is, and why it can't be used (empty if it can)."""


def report() -> str:
    """The report, in the layout of horovodrun's."""
    sections = {
        "Available Frameworks": _frameworks(),
        "Available Controllers": _controllers(),
        "Available Tensor Operations": _planes(),
    }
    lines = [f"hvdlab v{hvdlab.__version__}:", ""]
    for title, found in sections.items():
        lines.append(f"{title}:")
        lines += [
            f"    [{' ' if reason else 'X'}] {name}" + (f": {reason}" if reason else "")
            for name, reason in found
        ]
        lines.append("")
    return "\n".join(lines).rstrip()


def _frameworks() -> Iterator[Line]:
    yield "PyTorch", "" if importlib.util.find_spec("torch") else "pip install 'hvdlab[torch]'"
    yield "NumPy", ""
    for name, module in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
        there = importlib.util.find_spec(f"hvdlab.{module}") is not None
        yield name, "" if there else "hvdlab has no binding for it"
    yield (
        "MXNet",
        "" if importlib.util.find_spec("mxnet") else "pip install mxnet==1.9.1 numpy==1.23.5, on Python 3.11",
    )


def _controllers() -> Iterator[Line]:
    yield "hvdlab run, on this host", ""
    yield "hvdlab run, on other hosts by ssh", _ssh()
    yield "MPI (mpiexec)", mpi.why_unavailable()
    for program in ("srun", "torchrun"):
        found = shutil.which(program) or Path(sys.executable).with_name(program).exists()
        yield f"{program} python train.py", "" if found else f"`{program}` is not on the PATH"


def _ssh() -> str:
    if shutil.which("ssh") is None:
        return "`ssh` is not on the PATH"
    return "" if importlib.util.find_spec("cryptography") else "TLS needs pip install 'hvdlab[tls]'"


def _planes() -> Iterator[Line]:
    names = [name for name in registry.names() if name not in ("local", "mpi")]
    for name in names:
        yield name, registry.why_unavailable(name) or ""
    yield "mpi", mpi.why_unavailable()
    for name in ("cuda/ipc", "cuda/nccl"):
        yield name, registry.why_unavailable(name) or ""
