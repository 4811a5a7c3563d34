"""The list of keys is the parts' own fields, and the schema admits what the loader does."""

from __future__ import annotations

import json

from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.load import from_tree
from meshwright.spec.schema import known_keys, optional_tables, parts_of, schema


def leaves(tree: dict, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        inner = isinstance(value, dict) and value
        found |= leaves(value, f"{prefix}{name}.") if inner else {prefix + name}
    return found


def test_every_field_of_a_spec_is_a_known_key() -> None:
    tables = {
        "rope_scaling": {"kind": "llama3"},
        "moe": {"experts": 4, "top_k": 2, "ffn": 8},
        "mla": {"kv_rank": 8, "rope_dim": 8, "v_dim": 8},
    }
    preset = {"preset": "tiny", "kv_heads": ModelSpec(preset="tiny").heads}
    given = {"model": preset | tables, "recompute": {"policy": "selective"}}
    known = set(known_keys())
    for more in ({"distil": {"teacher": "x"}}, {"lora": {"rank": 4}, "preference": {"loss": "dpo"}}):
        tree = from_tree(given | more).to_json()
        assert leaves(tree) <= known | ({"distil", "lora", "preference"} - more.keys())
    assert {key.split(".")[0] for key in known} == set(RunSpec.model_fields)


def test_defaults_shown_are_the_defaults_used() -> None:
    spec = RunSpec.model_validate({})
    for name, key in known_keys().items():
        part, _, field = name.partition(".")
        if key.default and "." not in field and hasattr(getattr(spec, part), field):
            used = getattr(getattr(spec, part), field)
            read = {"true": True, "false": False, "[]": (), "attention,matmul": ("attention", "matmul")}
            assert str(read.get(key.default, key.default)) == ("none" if used is None else str(used)), name


def test_unions_merge_their_branches() -> None:
    assert known_keys()["recompute.policy"].choices == ("none", "full", "selective")
    assert len(parts_of("recompute")) == 3
    assert optional_tables() == {
        "model.rope_scaling",
        "model.moe",
        "model.mla",
        "distil",
        "lora",
        "preference",
    }


def test_bounds_are_shown() -> None:
    assert known_keys()["train.beta1"].text == "number >= 0, < 1"
    assert known_keys()["layout.micro_batch"].text == "integer >= 1 | none"
    assert known_keys()["train.clip"].text == "number > 0 | none"


def test_schema_is_json_and_asks_for_nothing_that_a_preset_gives() -> None:
    found = json.loads(json.dumps(schema()))
    assert set(found["properties"]) == set(RunSpec.model_fields)
    assert all("required" not in part for part in found["$defs"].values())
    assert '"null"' not in json.dumps(found)
    clip = found["$defs"]["TrainSpec"]["properties"]["clip"]
    assert {"const": "none"} in clip["anyOf"]
