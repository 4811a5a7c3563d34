"""The report: one file, well formed, offline, safe against what a run says, and alive in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshwright.islands.island_log import island_folder
from meshwright.report.run_page import write_report
from meshwright.runs.record import RunRecord
from meshwright.spec import UserError, load
from meshwright.train.callbacks import Observers

VOID = {"meta", "input", "br", "img", "link", "hr"}
RESULT: dict[str, Any] = {
    "final_loss": 2.43,
    "val_loss": 2.51,
    "val_bits_per_byte": 1.5,
    "xz_bits_per_byte": 2.0,
    "tokens_per_second": 12345.6,
    "mfu": 0.361,
    "matmul_flops_per_second": 213.4e9,
    "peak_memory_bytes": 1000 * 2**20,
    "memory": {
        "parameters": 100 * 2**20,
        "gradients": 100 * 2**20,
        "optimiser": 200 * 2**20,
        "activations/other": 500 * 2**20,
        "peak": 1000 * 2**20,
    },
    "parameters_sha256": "ab" * 32,
    "samples_sha256": "cd" * 32,
    "steps": 40,
    "seconds": 83.0,
    "sample": {"prompt": "def main():", "text": "def main():\n    return 1"},
    "layout": "dp=2, zero=3",
    "parameters": 32112640,
}


class Page(HTMLParser):
    """A strict reading of a page: open tags, and the text and attributes seen."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def make_run(
    out: Path,
    steps: int = 40,
    losses: dict[int, float] | None = None,
    evals: int = 10,
    result: dict[str, Any] | None = RESULT,
    spec: dict[str, Any] | None = None,
) -> str:
    """Record a run with the loss 9 / sqrt(step), report on it, and return the page."""
    with Observers([RunRecord(out)]) as observer:
        observer.on_start({"spec": spec or load().to_json(), "step": 0, "last_step": steps, "device": "cpu"})
        for step in range(1, steps + 1):
            loss = (losses or {}).get(step, 9 / step**0.5)
            observer.on_step(
                {"step": step, "loss": loss, "grad_norm": loss / 3, "lr": 3e-4, "tokens_per_second": 1000.0}
            )
            if evals and step % evals == 0:
                observer.on_eval({"step": step, "val_loss": 9.1 / step**0.5, "val_bits_per_byte": 1.5})
        observer.on_event("checkpoint", {"step": steps, "path": "checkpoints/1"})
        if result is not None:
            observer.on_end(result)
    return write_report(out).read_text(encoding="utf-8")


def test_a_mixture_has_a_curve_for_each_source(tmp_path: Path) -> None:
    sources = [{"loss": 5.0, "bits_per_byte": 2.0}, {"loss": 4.0, "bits_per_byte": None}]
    with Observers([RunRecord(tmp_path)]) as observer:
        observer.on_start({"spec": load().to_json(), "step": 0, "last_step": 2, "device": "cpu"})
        for step in (1, 2):
            named = {"<prose>": sources[0], "code": sources[1 - step % 2]}
            observer.on_eval({"step": step, "val_loss": 5.0, "val_bits_per_byte": 2.0, "val_sources": named})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Held-out bits per byte by source" in page and "&lt;prose&gt;" in page and "<prose>" not in page
    assert "by source" not in make_run(tmp_path / "other", steps=20)


RUNS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without evaluations": {"evals": 0},
    "one step": {"steps": 1},
    "interrupted": {"result": None},
    "stopped before a step": {"steps": 0, "result": None},
    "diverged": {"losses": {step: float("nan") for step in range(20, 41)}},
    "never finite": {"losses": {step: float("nan") for step in range(1, 41)}, "evals": 0, "result": None},
    "empty result": {"result": {}},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_gives_a_well_formed_page(name: str, tmp_path: Path) -> None:
    html = make_run(tmp_path, **RUNS[name])
    assert tmp_path.name in Page(html).text


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_fetched(name: str, tmp_path: Path) -> None:
    html = make_run(tmp_path, **RUNS[name])
    page = Page(html)
    assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]", re.sub(r"(?m)^\s*//.*$", "", html))
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    assert not [value for key, value in page.attributes if key in ("src", "href", "action")]
    assert "@import" not in html and "url(" not in html
    assert re.search(r"content=\"default-src 'none';", html)


def test_the_headline_figures_are_those_of_the_result(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path)).text
    for figure in (
        "2.4300",
        "2.5100",
        "1.500 bits/byte",
        "25.0% below xz -9e (2.000)",
        "12,346 tokens/s",
        "36.1%",
        "of 213.4 GFLOP/s",
        "1000.0 MiB",
        "1:23",
        "ab" * 32,
    ):
        assert figure in text, figure


def test_islands_have_curves_in_one_page_and_a_histogram_of_lateness(tmp_path: Path) -> None:
    result = RESULT | {"lateness": {"0": 4, "2": 12}}
    for island in (0, 1):
        one = Page(make_run(island_folder(tmp_path, island), result=result | {"island": island}))
        assert "late by 2 12 · 75.0%" in one.text and "late by 1 0" in one.text
    rows = [{"island": k, "code": 0, "steps": 40, "exchanges": 9 - k, "restarts": k} for k in (0, 1)]
    (tmp_path / "run.json").write_text(json.dumps({"spec": load().to_json()}))
    (tmp_path / "result.json").write_text(json.dumps(result | {"islands": rows}))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "late by 0 4 · 25.0%" in page.text and "island 0 island 1" in page.text
    assert ("href", "island.1/report.html") in page.attributes


def test_an_interrupted_run_says_so_and_shows_its_last_step(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path, steps=36, result=None)).text
    assert "no result yet" in text and "1.5000 at the last step" in text
    assert "no result yet" not in Page(make_run(tmp_path / "other")).text


def test_memory_adds_up_to_the_peak(tmp_path: Path) -> None:
    """The components explain 900 of 1,000 MiB: the bar is whole and its last part is the rest."""
    html = make_run(tmp_path)
    widths = [float(width) for width in re.findall(r'<i class="c\d" style="width:([\d.]+)%', html)]
    assert len(widths) == 5 and sum(widths) == pytest.approx(100, abs=0.01)
    assert "not attributed 100.0 MiB · 10.0%" in Page(html).text


def test_the_layout_and_the_whole_spec_are_told(tmp_path: Path) -> None:
    spec = load(None, [("layout.dp", "4"), ("layout.zero", "3"), ("train.batch_tokens", "16384")]).to_json()
    text = Page(make_run(tmp_path, spec=spec)).text
    assert "dp 4" in text and "= 4 ranks" in text and "ZeRO 3" in text
    for part in filter(None, spec.values()):
        for key in part:
            assert key in text, key


EVIL = "</pre></script><script>document.title='pwned'</script><img src=x onerror=alert(1)>\"'&amp;"


def test_what_a_run_says_stays_text(tmp_path: Path) -> None:
    """Sample, spec, events, memory and the folder's name come from outside."""
    out = tmp_path / "a<b>'\"&run"
    spec = load().to_json()
    spec["data"]["corpus"] = EVIL
    spec[EVIL] = {EVIL: EVIL}
    result = RESULT | {
        "sample": {"prompt": EVIL, "text": EVIL + EVIL + "\x00\x1b[2J\ud800"},
        "layout": EVIL,
        "memory": {EVIL: 5.0},
        "parameters_sha256": EVIL,
    }
    with Observers([RunRecord(out)]) as observer:
        observer.on_start({"spec": spec, "step": 0, "last_step": 1, "device": EVIL})
        observer.on_step({"step": 1, "loss": 1.0})
        observer.on_event(EVIL, {EVIL: EVIL})
        observer.on_end(result)
    html = write_report(out).read_text(encoding="utf-8")
    page = Page(html)
    benign = Page(make_run(tmp_path / "benign", steps=1, evals=0))
    assert page.tags.count("script") == benign.tags.count("script") - 3  # three charts have no data
    assert "img" not in page.tags and not [key for key, _ in page.attributes if key.startswith("on")]
    # Prompt once, text without the prompt once, spec four times and four times beside the defaults, event
    # three, device, memory, fingerprint.
    assert page.text.count("document.title='pwned'") == 16
    assert "\x00" not in html and "\x1b" not in html


def test_a_sample_is_shown_letter_by_letter(tmp_path: Path) -> None:
    html = make_run(tmp_path, result=RESULT | {"sample": {"prompt": "if a <", "text": " b & c:\n\treturn"}})
    assert '<pre dir="auto"><b>if a &lt;</b> b &amp; c:\n\treturn</pre>' in html


def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path: Path) -> None:
    steps, spike = 40_000, 31_803
    make_run(tmp_path, steps=10, result=None)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            loss = 2 + (step * 7919 % 1000) / 5000 if step != spike else 77.7777
            rate = 1000 + step % 97
            row = {"step": step, "loss": loss, "grad_norm": loss, "lr": 1e-4, "tokens_per_second": rate}
            file.write(json.dumps(row) + "\n")
    path = write_report(tmp_path)
    html = path.read_text()
    assert path.stat().st_size < 1_000_000
    data = [
        json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', html)
    ]
    loss = data[0]["series"][0]
    assert loss["name"] == "training" and loss["y"][loss["x"].index(spike)] == 77.7777


@pytest.mark.parametrize(("steps", "lost"), [(40, (11, 15)), (150, (60, 90)), (3000, (1501, 1501))])
def test_rows_that_are_missing_leave_a_gap(tmp_path: Path, steps: int, lost: tuple[int, int]) -> None:
    whole = make_run(tmp_path, steps)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    first, last = lost
    kept = [row for row in rows if not first <= json.loads(row)["step"] <= last]
    (tmp_path / "metrics.jsonl").write_text("".join(kept))
    html = write_report(tmp_path).read_text()

    def strokes(page: str, css: str) -> int:
        return max(path.count("M") for path in re.findall(rf'<path class="[^"]*{css}" d="([^"]*)"', page))

    for css in ("line", "faint") if steps >= 100 else ("line",):
        assert (strokes(whole, css), strokes(html, css)) == (1, 2)
    assert "not finite:" not in html


def test_a_folder_without_a_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run\.json"):
        write_report(tmp_path)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def dump_dom(page: Path, profile: Path) -> str:
    """The document as it stands after the browser has loaded the page and run its script."""
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --dump-dom"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}", page.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@needs_chromium
def test_the_page_comes_alive_in_a_browser(tmp_path: Path) -> None:
    """Under its own content security policy the script runs to its end, and found every chart."""
    make_run(tmp_path / "run")
    dom = dump_dom(tmp_path / "run" / "report.html", tmp_path / "profile")
    assert 'data-ready="true"' in dom and 'data-charts="4"' in dom


@needs_chromium
def test_hovering_reads_out_the_nearest_step(tmp_path: Path) -> None:
    """The pointer in the middle of 40 steps (the axis starts at 0) reads step 20, of both curves."""
    html = make_run(tmp_path / "run")
    hover = """<script>
      const frame = document.querySelector(".frame"), box = frame.getBoundingClientRect();
      const x = box.left + box.width / 2, y = box.top + 9;
      frame.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
      document.title = frame.querySelector(".tip").innerText.replaceAll("\\n", "|");
    </script></body>"""
    page = tmp_path / "hover.html"
    # The policy lets no script run but the page's own, so that the test's needs a page without it.
    page.write_text(
        re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("</body>", hover)
    )
    dom = dump_dom(page, tmp_path / "profile")
    training, validation = 9 / 20**0.5, 9.1 / 20**0.5
    assert f"<title>step 20|training {training:.4f}|validation {validation:.4f}</title>" in dom


@needs_chromium
def test_the_policy_stops_any_other_script(tmp_path: Path) -> None:
    html = make_run(tmp_path / "run")
    page = tmp_path / "injected.html"
    page.write_text(html.replace("</body>", "<script>document.title = 'injected'</script></body>"))
    dom = dump_dom(page, tmp_path / "profile")
    assert 'data-ready="true"' in dom and "<title>injected</title>" not in dom
