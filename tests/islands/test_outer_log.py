"""The log of islands: one order for all, quorums and grace, bounds on staleness, islands lost and found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm.authentication import new_secret
from meshwright.comm.control import Control
from meshwright.comm.mailbox import LostPeerError, Mailbox, Peer
from meshwright.islands.island_log import Entry, IslandLog
from meshwright.islands.outer_log import LoggedArrivals
from meshwright.islands.outer_quorum import Contribution
from meshwright.spec import UserError
from meshwright.spec.outer import OuterSpec


class Model:
    """An island of one rank and one parameter, whose step moves it by `speed`."""

    def __init__(
        self, folder: Path, number: int, events: list[tuple[str, int]] | None = None, **outer: Any
    ) -> None:
        self.number, self.spec = number, OuterSpec(**{"every": 1, "lr": 1.0, "momentum": 0.0, **outer})
        self.anchor, self.value = torch.zeros(3), torch.zeros(3)
        self.merged = self.base = 0
        self.order: list[list[tuple[int, int]]] = []
        self.told = events if events is not None else []
        self.arrivals = LoggedArrivals(
            IslandLog(folder), number, self.spec, Control(), "127.0.0.1",
            lambda kind, fields: self.told.append((kind, fields["island"])),
        )  # fmt: skip

    def agreed_tensors(self) -> list[Tensor]:
        return [self.anchor]

    def take_anchors(self, step: int) -> None:
        self.value.copy_(self.anchor)
        self.base = self.merged

    def join(self, islands: int, restore: Callable[[], None] = lambda: None) -> None:
        self.arrivals.join(self, 0, islands, restore)  # type: ignore[arg-type]

    def step(self, number: int) -> None:
        self.value -= float(self.number + 1)
        own = Contribution(self.number, self.base, 10 * (self.number + 1))
        for exchange in self.arrivals.exchanges(number, own, [self.anchor - self.value]):
            tokens = sum(each.tokens for each in exchange.contributions)
            for each in exchange.contributions:
                self.anchor -= exchange.moved_of(each)[0] * (each.tokens / tokens)
            self.order.append([(each.island, self.merged - each.base) for each in exchange.contributions])
            self.merged += 1
        self.take_anchors(number)


def run(models: list[Model], steps: dict[int, int], pause: dict[int, float] | None = None) -> None:
    """Let islands take so many steps each, at the same time, with a pause before each."""
    failures: list[BaseException] = []

    def train(model: Model) -> None:
        try:
            model.join(len(models))
            for number in range(1, steps[model.number] + 1):
                time.sleep((pause or {}).get(model.number, 0.0))
                model.step(number)
            model.arrivals.leave("done")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


def exchanges(folder: Path) -> list[Entry]:
    return [entry for entry in IslandLog(folder).entries() if entry.kind == "exchange"]


def test_all_islands_follow_one_order(tmp_path: Path) -> None:
    models = [Model(tmp_path, number, quorum=1) for number in range(3)]
    run(models, dict.fromkeys(range(3), 12))
    log = exchanges(tmp_path)
    parts = [row for entry in log for row in entry.contributions]
    assert {island: sum(row[0] == island for row in parts) for island in range(3)} == dict.fromkeys(
        range(3), 12
    )
    longest = max(models, key=lambda model: model.merged)
    assert longest.merged == len(log)
    for model in models:
        assert model.order == longest.order[: len(model.order)]
        moved = 0.0  # what the log says alone tells the anchors; an island moves by its number, plus 1
        for entry in log[: model.merged]:
            tokens = sum(row[2] for row in entry.contributions)
            moved += sum((row[0] + 1) * row[2] / tokens for row in entry.contributions)
        torch.testing.assert_close(model.anchor, torch.full((3,), -moved))


def test_a_quorum_is_waited_for_and_weighted_by_tokens(tmp_path: Path) -> None:
    models = [Model(tmp_path, number, quorum=2) for number in range(3)]
    run(models, dict.fromkeys(range(3), 8), {2: 0.05})
    sizes = {len(entry.contributions) for entry in exchanges(tmp_path)[:6]}
    assert min(sizes) >= 2  # the last ones come when others are done


def test_in_the_time_of_grace_all_islands_come(tmp_path: Path) -> None:
    models = [Model(tmp_path, number, quorum=1, grace_seconds=5.0) for number in range(3)]
    began = time.monotonic()
    run(models, dict.fromkeys(range(3), 5))
    assert time.monotonic() - began < 20  # nobody waits for longer than it takes
    assert [len(entry.contributions) for entry in exchanges(tmp_path)] == [3] * 5
    assert models[0].anchor.equal(models[1].anchor)
    mean = -(1 * 10 + 2 * 20 + 3 * 30) / 60
    torch.testing.assert_close(models[0].anchor, torch.full((3,), 5 * mean))


@pytest.mark.parametrize("bound", [1, 4])
def test_a_fast_island_waits_for_one_that_is_too_far_behind(tmp_path: Path, bound: int) -> None:
    models = [Model(tmp_path, number, quorum=1, max_staleness=bound) for number in range(2)]
    run(models, {0: 10, 1: 10}, {1: 0.05})
    done = [0, 0]
    for entry in exchanges(tmp_path):
        islands = [row[0] for row in entry.contributions]  # both, where they came at the same time
        assert all(done[island] - min(done) <= bound for island in islands)
        for island in islands:
            done[island] += 1
    assert done == [10, 10]


def test_an_island_that_joins_gets_the_anchors(tmp_path: Path) -> None:
    first = Model(tmp_path, 0, quorum=1)
    first.join(1)
    for number in range(1, 4):
        first.step(number)
    second = Model(tmp_path, 1, quorum=1)
    joining = threading.Thread(target=second.join, args=(2,), daemon=True)
    joining.start()
    time.sleep(0.3)
    first.step(4)  # serves it on the way
    joining.join(20)
    assert not joining.is_alive()
    assert second.merged in (3, 4) and second.value.equal(second.anchor)
    second.step(1)
    first.step(5)
    assert first.anchor.tolist() == [-7.0] * 3  # five steps of the first by 1, one of the second by 2
    assert ("island_joined", 1) in first.told


def test_an_island_with_another_outer_step_is_refused(tmp_path: Path) -> None:
    """Its anchors would leave those of the others, from the first exchange on."""
    first = Model(tmp_path, 0, quorum=1)
    first.join(1)
    for key, value in (("lr", 0.5), ("momentum", 0.1)):
        with pytest.raises(UserError, match=rf"outer\.{key}: {value}, and island 0"):
            Model(tmp_path, 1, quorum=1, **{key: value}).join(2)
    assert [entry.island for entry in IslandLog(tmp_path).entries()] == [0]
    first.step(1)  # which goes on


def test_a_lost_island_costs_the_others_nothing_but_its_tokens(tmp_path: Path) -> None:
    models = [Model(tmp_path, number, quorum=2) for number in range(2)]
    threads = [threading.Thread(target=model.join, args=(2,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    first, second = models
    pair = [threading.Thread(target=model.step, args=(1,), daemon=True) for model in models]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join(20)
    second.arrivals.mailbox.close()  # as when its process dies
    models.clear()
    began = time.monotonic()
    for number in (2, 3):
        first.step(number)
    assert time.monotonic() - began < 15
    assert [len(entry.contributions) for entry in exchanges(tmp_path)] == [2, 1, 1]
    assert ("island_lost", 1) in first.told


@pytest.mark.parametrize("islands", [2, 3])
def test_an_island_with_other_anchors_starts_again_and_takes_those_of_most(
    tmp_path: Path, islands: int
) -> None:
    """With three islands the others go on; with two none is known to be right, so both end."""
    outer: dict[str, Any] = {"quorum": 2, "grace_seconds": 3.0}
    models = [Model(tmp_path, number, **outer) for number in range(islands)]
    run_together([lambda model=model: model.join(islands) for model in models])  # type: ignore[misc]
    run_together([lambda model=model: model.step(1) for model in models])  # type: ignore[misc]
    assert len({tuple(model.anchor.tolist()) for model in models}) == 1
    models[1].anchor[2] += 1e-3
    failed: dict[int, str] = {}

    def step(model: Model) -> None:
        try:
            model.step(2)
        except RuntimeError as error:
            failed[model.number] = str(error)
            model.arrivals.mailbox.close()  # as when its process ends

    run_together([lambda model=model: step(model) for model in models])  # type: ignore[misc]
    assert "the anchors of island 1 are not those of island" in failed[1]
    assert ("divergence", 1) in models[1].told
    if islands == 2:
        assert sorted(failed) == [0, 1]
        return
    assert sorted(failed) == [1] and models[0].anchor.equal(models[2].anchor)
    again = Model(tmp_path, 1, **outer)
    joining = threading.Thread(target=again.join, args=(3,), daemon=True)
    joining.start()
    time.sleep(0.3)
    run_together([lambda: models[0].step(3), lambda: models[2].step(3)])  # which serves it on the way
    joining.join(20)
    assert not joining.is_alive()
    run_together([lambda model=model: model.step(4) for model in (models[0], again, models[2])])  # type: ignore[misc]
    assert again.anchor.equal(models[0].anchor) and again.merged == models[0].merged


def run_together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_the_last_island_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    first = Model(tmp_path, 0, quorum=1)
    first.join(1)
    first.step(1)
    first.arrivals.leave("done")
    second = Model(tmp_path, 1, quorum=1)

    def restore() -> None:
        second.anchor.copy_(first.anchor)
        second.merged = first.merged

    second.join(2, restore)
    second.step(1)
    assert second.merged == 2 and second.anchor.tolist() == [-3.0] * 3


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    log = IslandLog(tmp_path / "islands")
    assert log.append(0, Entry("leave", 0, reason="done"))
    assert not log.append(0, Entry("leave", 1, reason="done"))
    entry = log.read(0)
    assert entry is not None and entry.island == 0 and log.read(1) is None


def test_messages_arrive_whole_and_a_lost_mailbox_is_told() -> None:
    secret = new_secret()
    box = Mailbox("127.0.0.1", secret)
    peer = Peer(box.address, secret)
    sent = [torch.randn(3_000_000), torch.arange(5), torch.randn(2, 3, dtype=torch.float64)]
    peer.send("name", sent)
    assert box.has("name") and not box.has("other")
    for found, wanted in zip(box.take("name", sent), sent, strict=True):
        assert found.equal(wanted)
    assert not box.has("name")
    with pytest.raises(LostPeerError, match="another process"):
        Peer(box.address._replace(word="other"), secret)
    with pytest.raises(LostPeerError, match="does not answer"):
        Peer(box.address, new_secret())
    box.close()
    with pytest.raises(LostPeerError, match="does not answer"):
        peer.send("name", sent)
