"""Programs from Debian's packages, which are brought once, unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.patience import PATIENCE


class Unavailable(Exception):
    """The packages cannot be installed here; the text gives the reason."""


def unpacked(cache: Path, packages: Sequence[str], proof: str) -> Path:
    """Return where packages are, after they were brought if they were not there.

    Args:
        cache: A directory that keeps them.
        packages: Their names, with those of the libraries that they need beside a base system.
        proof: A file that is there then.

    Raises:
        Unavailable: They can't be had.
    """
    root = cache / "root"
    if (root / proof).exists():
        return root
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise Unavailable(f"Debian's packages need `{tool}`")
    debs, partial = cache / "debs", cache / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    debs.mkdir(parents=True, exist_ok=True)
    download = ("apt-get", "-o", "APT::Sandbox::User=root", "download", *packages)
    done = _apt(*download, directory=debs)
    if done.returncode != 0 and _apt("apt-get", "update").returncode == 0:  # the lists are missing, or old
        done = _apt(*download, directory=debs)
    if done.returncode != 0:
        raise Unavailable(f"packages could not be downloaded: {_last_line(done.stderr)}")
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, partial], check=True)
    if not (partial / proof).exists():
        raise Unavailable(f"the packages have no {proof} any more")
    partial.rename(root)
    return root


def libraries(root: Path) -> Path:
    """Return where their libraries are."""
    return root / "usr/lib" / f"{os.uname().machine}-linux-gnu"


def _apt(*words: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, cwd=directory, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"`{words[0]}` did not answer within {PATIENCE:g} s") from error


def _last_line(text: str) -> str:
    return next(iter(reversed(text.strip().splitlines())), "")
