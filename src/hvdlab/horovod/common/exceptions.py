"""``horovod.common.exceptions``: the errors that a Horovod script catches."""

from __future__ import annotations

from hvdlab.collectives.elastic import HostsUpdatedInterrupt
from hvdlab.collectives.errors import CollectiveError as HorovodInternalError

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


class HorovodVersionMismatchError(ImportError):
    """A framework is not of the version that Horovod was compiled for. hvdlab is not compiled and never raises it.

    Attributes:
        name: The framework.
        version: Its version now.
        installed_version: Its version when Horovod was installed.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return a sentence with the two versions of a framework that don't fit."""
    return (
        f"{name} is of version {version} now, but was of version {installed_version} when Horovod was installed; "
        f"either reinstall Horovod, or go back to {name} {installed_version}."
    )
