"""The tools of the documentation's site: links to the repository, and the check of a built site's links."""

from __future__ import annotations

import re
import runpy
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))["linked"]
DEAD_LINKS = runpy.run_path(str(ROOT / "tools" / "check_links.py"))["dead_links"]
ADDRESS = "https://example.org/project"


def on_the_site(markdown: str, page: str = "verify.md") -> str:
    """Return the Markdown of a page of docs/ as the site has it."""
    return LINKED(markdown, ROOT / "docs" / page, ROOT / "docs", ROOT, ADDRESS)


def test_links_out_of_the_docs_lead_to_the_repository() -> None:
    text = "[`test`](../tests/test_site.py), [files](../examples/), [part](../README.md#verify)"
    assert on_the_site(text) == (
        f"[`test`]({ADDRESS}/blob/main/tests/test_site.py), [files]({ADDRESS}/tree/main/examples), "
        f"[part]({ADDRESS}/blob/main/README.md#verify)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[page](run.md#model), [here](#below), ![picture](pictures/plan.png)",
        "[elsewhere](https://example.org/../tests), [mail](mailto:a@example.org)",
        "```md\n[in a block](../tests/gone.py)\n```\n",
    ],
)
def test_other_links_stay(text: str) -> None:
    assert on_the_site(text) == text


@pytest.mark.parametrize("target", ["../tests/gone.py", "../../outside.md"])
def test_a_link_to_what_the_repository_lacks_is_refused(target: str) -> None:
    with pytest.raises(LookupError, match=rf"verify\.md: the link {re.escape(target)} leads to a path"):
        on_the_site(f"[gone]({target})")


def test_every_link_of_the_pages_is_made() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        text = on_the_site(page.read_text(encoding="utf-8"), page.name)
        assert "](../" not in re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_dead_links_and_anchors_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").touch()
    (tmp_path / "index.html").write_text(
        '<link href="a.css"><h1 id="top">A</h1><a href="#top">1</a><a href="sub/b.html#b">2</a>'
        '<a href="https://example.org/x">3</a><a href="mailto:a@example.org">4</a>'
        '<img src="gone.png"><source srcset="a.css 1x, gone-2x.png 2x"><a href="#gone">5</a>'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text(
        '<h1 id="b">B</h1><a href="../index.html#gone">1</a><a href="../">2</a><a href="../../x.html">3</a>'
    )
    assert DEAD_LINKS(tmp_path) == [
        "index.html: #gone names an anchor that the page does not have",
        "index.html: gone-2x.png leads to no file of the site",
        "index.html: gone.png leads to no file of the site",
        "sub/b.html: ../../x.html leads to no file of the site",
        "sub/b.html: ../index.html#gone names an anchor that the page does not have",
    ]


def test_pictures_are_small_and_have_the_size_that_the_pages_say() -> None:
    for page in ("index.md", "index.es.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        shown = re.findall(r'srcset="(\S+)"><img src="(\S+)" alt="[^"]+" width="(\d+)" height="(\d+)">', text)
        assert len(shown) == 3
        for dark, light, width, height in shown:
            for name in (dark, light):
                data = (ROOT / "docs" / name).read_bytes()
                size = struct.unpack(">II", data[16:24])  # in a PNG's header
                assert size == (int(width), int(height)), name
                assert len(data) < 64_000, name
