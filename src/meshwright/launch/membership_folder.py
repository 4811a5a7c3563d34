"""Hosts that meet in the run's folder: no server that can be lost.

    hosts/host-<name>.json       what a supervisor says of its host; its counter is the heartbeat
    hosts/generation-<n>.json    start n of the ranks: the hosts in order of ranks, or how the run ended

Whoever may write in the folder may take part. A generation's file is a hard link to a whole one. Every host
reads the files of all, so that the reads grow with the square of their number: see `FOLDER_HOSTS`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from meshwright import atomic
from meshwright.launch.membership import LOST_S, Host, HostWorld, Membership, decode, encode


class FolderMembership(Membership):
    """The files of one run's hosts in `folder`, as the host `name` sees them."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.place = str(folder)
        self._moved: dict[str, tuple[int, float]] = {}

    def write(self, host: Host) -> None:
        """Replace what is said of this host."""
        atomic.write(self.folder / f"host-{self.name}.json", encode(host))

    def remove(self, name: str) -> None:
        """Remove what is said of a host that leaves, or is lost."""
        (self.folder / f"host-{name}.json").unlink(missing_ok=True)

    def propose(self, world: HostWorld) -> None:
        """Make `world` the newest generation, unless another host has proposed that number before."""
        with suppress(FileExistsError):
            atomic.create(self.folder / f"generation-{world.number}.json", encode(world))

    def look(self, now: float) -> None:
        """Read the newest generation and what the hosts say; `now` is this process's clock."""
        number = self.world.number + 1 if self.world is not None else self._oldest()
        while (file := self.folder / f"generation-{number}.json").exists():
            self._follow(decode(HostWorld, file.read_text(encoding="utf-8"), str(file)))
            number += 1
        hosts = {}
        for file in sorted(self.folder.glob("host-*.json")):
            with suppress(FileNotFoundError):  # a host that has just left
                host = decode(Host, file.read_text(encoding="utf-8"), str(file))
                hosts[host.name] = host
                if self._moved.get(host.name, (-1, 0.0))[0] != host.beat:
                    self._moved[host.name] = host.beat, now
        self.hosts = {name: host for name, host in hosts.items() if now - self._moved[name][1] < LOST_S}
        self.here = tuple(sorted(self.hosts))

    def close(self) -> None:
        """Nothing is open."""

    def _oldest(self) -> int:
        """Return the number of the oldest generation that has a file, or 0."""
        numbers = [file.stem.removeprefix("generation-") for file in self.folder.glob("generation-*.json")]
        return min((int(number) for number in numbers if number.isdecimal()), default=0)
