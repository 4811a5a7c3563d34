"""The page of a plan holds every part of its explanation, opens offline, and comes alive."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from html import unescape
from pathlib import Path

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import describe
from meshwright.planner.explain.neighbours import TERMS
from meshwright.planner.memory.exact import memory_model
from meshwright.report.plan_page import AXIS_COLOURS, MEMORY_COLOURS, TIME_COLOURS, write_plan_page
from meshwright.spec import RunSpec, UserError
from meshwright.units import gigabytes, percent, seconds


def run(layout: dict, model: str = "llama2-7b") -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": model},
            "data": {"seq_len": 4096},
            "train": {"batch_tokens": 64 * 4096},
            "precision": {"compute": "bf16"},
            "layout": {"micro_batch": 1, **layout},
        }
    )


PLANS = (
    run({"dp": 4, "tp": 2, "pp": 4, "zero": 1}),
    run({"dp": 8, "tp": 4, "zero": 1}),
    run({"dp": 16, "tp": 4, "zero": 1}),
)
ON = CostModel(cluster("h100", 32))
PARETO = tuple((step_time(spec, ON).seconds, memory_model(ON).peak(spec).device) for spec in PLANS[:2])
SECTIONS = (
    "Where the time goes",
    "Memory by pipeline rank",
    "Timeline of a step",
    "Communication of one rank in one step",
    "Links of one device",
    "Plans",
    "The plans in numbers",
    "Neighbours",
    "What would change the choice",
    "Assumptions and sources",
)


@cache
def page(folder: Path) -> str:
    write_plan_page(folder / "plan.html", PLANS, ON, PARETO)
    return (folder / "plan.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(tmp_path_factory.mktemp("plan"))


def part(html: str, title: str) -> str:
    """The HTML of a section."""
    (found,) = re.findall(rf"<h2>{title}</h2>(.*?)(?=<h2>|</main>)", html, re.DOTALL)
    return unescape(found)


def test_every_section_is_there_once_and_holds_something(html: str) -> None:
    assert re.findall(r"<h2>(.*?)</h2>", html) == list(SECTIONS)
    for title in SECTIONS:
        assert re.sub(r"<[^>]*>", "", part(html, title)).strip() or "<svg" in part(html, title)


def test_nothing_is_fetched(html: str) -> None:
    assert not re.search(r"""(?:src|href|action)\s*=|url\(|@import|https?://""", html)
    assert "default-src 'none'" in html


def test_bars_of_memory_are_the_terms_of_each_rank(html: str) -> None:
    rows = re.findall(
        r'<div class="row">(.*?)</div><span class="total">(.*?)</span>', part(html, SECTIONS[1])
    )
    assert len(rows) == 4
    most = max(86e9, memory_model(ON).peak(PLANS[0]).device)
    for drawn, total in rows:
        widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', drawn)]
        size = float(total.removesuffix(" GB")) * 1e9
        assert sum(widths) == pytest.approx(100 * size / (1.01 * most), rel=0.02)
        assert 'class="limit"' in drawn
    assert gigabytes(memory_model(ON).peak(PLANS[0]).device) in [total for _, total in rows]


def test_bars_of_time_fill_their_rows(html: str) -> None:
    for drawn in re.findall(r'<div class="track">(.*?)</div>', part(html, SECTIONS[0])):
        assert sum(map(float, re.findall(r"width:([\d.]+)%", drawn))) == pytest.approx(100, abs=0.1)


def test_plans_are_told_in_their_order_also_those_of_more_devices(html: str) -> None:
    rows = re.findall(r"<tr><td.*?</tr>", part(html, "The plans in numbers"))
    assert len(rows) == len(PLANS)
    for row, spec in zip(rows, PLANS, strict=True):
        on = CostModel(cluster("h100", spec.layout.world_size))
        assert describe(spec) in row and f">{seconds(step_time(spec, on).seconds)}<" in row
        assert (
            f">{percent(Candidate(spec, on).fits_probability)}<" in row
        )  # as the headline says of the first


def test_every_point_of_the_front_is_in_the_plot(html: str) -> None:
    plot = part(html, "Plans")
    points = re.findall(r'<path class="c2 pareto points" d="M([\d.]+) ([\d.]+)h0">', plot)
    assert len(points) == len(PARETO)
    assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 300 for x, y in points)
    assert plot.count("c1 chosen points") == 1


def test_every_part_has_a_colour_of_its_own() -> None:
    spec = PLANS[0]
    assert set(TIME_COLOURS) == set(step_time(spec, ON).parts)
    assert set(MEMORY_COLOURS) == set(TERMS)
    for colours in (TIME_COLOURS, MEMORY_COLOURS, AXIS_COLOURS):
        assert len(set(colours.values())) == len(colours)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_plan_page(tmp_path / "no" / "plan.html", PLANS[:1], ON, ())


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_comes_alive_under_its_own_policy(html: str, tmp_path: Path) -> None:
    (tmp_path / "plan.html").write_text(html, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
    command = [
        str(CHROMIUM),
        *flags.split(),
        f"--user-data-dir={tmp_path}",
        (tmp_path / "plan.html").as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert 'data-ready="true"' in ended.stdout and "final step" in ended.stdout
