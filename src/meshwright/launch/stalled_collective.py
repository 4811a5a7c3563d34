"""The collective that a run hangs in, and the ranks that it waits for, by what ranks have finished.

Ranks of a group number its collectives alike (`comm/collective_log.py`). The first that one of them has not
finished is due to ranks that have not issued it, or else to those whose devices have not reached it, or that
have not finished what others have. Such a rank may itself wait in another group; then that one comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.comm.collective_log import GroupProgress
from meshwright.units import counted, gigabytes


@dataclass(frozen=True)
class StalledCollective:
    """A collective that is not finished: its number in its group, who waits, and for whom.

    `late` is empty where all ranks that are seen have reached it, and none has finished it.
    """

    progress: GroupProgress
    number: int
    waiting: tuple[int, ...]
    late: tuple[int, ...]
    deed: Literal["started", "reached", "finished"]
    """The deed that the late ranks have not done."""
    unseen: int
    """Ranks of the group on other hosts."""
    ended_on_some: bool = False
    """True if those that wait have finished it themselves."""

    def sentence(self, first: int) -> str:
        """A clause about it, for a host whose first rank is number `first`."""
        each, waiting = self.progress, names(self.waiting, first)
        size = f", {gigabytes(each.bytes)} to send" if each.bytes else ""
        what = f"collective {self.number} of its group ({each.axis} {each.operation}{size})"
        several = len(self.waiting) > 1
        if self.late:
            late, have = names(self.late, first), "have" if len(self.late) > 1 else "has"
            if self.deed == "reached":
                late, have = f"the device{'s' * (len(self.late) > 1)} of {late}", have
            which = f"{waiting} {'wait' if several else 'waits'} for"
            if self.ended_on_some:
                which = f"{waiting} {'have' if several else 'has'} finished"
            return f"{late} {have} not {self.deed} {what}, which {which}"
        waits = f"{waiting} {'are' if several else 'is'} in {what}"
        if self.unseen:
            return f"{waits}, which {counted(self.unseen, 'ranks')} of other hosts, or a link to them, delays"
        return f"{waits}, which all have reached and none has finished: perhaps a link is cut"


def stalled_collective(
    ranks: Mapping[int, Sequence[GroupProgress]], first: int = 0
) -> StalledCollective | None:
    """The collective that the others depend on; None where all that were started have ended.

    `ranks` has what each rank of this host has published, of which the first is number `first`.
    """
    groups: dict[int, dict[int, GroupProgress]] = defaultdict(dict)
    for rank, listed in ranks.items():
        for each in listed:
            groups[each.identity][rank] = each
            other = each.peer - first
            if each.peer >= 0 and other in ranks:  # it may not have begun to send or to receive
                groups[each.identity].setdefault(other, each._replace(started=0, reached=0, finished=0))
    found = [stalled for group in groups.values() if (stalled := _of_group(group)) is not None]
    blocked = {rank for stalled in found for rank in stalled.waiting if not stalled.ended_on_some}
    # A rank that is late since it waits in another group is no cause. Ranks that wait on each other all are.
    causes = [each for each in found if each.late and not blocked.intersection(each.late)]
    return min(causes or found, key=lambda each: (not each.late, -len(each.waiting)), default=None)


def _of_group(group: Mapping[int, GroupProgress]) -> StalledCollective | None:
    """The first collective of a group that a rank has started and not finished; None if there is none."""
    open_ones = [each for each in group.values() if each.finished < each.started]
    if not open_ones:
        return None
    first = min(open_ones, key=lambda each: each.finished)
    number, unseen = first.finished + 1, first.ranks - len(group)
    started = [rank for rank, each in group.items() if each.started >= number]
    reached = [rank for rank, each in group.items() if each.reached >= number]
    waiting = [rank for rank in reached if group[rank].finished < number]
    finished = [rank for rank in started if group[rank].finished >= number]

    def stalled(
        others: list[int], late: list[int], deed: Literal["started", "reached", "finished"]
    ) -> StalledCollective:
        return StalledCollective(first, number, tuple(others), tuple(late), deed, unseen, bool(finished))

    if finished:
        late = [rank for rank in group if rank not in finished]
        return stalled(finished, late, "finished" if set(late) & set(started) else "started")
    if len(started) < len(group):
        return stalled(started, [rank for rank in group if rank not in started], "started")
    if waiting and len(reached) < len(group):
        return stalled(waiting, [rank for rank in group if rank not in reached], "reached")
    return stalled(started, [], "finished")


def names(ranks: Sequence[int], first: int = 0) -> str:
    """Words for ranks of a host whose first is number `first`: runs of numbers in one."""
    runs: list[list[int]] = []
    for rank in sorted(first + each for each in ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    listed = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
