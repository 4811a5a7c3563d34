"""Which checkpoints of a directory stay, and the removal of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint.directory import history, step_of, superseded
from meshwright.checkpoint.disk import TEMPORARY, Disk


class Retention:
    """Keeps the newest `keep` checkpoints, and for ever those of steps that `keep_every` (or 0) divides.

    Checkpoints in `damaged` (names) stay too, and do not count for `keep`; those that `in_use` returns stay
    until they are not. A failure to remove one is a sentence in `warnings`: the new checkpoint stands.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        keep_every: int,
        disk: Disk,
        warnings: list[str],
        in_use: Callable[[], set[str]] = set,
    ) -> None:
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        self.damaged: set[str] = set()
        self._in_use = in_use
        self._disk, self._warnings = disk, warnings

    def retire(self, token: str) -> None:
        """Give what does not stay a temporary name with `token`, so that no half of one is ever seen."""
        good = [path for path in history(self.directory) if path.name not in self.damaged]
        used = self._in_use()
        with self._told():
            for path in superseded(self.directory) + [p for p in good[self.keep :] if not self._permanent(p)]:
                if path.name in used:
                    continue
                self._disk.rename(path, self.directory / f"{TEMPORARY}old-{path.name}-{token}")

    def sweep(self) -> None:
        """Remove what was retired, now or by a process that died before it could."""
        with self._told():
            for renamed in sorted(self.directory.glob(f"{TEMPORARY}old-*")):
                self._disk.remove_tree(renamed)

    def _permanent(self, path: Path) -> bool:
        return is_permanent(step_of(path.name), self.keep_every)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warnings.append(f"an old checkpoint in {self.directory} could not be removed: {error}")


def is_permanent(step: int, keep_every: int) -> bool:
    """True if the checkpoint of `step` is kept for ever; step 0 holds imported weights, no training."""
    return keep_every > 0 and step > 0 and step % keep_every == 0
