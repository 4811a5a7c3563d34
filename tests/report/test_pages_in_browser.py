"""Every page in a browser, light, dark and at 400 px: no errors, no overflow, legible, told by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, needs_chromium
from meshwright import api
from meshwright.chaos.verdict import ORACLES, by_kind
from meshwright.report.chaos_page import write_chaos_page
from meshwright.report.timeline import ClockSpan, write_clocks, write_timeline
from meshwright.schedule import StageCost, StageLink, make, simulate
from meshwright.spec import RunSpec
from recorded_runs import record_run

PAGES = ("report", "comparison", "timeline", "clocks", "plan", "chaos")
pytestmark = needs_chromium

# Texts whose contrast with what is behind them is below WCAG 2's 4.5, and parts that are cut off or run out.
ILLEGIBLE = """(() => {
  const parse = (css) => css.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("main *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest("script, svg, .unseen") || !element.checkVisibility()) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))].sort();
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(element.textContent.trim().slice(0, 40) + " " + contrast.toFixed(2));
  }
  return found;
})()"""
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"


def chaos_report() -> dict[str, Any]:
    """The object that `chaos` gives of a run with two faults of three seconds each."""
    faults = [
        {
            "at": 4.0 * place, "kind": "kill", "rank": 1, "step": 9 * place, "phase": "forward",
            "noticed": 0.5, "resumed": 2.5, "back": 3.0, "lost": 2, "message": "rank 1 was ended by SIGKILL",
            "unnoticed": False, "misnamed": place == 2,
        }
        for place in (1, 2)
    ]  # fmt: skip
    oracles = {name: None if name == "samples" else name != "named" for name in ORACLES}
    return {
        "injected": 2, "planned": 3, "steps": 40, "nproc": 2, "mtbf_seconds": 4.0, "seed": 1, "holds": False,
        "end": "", "effective": 0.6, "seconds": 20.0, "unfaulted_seconds": 12.0, "detection_seconds": 0.5,
        "restart_seconds": 2.5, "faults": faults, "kinds": by_kind(faults), "oracles": oracles,
        "unexplained": [], "left_behind": [], "step_seconds": 0.3,
    }  # fmt: skip


CLOCKS = [
    ("host", [ClockSpan(0.0, 0.4, "calls of the host", "forward in blocks.0")]),
    ("compute", [ClockSpan(0.1, 0.5, "products", "mm (forward in blocks.0)"),
                 ClockSpan(0.8, 1.0, "copies", "copy_ (forward in blocks.0)")]),
    ("shard, group 1", [ClockSpan(0.2, 0.8, "messages", "shard all_gather (forward in blocks.0)")]),
]  # fmt: skip


def clocks_result() -> dict[str, Any]:
    rates = {"step_seconds": 1.0, "tokens_per_second_per_gpu": 512.0, "mfu": 0.4, "causal_mfu": 0.3}
    times = {"products": 0.4, "copies": 0.2, "host": 0.1, "messages": 0.3}
    term = {"term": "products", "seconds": 0.4, "planner_seconds": 0.5, "ratio": 0.8, "apart": True}
    wait = {"what": "shard all_gather", "place": "forward in blocks.0", "at": 0.5, "seconds": 0.3}
    timed = rates | {
        "device": "H100 SXM 80 GB", "host_bound_seconds": 0.1, "longest_waits": [wait],
        "compute_stream": [
            {"kind": kind, "waiting": kind in ("host", "messages"), "count": 1, "seconds": seconds}
            for kind, seconds in times.items()
        ],
        "planner": rates | {"ratio": 1.0, "terms": [term]},
    }  # fmt: skip
    ranks = [{"rank": 0, "timeline": timed}]
    return {"world_size": 8, "layout": "dp=8, zero=3", "assumed": ["routing is even"], "ranks": ranks}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    first = record_run(folder / "first")
    second = record_run(folder / "second", steps=60, flags={"train.lr": "0.01"}, scale=7)
    timed = simulate(make("zb-v", 4, 2, 9), StageCost(0.011, 0.012, 0.007), StageLink(1e-4, 1e10), 0.02)
    spec = RunSpec.model_validate(
        {
            "model": {"preset": "tiny"},
            "train": {"batch_tokens": 8192},
            "layout": {"dp": 2, "pp": 2, "micro_batch": 1},
        }
    )
    api.explain(spec, cluster="h100", out=folder / "plan.html")
    write_chaos_page(folder / "chaos.html", chaos_report(), ORACLES)
    return {
        "report": Path(api.report([first])["page"]),
        "comparison": Path(api.report([first, second])["page"]),
        "timeline": write_timeline(timed, folder / "timeline.html"),
        "clocks": write_clocks(folder / "clocks.html", clocks_result(), CLOCKS),
        "plan": folder / "plan.html",
        "chaos": folder / "chaos.html",
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.mark.parametrize("name", PAGES)
def test_pages_in_a_browser(name: str, pages: dict[str, Path], browser: Browser) -> None:
    assert pages[name].stat().st_size < 100_000
    for width, dark in ((1280, False), (1280, True), (400, False)):
        assert browser.open(pages[name], width, dark) == []
        assert browser.run(OVERFLOW) <= 0, (width, dark)
        assert browser.run(ILLEGIBLE) == [], (width, dark)


def test_the_axis_of_all_curves_is_switched(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["comparison"])
    choose = """(() => {
      document.querySelector(".axis input[value=%s]").click();
      const figure = document.querySelector("figure[data-chart=loss]");
      const lines = [...figure.querySelectorAll(".view.linear path.line")];
      const ends = lines.map((line) => Number(line.getAttribute("d").split("L").pop().split(" ")[0]));
      return [figure.querySelector(".axis-name").textContent, ...ends];
    })()"""
    assert browser.run(choose % "tokens") == ["tokens", pytest.approx(1000 * 40 / 60, abs=1), 1000]
    assert browser.run(choose % "time") == [
        "time in training",
        pytest.approx(1000 * (2 + 40 / 4) / (2 + 60 / 4), abs=1),
        1000,
    ]
    assert browser.run(choose % "step") == ["step", pytest.approx(1000 * 40 / 60, abs=1), 1000]
    assert browser.run("document.querySelector('.frame .x').textContent") != ""


def test_charts_and_bars_are_told_by_keyboard(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["report"])
    browser.run("document.querySelector('figure[data-chart=loss] .frame').focus()")
    browser.press("ArrowRight")
    told = "[...document.querySelectorAll('.tip')]"
    seen = "(tip) => getComputedStyle(tip).visibility === 'visible'"
    words = f"{told}.filter({seen}).map((tip) => tip.innerText.replaceAll('\\n', '|'))"
    assert browser.run(words) == ["step 1|training 9|validation 3.1307 (step 10)"]
    browser.press("Escape")
    assert browser.run(words) == []
    browser.run("document.querySelector('.stack').focus()")
    browser.press("ArrowDown")
    (stack,) = browser.run(words)
    assert "before the model: Python, libraries, corpus: 300.0 MiB" in stack

    browser.open(pages["plan"])
    browser.run("document.querySelector('[data-plot] .frame').focus()")
    browser.press("ArrowRight")
    (point,) = browser.run(words)
    assert point and browser.run("document.querySelectorAll('.points.here').length") == 1


def test_events_of_clocks_are_told_by_keyboard(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["clocks"])
    told = "document.getElementById('tip').textContent"
    for key, words in (
        ("n", "host, 0 s + 400 ms"),
        ("j", "compute, 100 ms + 400 ms"),
        ("n", "800 ms + 200 ms"),
    ):
        browser.press(key)
        assert words in browser.run(told)
    assert "copy_ (forward in blocks.0)copies" in browser.run(told)
    legend = browser.run("document.getElementById('legend').textContent")
    assert legend == "productscopiesmessagescalls of the hostidle"


def test_actions_of_the_timeline_are_told_by_keyboard(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["timeline"])
    browser.run("document.getElementById('rows').focus()")
    told = "document.getElementById('tip').innerText.replaceAll('\\n', ': ')"
    browser.press("n")
    assert browser.run(told) == "F0.0 forward: rank 0, stage 0, microbatch 0, 0 s + 11 ms"
    browser.press("n")
    assert browser.run(told).startswith("F0.1 forward: rank 0")
    browser.press("p")
    browser.press("j")
    assert browser.run(told).startswith("F1.0 forward: rank 1")
    browser.press("Escape")
    assert not browser.run("document.getElementById('tip').classList.contains('shown')")


def test_data_is_saved_from_the_page(pages: dict[str, Path], browser: Browser) -> None:
    """The page hands the browser a file of its own making, whose content is caught here."""
    caught = """new Promise((done) => {
      const make = URL.createObjectURL;
      URL.createObjectURL = (blob) => { blob.text().then(done); return make(blob); };
      document.querySelector("%s").click();
    })"""
    browser.open(pages["report"])
    csv = browser.run(caught % "figure[data-chart=loss] .csv").splitlines()
    assert csv[0] == 'step,tokens,seconds,"training","validation"'
    assert csv[1] == "1,1024,2.25,9," and csv[10].startswith("10,10240,4.5,2.84605,3.13")
    assert '"final_loss":1.5' in browser.run(caught % "[data-save=record]")
    browser.open(pages["timeline"])
    lines = browser.run(caught % "#csv").splitlines()
    assert lines[0] == "rank,kind,stage,microbatch,start_s,end_s" and len(lines) == 1 + 4 * 2 * 9 * 3
