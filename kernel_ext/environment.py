"""What a foreign launcher's environment says about a rank. (``collectives.environment`` has what we set for our ranks.)"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlab.collectives.rendezvous.launchers import detect


def foreign_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """What a foreign launcher's variables mean for this rank; empty without such a launcher.

    What the launcher does not say, such as the number of hosts, is left out. Raises ``InvalidRequestError`` for
    variables that make no sense.
    """
    launched = detect(environ)
    if launched is None:
        return {}
    found = {
        ("RANK", "HVDLAB_RANK", "HOROVOD_RANK"): launched.rank,
        ("WORLD_SIZE", "HVDLAB_SIZE", "HOROVOD_SIZE"): launched.size,
        ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"): launched.local_rank,
        ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"): launched.local_size,
    }
    return {name: str(value) for names, value in found.items() if value is not None for name in names}
