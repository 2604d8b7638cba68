"""Trials of pools that change their size, and of cells that fail before they have done anything."""

from __future__ import annotations

import time

from chaos.pieces import Pieces


class Resizing(Pieces):
    """Trials of cells on new ranks."""

    def resizing(self) -> None:
        """Add ranks that lack a cell's variables: it fails before any collective was matched; then they go again."""
        campaign = self.campaign
        pool, size = campaign.pool, campaign.size
        pool.resize(size + 1)
        self.victim = self.outcome.victim = size
        at = time.monotonic()
        run = pool.start_run("training.check()", out=self.sink, label="[7]")
        results = self.await_end(run)
        self.told(at, time.monotonic(), self.outcome.said)
        if results.ok:
            self.outcome.wrong.append("a rank that lacks the training has run it")
        pool.resize(size)
