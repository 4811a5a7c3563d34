"""Hooks of mkdocs for the documentation's site, which mkdocs calls for every page.

Links to files outside `docs/`, such as tests, are relative paths on GitHub and in a clone. On the site they
are links to the repository, whose address is `repo_url` in mkdocs.yml. A link to a path that the tree
lacks ends the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BRANCH = "main"
_FENCE = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<=>)(--[\w.-]+)(?=<)")
_TARGET = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's Markdown with links to the repository."""
    from mkdocs.exceptions import PluginError

    root, source = Path(config.config_file_path).parent, Path(page.file.abs_src_path)
    try:
        return linked(markdown, source, Path(config.docs_dir), root, config.repo_url)
    except LookupError as error:
        raise PluginError(str(error)) from error


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's HTML in which no line of a command ends between the hyphens of a flag."""
    return _FLAG.sub(r'<span class="flag">\1</span>', html)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Return a page's HTML with its language, which the names of Spanish pages tell."""
    spanish = page.file.src_uri.endswith(".es.md")
    return output.replace('<html lang="en"', '<html lang="es"', 1) if spanish else output


def linked(markdown: str, source: Path, docs: Path, root: Path, address: str) -> str:
    """Return Markdown whose relative links out of the folder `docs` are links to the repository.

    Args:
        markdown: Text of the page.
        source: The page's file.
        docs: Folder of the site's pages.
        root: Folder of the repository.
        address: The repository's address.

    Raises:
        LookupError: a link leads to a path that is not in the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        target, fragment = match[1], match[2] or ""
        path = (source.parent / target).resolve()
        if path.is_relative_to(docs.resolve()):
            return match[0]
        if not path.is_relative_to(root.resolve()) or not path.exists():
            raise LookupError(f"{source.name}: the link {target} leads to a path that the repository lacks")
        kind = "tree" if path.is_dir() else "blob"
        name = path.relative_to(root.resolve()).as_posix()
        return f"{address.rstrip('/')}/{kind}/{BRANCH}/{name}{fragment}"

    return "".join(_TARGET.sub(replaced, part) if is_prose else part for is_prose, part in _parts(markdown))


def _parts(markdown: str) -> Iterable[tuple[bool, str]]:
    """Yield (True, text) of prose and (False, text) of fenced blocks, in their order."""
    at = 0
    for fence in _FENCE.finditer(markdown):
        yield True, markdown[at : fence.start()]
        yield False, fence[0]
        at = fence.end()
    yield True, markdown[at:]
