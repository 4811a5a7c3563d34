"""Rotary positions of HF `config.json` files of transformers v4 and v5."""

from __future__ import annotations

from typing import Any

from meshwright.spec.hf.config_keys import ROPE_KEYS
from meshwright.spec.hf.family import Family
from meshwright.spec.hf.json_object import NUMBER, SIZE, Config


def read_rope(config: Config, family: Family, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` about rotary positions; `fields` are those read so far."""
    rope = _rope(config, family)
    if family.rope_by_type:  # an object for each type of layers, or keys of the config
        return _by_type(config, family, rope, fields)
    theta = (rope if "rope_theta" in rope.values else config).read("rope_theta", NUMBER, family.rope_theta)
    found = {"rope_theta": theta, "rope_scaling": _scaling(rope, config, family, fields["max_seq_len"])}
    key = "partial_rotary_factor"
    if family.rope_share is None:
        for place in (rope, config):
            place.check(key, 1.0)
    elif (share := (rope if key in rope.values else config).read(key, NUMBER, family.rope_share)) != 1.0:
        found["rope_dim"] = int(fields["head_dim"] * share)
    return found | _skipped(config, family, fields)


def _rope(config: Config, family: Family) -> Config:
    """Return the object of rotary keys that transformers 5 takes, `rope_scaling` before `rope_parameters`.

    It takes one of them whole: keys that only the other has are not read.
    """
    older, newer = config.section("rope_scaling"), config.section("rope_parameters")
    found = older if older.values else newer
    return found if found.values else Config(config.source, {**family.rope_scaling}, config.key, found.inside)


def _by_type(config: Config, family: Family, rope: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the base of full layers with its scaling, and that of layers with a window, which has none."""
    newer = config.section("rope_parameters")
    full, local = newer.section("full_attention"), newer.section("sliding_attention")
    older = config.section("rope_scaling")
    scaling = Config(config.source, {**full.values, **older.values}, config.key, "rope_scaling")
    theta = (full if "rope_theta" in full.values else config).read("rope_theta", NUMBER, family.rope_theta)
    if "rope_theta" in local.values:
        base = local.read("rope_theta", NUMBER)
    else:
        base = config.read("rope_local_base_freq", NUMBER, family.rope_local or theta)
    local.check("rope_type", "default")
    slides = fields.get("layer_types") is not None or fields.get("sliding_window") is not None
    return {
        "rope_theta": theta,
        "rope_scaling": _scaling(scaling, config, family, fields["max_seq_len"]),
        "rope_local_base_freq": base if slides else None,
    }


def _skipped(config: Config, family: Family, fields: dict[str, Any]) -> dict[str, Any]:
    """Return which layers have rotary positions, where some have none."""
    layers = fields["layers"]
    if family.skips_rope is None:
        return {}
    if family.skips_rope == "full_attention":
        types = fields.get("layer_types")
        if types is None:
            turns = [fields["sliding_window"] is not None]
        else:
            turns = [each == "sliding_attention" for each in types]
    else:
        turns = _listed(config, layers)
    repeated = next(
        n for n in range(1, layers + 1) if all(turns[i % len(turns)] == turns[i % n] for i in range(layers))
    )
    turns = turns[:repeated]
    return {"rope_layers": None if all(turns) else turns}


def _listed(config: Config, layers: int) -> list[bool]:
    """Return the layers with rotary positions, by SmolLM3's keys; a 1 in `no_rope_layers` stands for them."""
    listed = config.values.get("no_rope_layers")
    if listed is None:
        every = config.read("no_rope_layer_interval", SIZE, 4)
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not {*listed} <= {0, 1}:
        raise config.wrong("no_rope_layers", f"it must be a list of 0 and 1 for each of the {layers} layers")
    return [bool(each) for each in listed]


def _scaling(scaling: Config, config: Config, family: Family, max_seq_len: int) -> dict[str, Any] | None:
    name = "type" if "type" in scaling.values and "rope_type" not in scaling.values else "rope_type"
    kind = scaling.values.get(name, "default")
    if kind == "default":
        return None
    if family.original_max_seq_len is not None and kind in ("su", "yarn"):  # earlier names
        kind = "longrope"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise scaling.wrong(name, "computed are default, linear, llama3, yarn and longrope")
    original = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope"):
        place = config if original in config.values or family.original_max_seq_len else scaling
        length = place.read(original, SIZE, family.original_max_seq_len or max_seq_len)
        values = {**scaling.values, original: length}
        if kind == "longrope" and values.get("factor") is None:
            values["factor"] = max_seq_len / length
        scaling = Config(scaling.source, values, scaling.key, scaling.inside)
    return {"kind": kind, **scaling.fields(ROPE_KEYS[kind])}
