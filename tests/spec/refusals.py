"""The sentence with which a spec is refused."""

from __future__ import annotations

import pytest

from meshwright.spec import UserError
from meshwright.spec.load import from_tree


def sentence(tree: dict | None = None, *flags: tuple[str, str]) -> str:
    with pytest.raises(UserError) as caught:
        from_tree(tree or {}, flags, source="run.toml")
    text = str(caught.value)
    assert "\n" not in text
    return text
