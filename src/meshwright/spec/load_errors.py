"""Sentences for what pydantic finds wrong in a run file: place, key, value and reason."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from pydantic import ValidationError

from meshwright.spec.errors import did_you_mean
from meshwright.spec.foreign_run_files import COUNTERPARTS
from meshwright.spec.records import show
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import known_keys

Where = Callable[[str], str]
"""Dotted key -> the flag or file that gave it, as messages name it."""
_RENAMED = {"train.flash_attention": "train.attention_backend"}
"""Key of an earlier version -> its name."""
_OF_PEFT = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
    "use_rslora": "rslora", "use_dora": "dora", "from": "weights", "adapter": "weights",
}  # fmt: skip
"""Keys of PEFT's LoraConfig, and words that people try -> keys of `[lora]`."""


def explain(error: ValidationError, where: Where) -> str:
    """Return one sentence for the first error of pydantic: place, key, value and reason."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    key, branch = _without_branch([str(part) for part in first["loc"]])
    place = where(key)
    known = known_keys()
    if kind == "extra_forbidden":
        if key in known:
            return f"{place}: is no key of '{branch}'; it goes with another choice"
        return f"{place}: unknown key{nearest(key, known)}"
    if kind == "missing":
        return f"{place}: is missing; give it, or a model.preset that has it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = f"{key}.{first['ctx']['discriminator'].strip(chr(39))}"
        if kind == "union_tag_not_found":
            return f"{place}: needs {key}, one of {', '.join(map(str, known[key].choices))}"
    if kind in ("union_tag_invalid", "literal_error"):
        value = first["ctx"].get("tag", value)
        tags = first["ctx"].get("expected_tags")
        expected = " or ".join(tags.rsplit(", ", 1)) if tags else first["ctx"]["expected"]
        hint = did_you_mean(str(value), map(str, known[key].choices))
        return f"{where(key)}: {show(value)} is not valid: it should be {expected}{hint}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{place}: is a table of keys, not {show(value)}"
    key, _, union = key.partition(".constrained-")
    if union:  # of an integer and a word
        choice = " or ".join(map(repr, known[key].choices))
        least = first["ctx"].get("ge", 0) if "ctx" in first else 0
        return f"{where(key)}: {show(value)} is not valid: it should be an integer >= {least}, or {choice}"
    message = first["msg"].replace("Input should", "it should").replace("tuple", "list")
    return f"{place}: {show(value)} is not valid: {message[0].lower()}{message[1:]}"


def _without_branch(location: list[str]) -> tuple[str, str]:
    """Return the dotted key of pydantic's location without the name of a union's branch, and that name."""
    names, branch = [name for name in location if not name.isdigit()], ""  # indices of a list are not keys
    for depth, table in ((1, "recompute"), (2, "model.rope_scaling")):
        if ".".join(names[:depth]) == table and len(names) > depth + 1:
            branch = names.pop(depth)
    return ".".join(names), branch


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown key: its last word in another table, or a close word in its own or any.

    Words of other programs come before those that are only spelt alike.
    """
    keys = list(known)
    if name in _RENAMED:
        return f"; it is '{_RENAMED[name]}' now"
    table, _, last = name.rpartition(".")
    if table == "lora" and last in _OF_PEFT:
        return f"; did you mean 'lora.{_OF_PEFT[last]}'?"
    if not table and (hint := did_you_mean(name, RunSpec.model_fields)):
        return hint
    if same := [key for key in keys if key.rpartition(".")[2] == last]:
        return did_you_mean(name, same) or f"; did you mean '{same[0]}'?"
    own = [key for key in keys if key.rpartition(".")[0] == table]
    if theirs := _of_other_programs(last, own):
        return f"; did you mean '{theirs}'?"
    for candidates in (own, keys):
        words = {key.rpartition(".")[2]: key for key in reversed(candidates)}
        if close := difflib.get_close_matches(last, words, n=1):
            return f"; did you mean '{words[close[0]]}'?"
    if own:
        return f"; the keys of [{table}] are {', '.join(key.rpartition('.')[2] for key in own)}"
    return f"; the tables are {', '.join(RunSpec.model_fields)}"


def _of_other_programs(word: str, own: Iterable[str]) -> str | None:
    """Return the key that says what a word does in other programs, first one of the table `own`."""
    found = [key for key, names in COUNTERPARTS.items() if any(word == n.rpartition(".")[2] for n in names)]
    return next((key for key in found if key in own), found[0] if found else None)
