"""A second tier of checkpoints, in an object store behind the directory that all ranks see.

Rank 0 sends what is published there (`uploads`), and fetches what the directory lacks (`fetch`).
"""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.fetch import CheckState, Fetcher
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.no_second_tier import NoSecondTier
from meshwright.checkpoint.uploads import CopyPolicy, Event, Uploads
from meshwright.comm.control import Control
from meshwright.comm.waiting import while_others_wait


class SecondTier(NoSecondTier):
    """The checkpoints of `directory` at the URL `url`, which get `copies` of them."""

    def __init__(
        self,
        directory: Path,
        url: str,
        copies: CopyPolicy,
        ranks: Control,
        lease: Lease,
        disk: Disk,
        warnings: list[str],
    ) -> None:
        self._directory, self._url, self._ranks = directory, url, ranks
        self._lease, self._disk, self._warnings = lease, disk, warnings
        self._uploads = Uploads(directory, url, copies, lease, disk, warnings)
        self._fetched: list[Event] = []

    def published(self, path: Path) -> None:
        self._uploads.published(path)

    def send(self, path: Path) -> None:
        self._uploads.send(path)

    def in_use(self) -> set[str]:
        return self._uploads.in_use()

    def events(self) -> list[Event]:
        fetched, self._fetched = self._fetched, []
        return fetched + self._uploads.events()

    def fetch(self, check: CheckState) -> None:
        def newest() -> None:
            found = Fetcher(self._directory, self._url, self._lease, self._disk, self._warnings).newest(check)
            if found is not None:
                self._fetched.append(("fetched", found))

        while_others_wait(self._ranks, self._ranks.rank == 0, newest)

    def wait(self, seconds: float) -> None:
        while_others_wait(self._ranks, self._ranks.rank == 0, lambda: self._uploads.wait(seconds))

    def close(self) -> None:
        self._uploads.close()
