"""Templates escape whatever they show, and refuse to be filled with less than they name."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from meshwright.report.chart import Points, scatter
from meshwright.report.page import render

EVIL = "</title><script>alert(1)</script>\"'\x00\x1b\x9b\ud800"


def test_every_value_of_a_plot_is_escaped() -> None:
    groups = [Points(EVIL, EVIL, [(1.0, 2.0, EVIL)]), Points(EVIL, "c1", [(2.0, 3.0, EVIL)], joined=True)]
    html = scatter(EVIL, groups, EVIL, EVIL, 4.0, EVIL)
    assert "<script" not in html and "alert(1)" in html
    assert '"c1 points"' in html and html.count("&lt;script&gt;") == 13
    assert not {"\x00", "\x1b", "\x9b", "\ud800"} & set(html)


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("scatter.html", title="without the rest")


def test_data_of_a_script_cannot_end_it() -> None:
    chart = {"wide": False, "key": "k", "title": "t", "series": []}
    views = [{"name": "linear", "paths": [], "labels": []}]
    html = render(
        "chart.html", chart=chart, gaps=0, views=views, steps=[], data={"name": EVIL}, width=1, height=1
    )
    assert html.count("</script>") == 1
