"""Torch's backend for NCCL where torch is built without it: it has Gloo move the tensors of the CPU, and counts the calls that end it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hvdlab.torch.c10d import inner_groups

_Gloo: Any = dist.ProcessGroupGloo


class FakeProcessGroupNCCL(_Gloo):  # type: ignore[misc]
    """See torch's ``ProcessGroupNCCL``.

    Args:
        store, rank, size: As there.
        options: As there; this one reads the timeout.

    Attributes:
        ends: The calls of ``abort`` and ``shutdown``, in order.
    """

    class Options:
        """See torch's ``ProcessGroupNCCL.Options``."""

        _timeout = timedelta(minutes=10)

    made: list[FakeProcessGroupNCCL] = []  # noqa: RUF012  # a registry, which `install` empties
    """All that were made since :func:`install`."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        of_gloo = _Gloo._Options()
        of_gloo._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        of_gloo._timeout = options._timeout
        super().__init__(store, rank, size, of_gloo)
        self.timeout, self.ends = options._timeout, list[str]()
        self.made.append(self)

    def abort(self) -> None:
        self.ends.append("abort")

    def shutdown(self) -> None:
        self.ends.append("shutdown")


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcessGroupNCCL]:
    """Give this process's torch the fake. Inner groups of NCCL's then take tensors of the CPU, in place of CUDA tensors."""
    real = inner_groups._in_group

    def on_cpu(backend: Any, store: Any, rank: int, size: int, device: str, kind: Any) -> Any:
        return real(backend, store, rank, size, {"cuda": "cpu"}.get(device, device), kind)

    monkeypatch.setattr(FakeProcessGroupNCCL, "made", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeProcessGroupNCCL, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(inner_groups, "_in_group", on_cpu)
    return FakeProcessGroupNCCL
