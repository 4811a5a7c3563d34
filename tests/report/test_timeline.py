"""The timeline of a simulated step: a page in one file, and a trace, that hold what was simulated."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from meshwright.report.timeline import TICKS, write_timeline, write_trace
from meshwright.schedule import Simulation, StageCost, StageLink, make, simulate
from meshwright.spec import UserError
from meshwright.units import seconds

COST = StageCost(0.011, 0.012, 0.007, activations=1e6, output=1e6)


def step(name: str = "zb-v", virtual: int = 2, final: float = 0.02) -> Simulation:
    return simulate(make(name, 4, virtual, 9), COST, StageLink(1e-4, 1e10), final)


def page(simulated: Simulation, folder: Path) -> str:
    return write_timeline(simulated, folder / "step.html").read_text(encoding="utf-8")


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def unpacked(packed: str) -> list[int]:
    return list(array("I", base64.b64decode(packed)))


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved", 3), ("v-min", 2)])
def test_the_page_holds_what_was_simulated(name: str, virtual: int, tmp_path: Path) -> None:
    simulated = step(name, virtual)
    data = data_of(page(simulated, tmp_path))
    schedule = simulated.schedule
    actions = list(chain.from_iterable(schedule.actions))
    ranks = [rank for rank, count in enumerate(data["counts"]) for _ in range(count)]
    codes = unpacked(data["codes"])
    assert [data["kinds"][code % 4][0] for code in codes] == [action.kind.name for action in actions]
    stages = [data["stages"][rank][code // 4] for rank, code in zip(ranks, codes, strict=True)]
    assert stages == [action.stage for action in actions]
    assert unpacked(data["microbatches"]) == [action.microbatch for action in actions]
    for packed, times in ((data["start"], simulated.start), (data["end"], simulated.end)):
        shown = [tick / TICKS * data["makespan"] for tick in unpacked(packed)]
        assert shown == pytest.approx([*chain.from_iterable(times)], abs=simulated.makespan / TICKS)
    assert data["bubbles"] == [*simulated.bubbles]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    html = page(step(), tmp_path)
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", html)
    assert not re.search(r"<link|<img|\bsrc=|@import|url\(", html)
    assert "default-src 'none'" in html


def test_the_page_says_each_rank_in_numbers(tmp_path: Path) -> None:
    simulated = step()
    rows = re.findall(r"<tr>(<td>.*?)</tr>", page(simulated, tmp_path))
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert [row[:4] for row in cells] == [
        [str(rank), f"{rank}, {7 - rank}", seconds(simulated.busy[rank]), seconds(simulated.idle[rank].total)]
        for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.25, "1.25 s"), (0.0185, "18.5 ms"), (6.01e-4, "601 us"), (2e-8, "20 ns"), (0.0, "0 s")],
)
def test_times_have_the_unit_that_suits_them(value: float, words: str) -> None:
    assert seconds(value) == words


def test_the_trace_is_what_was_simulated(tmp_path: Path) -> None:
    simulated = step()
    trace = json.loads(write_trace(simulated, tmp_path / "step.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    for rank, listed in enumerate(simulated.schedule.actions):
        own = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        *actions, last = own
        assert [event["name"] for event in actions] == [f"{a.kind.name} {a.microbatch}" for a in listed]
        assert [event["args"]["stage"] for event in actions] == [action.stage for action in listed]
        assert [event["ts"] for event in actions] == pytest.approx([1e6 * t for t in simulated.start[rank]])
        ends = [event["ts"] + event["dur"] for event in actions]
        assert ends == pytest.approx([1e6 * t for t in simulated.end[rank]])
        assert last["name"] == "final step" and last["dur"] == pytest.approx(20_000)


def test_a_step_without_a_final_step_shows_none(tmp_path: Path) -> None:
    trace = write_trace(step(final=0.0), tmp_path / "step.json").read_text(encoding="utf-8")
    assert "final step" not in trace


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    for write in (write_timeline, write_trace):
        with pytest.raises(UserError):
            write(step(), tmp_path / "no" / "step")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def dump_dom(html: Path, profile: Path) -> str:
    """The document after the browser has loaded it and run its script."""
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}", html.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@needs_chromium
def test_the_timeline_comes_alive_under_its_own_policy(tmp_path: Path) -> None:
    page(step(), tmp_path)
    dom = dump_dom(tmp_path / "step.html", tmp_path / "profile")
    assert 'data-ready="true"' in dom
    assert "weight backward (W), chunk 1" in dom and "final step" in dom


@needs_chromium
def test_pointing_tells_the_action_and_keys_zoom(tmp_path: Path) -> None:
    """Just after the start rank 0 computes F of microbatch 0, however close one looks; rank 3 is idle."""
    html = page(step(), tmp_path)
    script = """<script>
      const rows = document.getElementById("rows"), box = rows.getBoundingClientRect(), told = [];
      const point = (rank) => {
        const at = { clientX: box.left + 58, clientY: box.top + (rank + 0.5) * box.height / 4 };
        rows.dispatchEvent(new PointerEvent("pointermove", at));
        told.push(document.getElementById("tip").innerText.replaceAll("\\n", ": "));
      };
      point(0); point(3);
      for (let i = 0; i < 4; i++) document.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
      for (let i = 0; i < 99; i++) document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
      point(0);
      document.title = told.join(" | ");
    </script></body>"""
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    (tmp_path / "pointed.html").write_text(bare.replace("</body>", script), encoding="utf-8")
    dom = dump_dom(tmp_path / "pointed.html", tmp_path / "profile")
    first = "F0.0 forward: rank 0, stage 0, microbatch 0, 0 s + 11 ms"
    wait = seconds(step().idle[3].fill)
    assert f"<title>{first} | idle: rank 3, {wait} | {first}</title>" in dom
