"""A rank's debug server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdlab.kernel_ext.rank.debugger import load

PARTS = """\
import sys
sys.path.insert(0, {parts!r})
attempts = getattr(sys, "attempts_of_test", 0) + 1
sys.attempts_of_test = attempts
if attempts < {good}:
    sys.path[:] = {path!r}  # another thread puts it back
sys.path.remove({parts!r})
"""


def test_importing_it_survives_that_the_path_is_put_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "attempts_of_test", 0, raising=False)
    path = list(sys.path)
    for name, good in (("once", 2), ("always", 9)):
        (tmp_path / f"{name}_torn.py").write_text(PARTS.format(parts="/no/where", good=good, path=path))
    load("once_torn")
    assert sys.path == path
    with pytest.raises(ValueError, match="not in list"):
        load("always_torn")
