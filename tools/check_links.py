"""Check of a built site: links, pictures, styles and scripts lead to its files, and fragments to anchors.

Run as `python tools/check_links.py SITE`, the folder that `mkdocs build` made; prints a line for each dead
link and exits with 1 if there is one. Links to other hosts are not followed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REFERENCES = ("href", "src", "srcset")


@dataclass
class Page(HTMLParser):
    """The anchors that a page of HTML has, and the addresses that it refers to."""

    anchors: set[str] = field(default_factory=set)
    references: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Start the parser."""
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the anchors and references of one element."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        for name in REFERENCES:
            # A srcset has several addresses, each with the size that it is for.
            listed = values.get(name, "").split(",") if name == "srcset" else [values.get(name, "")]
            self.references |= {each.split()[0] for each in listed if each.strip()}


def dead_links(site: Path) -> list[str]:
    """Return a sentence for each internal reference of the site's pages that leads nowhere."""
    pages = {path.resolve(): parsed(path) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site.resolve())}: {reference} {reason}"
        for path, page in pages.items()
        for reference in sorted(page.references)
        if (reason := _reason(reference, path, site.resolve(), pages))
    ]


def parsed(path: Path) -> Page:
    """Return the anchors and references of a page."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def _reason(reference: str, source: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """Return why a reference is dead; None for one that is not, or that leaves the site."""
    parts = urlsplit(reference)
    if parts.scheme or parts.netloc:
        return None
    name = unquote(parts.path)
    # 404.html is served at any depth, so its references begin at the root of the site.
    base = site if name.startswith("/") else source.parent
    target = (base / name.lstrip("/")).resolve() if name else source
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site) or not target.is_file():
        return "leads to no file of the site"
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].anchors:
        return "names an anchor that the page does not have"
    return None


def main() -> int:
    """Check the site that is named and return the exit code."""
    if len(sys.argv) != 2 or not Path(sys.argv[1], "index.html").is_file():
        sys.stderr.write("usage: python tools/check_links.py SITE, a folder with an index.html\n")
        return 2
    lines = dead_links(Path(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
