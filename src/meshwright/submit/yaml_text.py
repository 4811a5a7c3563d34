"""YAML as people write it: keys in their order, and texts of several lines as blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """A dumper whose long texts stay as they are, and that never names an object twice by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def documents(trees: Iterable[dict[str, Any]]) -> str:
    """Return trees as the documents of one file."""
    return str(yaml.dump_all(trees, Dumper=_Dumper, sort_keys=False, width=110))
