"""Checkpoints in a store behind the directory: copied behind saves, whole or not seen, and fetched back."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from faults import leftovers, same, steps, tensors, zeros_like
from meshwright.checkpoint import CheckpointError, CheckpointStore
from meshwright.checkpoint.directory import latest_line, latest_step, published
from meshwright.checkpoint.errors import UnreadableError
from meshwright.checkpoint.inspect import verify_checkpoint
from meshwright.checkpoint.remote_checkpoints import SENT
from meshwright.spec import UserError
from meshwright.storage import remote
from meshwright.storage.remote_folder import RemoteFolder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)


def opened(directory: Path, url: str, keep: int = 3, **given: Any) -> CheckpointStore:
    return CheckpointStore(directory, keep, remote=url, **given)


def save(store: CheckpointStore, *steps: int, wait: bool = True) -> list[tuple[str, dict[str, Any]]]:
    """Save steps, each when the one before is in the store, and return what has happened there."""
    for step in steps:
        store.save(step, tensors(step), {"step": step})
        if wait:
            store.second_tier.wait(30)
    return store.second_tier.events()


def kinds(events: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, int]]:
    return [(kind, fields["step"]) for kind, fields in events]


def fetched(directory: Path, url: str, check: Callable[[dict[str, Any]], None] = dict) -> CheckpointStore:
    """A store that has fetched what is newer, and is closed."""
    store = opened(directory, url)
    store.fetch(check)
    store.close()
    return store


def loads(store: CheckpointStore, step: int) -> bool:
    """True if the latest checkpoint is that of `step`, bit for bit."""
    target = zeros_like(tensors(step))
    return store.load(None, target) == {"step": step} and same(target, tensors(step))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def root(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def test_what_is_published_is_copied_and_comes_back_bit_for_bit(tmp_path: Path, url: str) -> None:
    store = opened(tmp_path / "a", url)
    events = save(store, 10, 20)
    store.close()
    assert not store.warnings and kinds(events) == [("uploaded", 10), ("uploaded", 20)]
    here = files(tmp_path / "a")
    there = files(root(url))
    assert there.pop("writer.json") and there["LATEST"] == here["LATEST"] == here[SENT]
    assert there == {name: here[name] for name in here if name[:5] in ("step-", "LATES")}
    assert sum(fields["bytes"] for _, fields in events) == sum(map(len, there.values())) - len(
        there["LATEST"]
    )

    again = fetched(tmp_path / "b", url)
    assert steps(again) == [20] and loads(again, 20) and not again.warnings
    assert not verify_checkpoint(tmp_path / "b").problems and not leftovers(tmp_path / "b")
    ((kind, told),) = again.second_tier.events()
    assert kind == "fetched" and told["step"] == 20 and told["source"] == f"{url}/step-00000020"
    assert told["bytes"] == events[1][1]["bytes"] - len(here["step-00000020/manifest.json"])


def test_any_file_system_of_fsspec_holds_them(tmp_path: Path) -> None:
    store = opened(tmp_path / "a", "memory://second-tier/run")
    assert kinds(save(store, 10, 20)) == [("uploaded", 10), ("uploaded", 20)]
    store.close()
    assert loads(fetched(tmp_path / "b", "memory://second-tier/run"), 20)


def test_a_reader_sees_the_new_checkpoint_whole_or_the_old_one(tmp_path: Path, url: str) -> None:
    """Parts go first, then the manifest, then LATEST; a reader may come at any moment."""
    store = opened(tmp_path / "a", url)
    save(store, 10)
    asked: list[str] = []
    seen: list[int] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def before(folder: RemoteFolder, *given: Any) -> Any:
            name = next(each for each in reversed(given) if isinstance(each, str))
            if threading.current_thread().name != "MainThread" and not asked[len(seen) :]:
                asked.append(name)
                reader = fetched(tmp_path / f"reader-{len(seen)}", url)
                (step,) = steps(reader)
                assert loads(reader, step) and not reader.warnings
                seen.append(step)
            return call(folder, *given)

        return before

    with (
        patch("meshwright.checkpoint.uploads.PARALLEL", 1),
        patch.object(RemoteFolder, "send", noted(RemoteFolder.send)),
        patch.object(RemoteFolder, "write", noted(RemoteFolder.write)),
        patch.object(RemoteFolder, "remove", noted(RemoteFolder.remove)),
    ):
        save(store, 20)
    store.close()
    assert asked == [
        *(f"step-00000020/{name}" for name in ("part-00000.json", "rank-00000.bin", "manifest.json")),
        "LATEST",
    ]
    assert seen == [10, 10, 10, 10] and loads(fetched(tmp_path / "b", url), 20)


def failing(monkeypatch: pytest.MonkeyPatch, ends: str, error: Exception) -> list[str]:
    """Let requests to send a file with such an end fail; the names that were asked for are returned."""
    asked: list[str] = []
    put = RemoteFolder.send.__globals__["put"]

    def fails(store: Any, file: Path, path: str, *given: Any) -> None:
        asked.append(path)
        if path.endswith(ends):
            raise error
        put(store, file, path, *given)

    monkeypatch.setitem(RemoteFolder.send.__globals__, "put", fails)
    return asked


@pytest.mark.parametrize(
    ("error", "reason", "tries"),
    [
        (ConnectionResetError("reset by peer"), "reset by peer", 8),
        (PermissionError("Forbidden"), "Forbidden", 1),
        (OSError(122, "Disk quota exceeded"), "Disk quota exceeded", 1),
        (KeyError("a bug of the library"), "a bug of the library", 1),
    ],
)
@pytest.mark.parametrize("file", ["rank-00000.bin", "manifest.json"])
def test_an_upload_that_fails_in_the_middle_is_told_and_the_next_one_is_tried(
    tmp_path: Path, url: str, file: str, error: Exception, reason: str, tries: int
) -> None:
    store = opened(tmp_path / "a", url)
    save(store, 10)
    with pytest.MonkeyPatch.context() as patched:
        asked = failing(patched, f"step-00000020/{file}", error)
        store.save(20, tensors(20), {"step": 20})
        while not (events := store.second_tier.events()):
            time.sleep(0.01)
    assert kinds(events) == [("upload_failed", 20)] and reason in events[0][1]["reason"]
    assert sum(path.endswith(file) for path in asked) == tries
    (warning,) = store.warnings
    assert f"step-00000020 is not copied to {url}" in warning and reason in warning
    assert "training goes on" in warning and "\n" not in warning
    reader = fetched(tmp_path / "reader", url)
    assert steps(reader) == [10] and loads(reader, 10)

    assert kinds(save(store, 30)) == [("uploaded", 30)]
    store.close()
    assert {name for name in files(root(url)) if "step-00000020" in name} == set()  # the half one is removed
    assert loads(fetched(tmp_path / "b", url), 30) and len(store.warnings) == 1


def test_the_last_checkpoint_is_tried_again_at_the_end_and_told_if_it_fails(tmp_path: Path, url: str) -> None:
    store = opened(tmp_path / "a", url)
    save(store, 10)
    with pytest.MonkeyPatch.context() as patched:
        asked = failing(patched, "step-00000020/rank-00000.bin", PermissionError("Forbidden"))
        events = save(store, 20)
        store.close()
    assert len([each for each in kinds(events) if each == ("upload_failed", 20)]) == len(events) >= 1
    assert len(asked) >= 2 and store.warnings[-1] == (
        f"checkpoint.remote: step-00000020 is not in {url} as the run ends, and its newest is step-00000010; "
        f"start it again with --resume auto, which sends it"
    )
    again = opened(tmp_path / "a", url)
    again.fetch(dict)
    again.copy(20)
    again.second_tier.wait(30)
    assert kinds(again.second_tier.events()) == [("uploaded", 20)]
    again.close()
    assert not again.warnings and loads(fetched(tmp_path / "b", url), 20)


def test_the_store_keeps_what_the_directory_keeps(tmp_path: Path, url: str) -> None:
    store = opened(tmp_path / "a", url, keep=2, keep_every=20)
    save(store, 10, 20, 30, 40, 50, 60, 70)
    store.close()
    assert list(published(tmp_path / "a")) == list(published(root(url))) == [20, 40, 60, 70]
    assert latest_step(root(url)) == 70


def test_each_nth_the_permanent_ones_and_the_last_are_copied(tmp_path: Path, url: str) -> None:
    store = opened(tmp_path / "a", url, keep=9, keep_every=40, remote_every=3)
    events = []
    for step in (10, 20, 30, 40, 50, 60):
        events += save(store, step, wait=False)
        while store.second_tier.in_use():
            time.sleep(0.01)
    events += store.second_tier.events()
    assert kinds(events) == [("uploaded", step) for step in (10, 40)]
    store.second_tier.wait(30)
    assert kinds(store.second_tier.events()) == [("uploaded", 60)]
    store.close()
    assert not store.warnings


class Held:
    """Files that are sent, of names with an end, wait until `go` is set."""

    def __init__(self, patched: pytest.MonkeyPatch, end: str = "") -> None:
        self.go, self.waits = threading.Event(), threading.Event()
        send = RemoteFolder.send

        def held(folder: RemoteFolder, file: Path, name: str) -> None:
            if name.endswith(end):
                self.waits.set()
                assert self.go.wait(60)
            send(folder, file, name)

        patched.setattr(RemoteFolder, "send", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go.set()


def test_no_save_waits_for_the_store_and_what_is_sent_is_not_removed(
    tmp_path: Path, url: str, held: Held
) -> None:
    store = opened(tmp_path / "a", url, keep=1, keep_every=30)
    store.save(10, tensors(10), {"step": 10})
    assert held.waits.wait(30)
    for step in (20, 30, 40, 50, 60):
        store.save(step, tensors(step), {"step": step}, asynchronous=True)
        store.wait()
        store.poll()
    assert store.second_tier.in_use() == {f"step-000000{step}" for step in (10, 30, 60)}
    assert steps(store) == [10, 30, 50, 60]  # 50 waited when 60 was published
    held.go.set()
    store.second_tier.wait(30)
    events = kinds(store.second_tier.events())
    assert [each for each in events if each[0] == "upload_left_out"] == [
        ("upload_left_out", 20), ("upload_left_out", 40), ("upload_left_out", 50),
    ]  # fmt: skip
    assert [step for kind, step in events if kind == "uploaded"] == [10, 60, 30]
    (warning,) = store.warnings
    assert "checkpoints come faster than they are sent" in warning and "remote_every" in warning
    save(store, 70)
    store.close()
    assert steps(store) == list(published(root(url))) == [30, 60, 70]


@pytest.mark.parametrize("file", ["rank-00000.bin", "manifest.json"])
def test_the_end_waits_as_long_as_it_is_told_and_no_file_is_sent_after_it(
    tmp_path: Path, url: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, others = Held(monkeypatch, file), threading.enumerate()
    store = opened(tmp_path / "a", url)
    store.save(10, tensors(10), {"step": 10})
    assert held.waits.wait(30)
    begun = time.monotonic()
    store.second_tier.wait(0.3)
    assert 0.3 <= time.monotonic() - begun < 10
    store.close()
    assert "step-00000010 is not in" in store.warnings[-1] and "this run has sent none" in store.warnings[-1]
    held.go.set()
    for thread in threading.enumerate():
        if thread.name == "uploads" and thread not in others:
            thread.join(30)
    sent = {name.rpartition("/")[2] for name in files(root(url))}
    assert file in sent and "LATEST" not in sent and (file == "manifest.json" or "manifest.json" not in sent)


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def three(tmp_path: Path, url: str) -> Path:
    """The folder of a store with checkpoints of steps 10, 20 and 30."""
    store = opened(tmp_path / "three", url)
    save(store, 10, 20, 30)
    store.close()
    return root(url)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "half": lambda step: (step / "manifest.json").unlink(),
    "without a part": lambda step: (step / "part-00000.json").unlink(),
    "without a file": lambda step: (step / "rank-00000.bin").unlink(),
    "cut": lambda step: (step / "rank-00000.bin").write_bytes((step / "rank-00000.bin").read_bytes()[:-1]),
    "flipped bit": lambda step: spoil(step / "rank-00000.bin"),
    "flipped bit of a part": lambda step: spoil(step / "part-00000.json"),
    "flipped bit of the manifest": lambda step: spoil(step / "manifest.json"),
    "another step's": lambda step: shutil.copy(step.with_name("step-00000020") / "manifest.json", step),
    "gone": lambda step: shutil.rmtree(step),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_damaged_or_half_checkpoint_the_one_before_is_taken_and_told(
    tmp_path: Path, url: str, three: Path, damage: str
) -> None:
    DAMAGE[damage](three / "step-00000030")
    store = fetched(tmp_path / "b", url)
    assert loads(store, 20) and steps(store) == [20] and not leftovers(tmp_path / "b")
    (warning,) = store.warnings
    assert warning.startswith(f"{url}/step-00000030") and str(tmp_path / "b") not in warning
    assert warning.endswith(f"{url}/step-00000020 is used instead")
    assert not fetched(tmp_path / "b", url).warnings  # it is known, and not tried at each start


def test_where_all_are_damaged_the_run_stops_or_goes_on_with_its_own(
    tmp_path: Path, url: str, three: Path
) -> None:
    for step in (10, 20, 30):
        spoil(three / f"step-000000{step}" / "rank-00000.bin")
    with pytest.raises(CheckpointError, match=rf"^no checkpoint in {url} can be used: .*step-00000010"):
        fetched(tmp_path / "b", url)
    assert not published(tmp_path / "b") and not leftovers(tmp_path / "b")
    own = CheckpointStore(tmp_path / "c", 3)
    own.save(15, tensors(15), {"step": 15})
    own.close()
    store = fetched(tmp_path / "c", url)
    assert loads(store, 15)
    (warning,) = store.warnings
    assert "step-00000010" not in warning and warning.endswith("that of step 15 here is used instead")


def test_a_damaged_latest_of_the_store_is_got_over(tmp_path: Path, url: str, three: Path) -> None:
    (three / "LATEST").write_text("step-0000003")
    assert loads(fetched(tmp_path / "b", url), 30)
    (three / "LATEST").unlink()
    assert loads(fetched(tmp_path / "c", url), 30)


@pytest.mark.parametrize("lost", ["newest", "newest and LATEST", "backup"])
def test_an_older_directory_gets_what_it_lacks(tmp_path: Path, url: str, three: Path, lost: str) -> None:
    directory = tmp_path / "three"
    shutil.rmtree(directory / "step-00000030")
    if lost == "newest and LATEST":
        (directory / "LATEST").unlink()
    elif lost == "backup":  # of the time when step 20 was the newest
        for name in ("LATEST", SENT):
            (directory / name).write_text(latest_line("step-00000020"))
    store = fetched(directory, url)
    assert loads(store, 30) and steps(store) == [10, 20, 30] and not store.warnings


def test_a_newer_directory_is_left_as_it_is(tmp_path: Path, url: str, three: Path) -> None:
    store = CheckpointStore(tmp_path / "three", 3)
    store.save(40, tensors(40), {"step": 40})
    store.close()
    with patch.object(RemoteFolder, "fetch", side_effect=AssertionError):
        again = fetched(tmp_path / "three", url)
    assert loads(again, 40) and not again.second_tier.events()


def test_a_run_that_went_back_is_not_overtaken_by_what_it_gave_up(
    tmp_path: Path, url: str, three: Path
) -> None:
    """Neither where the store knows of it, nor where it was not reached."""
    store = opened(tmp_path / "three", url, keep=1)
    store.claim()
    store.go_back(10)
    with patch.object(RemoteFolder, "write", side_effect=PermissionError("Forbidden")):
        store.copy(10)
        store.save(15, tensors(15), {"step": 15})
        store.second_tier.wait(30)
        store.close()
    assert latest_step(three) == 30
    shutil.rmtree(tmp_path / "three" / "step-00000030", ignore_errors=True)
    assert loads(fetched(tmp_path / "three", url), 15)

    store = opened(tmp_path / "three", url)
    store.claim()
    store.copy(15)
    store.second_tier.wait(30)
    store.close()
    assert latest_step(three) == 15
    assert loads(fetched(tmp_path / "elsewhere", url), 15)


def test_a_step_that_is_reached_again_replaces_the_one_of_the_same_name(
    tmp_path: Path, url: str, three: Path
) -> None:
    """While its files are replaced, nobody takes it for whole."""
    shutil.rmtree(tmp_path / "three" / "step-00000030")
    store = opened(tmp_path / "three", url)
    store.claim()
    store.go_back(20)
    whole: list[bool] = []
    send = RemoteFolder.send

    def seen(folder: RemoteFolder, file: Path, name: str) -> None:
        whole.append((three / "step-00000030" / "manifest.json").exists())
        send(folder, file, name)

    with patch.object(RemoteFolder, "send", seen):
        store.save(30, tensors(31), {"step": 30})
        store.second_tier.wait(30)
        store.close()
    assert whole == [False] * 3
    target = zeros_like(tensors(31))
    assert fetched(tmp_path / "b", url).load(None, target) == {"step": 30} and same(target, tensors(31))


def test_a_run_that_lost_its_lease_names_nothing_in_the_store(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zombie whose upload goes on after another process took the directory over."""
    store = opened(tmp_path / "a", url)
    save(store, 10)
    held = Held(monkeypatch)
    store.save(20, tensors(20), {"step": 20})
    assert held.waits.wait(30)
    lease = tmp_path / "a" / "lease.json"
    lease.write_text(json.dumps(json.loads(lease.read_text()) | {"token": "another"}))
    held.go.set()
    while not (events := store.second_tier.events()):
        time.sleep(0.01)
    assert kinds(events) == [("upload_failed", 20)] and "lost the lease" in events[0][1]["reason"]
    assert latest_step(root(url)) == 10
    store.close()


def unreachable(patched: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    def refused(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    for name in ("cat_file", "find", "put_file", "pipe_file", "get_file", "rm_file"):
        patched.setattr(LocalFileSystem, name, refused)


def test_a_store_that_does_not_answer_stops_a_run_only_where_there_is_no_other_checkpoint(
    tmp_path: Path, url: str, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(monkeypatch)
    with pytest.raises(UnreadableError, match=rf"checkpoint\.remote: {url}.*Connection refused") as told:
        fetched(tmp_path / "b", url)
    assert told.value.code == 76
    store = fetched(tmp_path / "three", url)
    (warning,) = store.warnings
    assert "Connection refused" in warning and warning.endswith("that of step 30 here is used instead")


def test_a_checkpoint_of_another_run_is_refused_before_it_is_fetched(
    tmp_path: Path, url: str, three: Path
) -> None:
    def check(state: dict[str, Any]) -> None:
        raise UserError(f"another run's: {state}")

    with pytest.raises(UserError, match=r"another run's: \{'step': 30\}"):
        fetched(tmp_path / "b", url, check)
    assert not published(tmp_path / "b")


def test_a_disk_without_room_is_told(tmp_path: Path, url: str, three: Path) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    with (
        patch("meshwright.checkpoint.fetch.shutil.disk_usage", return_value=full),
        pytest.raises(UserError, match=r"no space in .* for file:.*step-00000030: it needs .* are free"),
    ):
        fetched(tmp_path / "b", url)
    assert not leftovers(tmp_path / "b") and not published(tmp_path / "b")


def test_what_a_fetch_left_that_died_is_removed(tmp_path: Path, url: str, three: Path) -> None:
    (tmp_path / "b" / ".tmp-fetch-0123").mkdir(parents=True)
    assert loads(fetched(tmp_path / "b", url), 30) and not leftovers(tmp_path / "b")


def test_frozen_tensors_are_sent_and_fetched_once(tmp_path: Path, url: str) -> None:
    frozen = {"model/frozen": torch.arange(8.0).view(4, 2)}

    def saved(step: int, value: float) -> CheckpointStore:
        store = opened(tmp_path / "a", url, keep=1)
        store.save_frozen({"model/frozen": frozen["model/frozen"] * value})
        save(store, step)
        store.close()
        return store

    saved(10, 2.0)
    name = saved(20, 1.0).frozen.name
    assert [path.name for path in root(url).glob("frozen-*") if any(path.iterdir())] == [name]
    spare = fetched(tmp_path / "b", url)
    both = zeros_like(tensors(20) | frozen)
    assert spare.load(None, both) == {"step": 20} and same(both, tensors(20) | frozen)

    shutil.rmtree(tmp_path / "b" / "step-00000020")
    with patch.object(RemoteFolder, "fetch", autospec=True, side_effect=RemoteFolder.fetch) as fetch:
        assert fetched(tmp_path / "b", url).load(None, zeros_like(tensors(20) | frozen)) == {"step": 20}
    assert not any("frozen" in call.args[1] for call in fetch.call_args_list)

    spoil(root(url) / str(name) / "rank-00000.bin")
    with pytest.raises(CheckpointError, match=rf"{url}/{name}/rank-00000\.bin is damaged"):
        fetched(tmp_path / "c", url)


def test_a_store_has_one_writer_the_last_to_come(tmp_path: Path, url: str) -> None:
    one = opened(tmp_path / "a", url)
    save(one, 10)
    other = opened(tmp_path / "b", url)
    save(other, 30)
    events = save(one, 20)
    assert {kind for kind, _ in events} == {"upload_failed"}
    assert "another run sends its checkpoints" in events[0][1]["reason"]
    assert str(tmp_path / "b") in events[0][1]["reason"]
    assert kinds(save(other, 40)) == [("uploaded", 40)]
    one.close()
    other.close()
    assert latest_step(root(url)) == 40 and 20 not in published(root(url))


def test_permanent_checkpoints_that_failed_are_sent_later_and_at_the_next_start(
    tmp_path: Path, url: str
) -> None:
    store = opened(tmp_path / "a", url, keep=1, keep_every=20)
    with pytest.MonkeyPatch.context() as patched:
        failing(patched, "step-00000020/rank-00000.bin", PermissionError("Forbidden"))
        save(store, 10, 20)
    assert kinds(save(store, 30)) == [("uploaded", 30), ("uploaded", 20)]
    with pytest.MonkeyPatch.context() as patched:
        failing(patched, "step-00000040/rank-00000.bin", PermissionError("Forbidden"))
        save(store, 40)
        store.close()
    again = opened(tmp_path / "a", url, keep=1, keep_every=20)
    assert kinds(save(again, 50)) == [("uploaded", 50), ("uploaded", 40)]
    again.close()
    assert list(published(root(url))) == [20, 40, 50] and latest_step(root(url)) == 50
