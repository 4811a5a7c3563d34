"""Whatever a run file or a flag says, the loader answers with a spec or with one sentence."""

from __future__ import annotations

import math
import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec import UserError
from meshwright.spec.load import from_tree
from meshwright.spec.schema import known_keys
from meshwright.spec.toml import to_toml

KEYS = sorted(known_keys())
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.sampled_from([2**31, 2**40, 2**63, 10**40, 10**4000])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["none", "auto", "ring", "full", "bf16", "tiny", "../x", "__import__('os')"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def answer(tree: dict[str, Any], flags: list[tuple[str, str]]) -> None:
    try:
        spec = from_tree(tree, flags, source="run.toml")
    except UserError as error:
        assert str(error).strip()
        assert len(str(error).splitlines()) == 1
    else:
        assert math.isfinite(spec.train.lr)
        assert from_tree(tomllib.loads(to_toml(spec))) == spec


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_tree_is_a_spec_or_a_sentence(flat: dict[str, Any]) -> None:
    answer(nested(flat), [])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(KEYS) | st.text(max_size=12), st.text(max_size=12)), max_size=3))
def test_any_flags_are_a_spec_or_a_sentence(flags: list[tuple[str, str]]) -> None:
    answer({}, flags)


@settings(max_examples=200)
@given(VALUES, st.sampled_from(["model", "train", "recompute", "data", "layout", "x"]))
def test_any_value_for_a_table_is_a_spec_or_a_sentence(value: Any, table: str) -> None:
    answer({table: value}, [])
