"""Loading of a TOML file and dotted flags into a validated `RunSpec`, with one sentence per mistake."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from meshwright.spec.architecture import RANDOM
from meshwright.spec.base import FrozenModel
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import MAX_JSON, MAX_TOML, parse_json, parse_toml, read_text, user_path
from meshwright.spec.foreign_run_files import foreign_tree
from meshwright.spec.load_errors import Where, explain, nearest
from meshwright.spec.lora import LoraSpec
from meshwright.spec.lora_source import OF_A_RUN, adapter_fields, adapter_source
from meshwright.spec.model import ModelSpec
from meshwright.spec.model_names import preset_named
from meshwright.spec.pipeline_schedules import DEFAULT_SCHEDULE, WHOLE_SCHEDULE
from meshwright.spec.records import show
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import Key, known_keys, optional_tables
from meshwright.spec.train import LENGTHS
from meshwright.spec.weights import FIRST_STEP, run_of

Overrides = Sequence[tuple[str, str]]
"""Dotted flags in the order given: [("layout.dp", "2"), ...]."""
Model = TypeVar("Model", bound=FrozenModel)
_DEFAULTS = DEFAULT_SCHEDULE, WHOLE_SCHEDULE


def load(path: Path | None = None, overrides: Overrides = ()) -> RunSpec:
    """Return the spec of a run file (or none) and flags.

    A flag takes precedence over the file, and both over the fields of a preset. Raises `UserError`.
    """
    tree = read_tree(path) if path is not None else {}
    return from_tree(tree, overrides, source=str(path) if path else "")


def from_tree(
    tree: dict[str, Any], overrides: Overrides = (), source: str = "", ranks: int | None = None
) -> RunSpec:
    """Validate a nested dict, with dotted flags taking precedence; `source` names the file in messages.

    With `ranks`, the layout must be one of that many ranks. Raises `UserError`.
    """
    return _validated(RunSpec, tree, overrides, source, ranks)


def fixed_layout(overrides: Overrides) -> dict[str, Any]:
    """Return the keys of the layout that flags give, read as their types say, without the rules over several.

    Flags for other tables are ignored. Raises `UserError`.
    """
    layout = _alone("layout", {}, overrides)
    names = [key.split(".")[1] for key, _ in overrides if key.startswith("layout.")]
    return {name: getattr(layout, name) for name in names}


def given_keys(table: str, tree: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return the keys of a table that a file's tables or flags give, without the rules over several tables.

    Raises `UserError`.
    """
    found = _alone(table, tree.get(table, {}), overrides)
    return {} if found is None else found.model_dump(exclude_unset=True)


def _alone(table: str, tree: dict[str, Any], overrides: Overrides) -> FrozenModel | None:
    """Validate a table by itself; None for one that is taken back."""
    fields: dict[str, Any] = {table: (RunSpec.model_fields[table].annotation, ...)}
    alone = create_model("Alone", __base__=FrozenModel, **fields)
    given = [(key, text) for key, text in overrides if key.startswith(f"{table}.")]
    found: FrozenModel | None = getattr(_validated(alone, {table: tree}, given), table)
    return found


def _validated(
    kind: type[Model], tree: dict[str, Any], overrides: Overrides, source: str = "", ranks: int | None = None
) -> Model:
    where = partial(_where, {key for key, _ in overrides}, tree, source)
    try:
        merged = copy.deepcopy(tree)
        policy = dict(overrides).get("recompute.policy", "selective")
        if policy != "selective" and isinstance(merged.get("recompute"), dict):
            merged["recompute"].pop("save", None)  # a key of the file's policy, which the flag replaces
        _take_another_model(merged, dict(overrides))
        _take_another_length(merged, dict(overrides))
        _take_other_adapters(merged, dict(overrides))
        for key, text in overrides:
            _overlay(merged, key, text)
        _take_model_of_weights(merged)
        _take_keys_of_adapters(merged)
        _tidy(merged, "", where)
        return kind.model_validate(merged, context={"ranks": ranks})
    except ValidationError as error:
        raise UserError(one_line(explain(error, where))) from None
    except UserError as error:
        key, colon, rest = str(error).partition(": ")
        raise UserError(one_line(f"{where(key)}{colon}{rest}")) from None
    except RecursionError:
        raise UserError(f"{source or 'the run'}: its tables and lists are nested too deeply") from None


def _take_another_model(tree: dict[str, Any], flags: dict[str, str]) -> None:
    """Remove from a file or a run's record what a flag for a preset, HF folder or weights gives anew.

    A flag for a preset or an HF folder replaces the file's other one of the two. A record has every field of
    its model, which would win; and its tokenizer is not that of other weights.
    """
    model, data = tree.get("model"), tree.get("data")
    if not isinstance(model, dict):
        return
    given = {key for key in ("preset", "hf", "weights") if not _is_none(flags.get(f"model.{key}", "none"))}
    named = given & {"preset", "hf"}
    if not ModelSpec.model_fields.keys() <= model.keys():
        for one, other in (("preset", "hf"), ("hf", "preset")):
            if named == {one}:
                model.pop(other, None)
        return
    if named:
        tree["model"] = {}
    if given & {"hf", "weights"} and isinstance(data, dict):
        data.pop("tokenizer", None)


def _take_another_length(tree: dict[str, Any], flags: dict[str, str]) -> None:
    """Remove a file's or record's steps, tokens or epochs where a flag gives another one of them."""
    train = tree.get("train")
    for given, other in permutations(LENGTHS, 2):
        if isinstance(train, dict) and not _is_none(flags.get(f"train.{given}", "none")):
            train.pop(other, None)


def _take_other_adapters(tree: dict[str, Any], flags: dict[str, str]) -> None:
    """Remove from a run's record what the adapters set that a flag gives anew; a record has every key."""
    lora = tree.get("lora")
    if isinstance(lora, dict) and "lora.weights" in flags and LoraSpec.model_fields.keys() <= lora.keys():
        tree["lora"] = {key: value for key, value in lora.items() if key in OF_A_RUN}


def _take_keys_of_adapters(tree: dict[str, Any]) -> None:
    """Fill `[lora]` with the keys of the adapters that `lora.weights` names; keys that are given stay."""
    lora = tree.get("lora")
    if not isinstance(lora, dict) or LoraSpec.model_fields.keys() <= lora.keys():
        return
    weights = lora.get("weights")
    if isinstance(weights, str) and (source := adapter_source(weights)) is not None:
        tree["lora"] = {**adapter_fields(source), **lora}


def _take_model_of_weights(tree: dict[str, Any]) -> None:
    """Fill the model with that of the run whose weights `model.weights` names, where no other is named.

    Keys that are given stay.
    """
    model = tree.get("model")
    if not isinstance(model, dict) or ModelSpec.model_fields.keys() <= model.keys():
        return
    if any(model.get(key) is not None for key in ("preset", "hf")):
        return
    if (run := run_of(model.get("weights"))) is None:
        return
    theirs = read_tree(run).get("model", {})
    for table in ("moe", "mla"):  # keys of a table win one by one
        if isinstance(model.get(table), dict) and isinstance(theirs.get(table), dict):
            model[table] = {**theirs[table], **model[table]}
    tree["model"] = {**theirs, **model}


def _where(flags: set[str], tree: dict[str, Any], source: str, key: str) -> str:
    """Return `--key` for a key that a flag gives, `source: key` for one in the file, and else `key`."""
    if key in flags:
        return f"--{key}"
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, dict) or name not in node:
            return key
        node = node[name]
    return f"{source}: {key}" if source else key


def one_line(text: str) -> str:
    """Return `text` with the line ends and other control characters of keys and values escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def read_tree(path: Path) -> dict[str, Any]:
    """Read TOML, or the `run.json` of a run's folder, into a nested dict.

    From a folder, `train.stop_at` is omitted: it applied to one start of the run, which has ended. So is
    the default schedule of a run without a pipeline, since it depends on keys that flags may change. Raises
    `UserError`.
    """
    path = user_path(path, "the run file")
    if path.is_dir():
        tree = read_tree(path / "run.json")
        if isinstance(tree.get("train"), dict):
            tree["train"].pop("stop_at", None)
        layout = tree.get("layout")
        if isinstance(layout, dict) and layout.get("pp") == 1 and layout.get("schedule") in _DEFAULTS:
            del layout["schedule"]
        return tree
    if not path.is_file():
        if (path.parent / "config.json").is_file():
            raise UserError(
                f"{path.parent}: is an HF folder, not that of a run; make a run of it with meshwright import "
                f"{path.parent} --out FOLDER"
            )
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.toml")])
        remedy = near or "; give a TOML file, or the folder of a run, which has a run.json"
        if (preset := preset_named(str(path)) or preset_named(path.name)) is not None:
            remedy = f"; it is the name of a preset: give --model.preset {preset}"
        raise UserError(f"there is no run file, and no run's folder, {path}{remedy}")
    if (foreign := foreign_tree(path)) is not None:
        return foreign
    try:
        if path.suffix != ".json":
            return parse_toml(read_text(path, MAX_TOML))
        record = parse_json(read_text(path, MAX_JSON))
    except (OSError, ValueError) as error:
        other = "" if path.suffix in (".toml", ".json") else f"; a corpus is given as --data.corpus {path}"
        raise UserError(f"{path}: cannot be read ({error}){other}") from None
    if not isinstance(record, dict) or not isinstance(record.get("spec"), dict):
        raise UserError(f"{path}: is not a run record, as it has no table 'spec'; give the run.json of a run")
    tree = dict(record["spec"])
    _find_tokenizer(tree.get("data"), path.parent / "tokenizer.json")
    _find_first_weights(tree.get("model"), path.parent / FIRST_STEP, made="started" not in record)
    return tree


def _find_first_weights(model: Any, first: Path, made: bool) -> None:
    """Name the checkpoint of step 0 in a run's folder as the weights that the run starts from, if it does.

    It does where these were `made`, as `import` does, and not trained yet, and where the record says so.
    """
    if isinstance(model, dict) and first.is_dir():
        recorded = Path(str(model.get("weights", ""))).parts[-2:] == FIRST_STEP.parts
        model["weights"] = str(first) if made or recorded else model.get("weights", RANDOM)


def _find_tokenizer(data: Any, kept: Path) -> None:
    """Name the tokenizer in a run's folder if the recorded one is missing, as the folder was moved."""
    named = data.get("tokenizer") if isinstance(data, dict) else None
    if not isinstance(named, str) or not named.endswith(".json") or not kept.is_file():
        return
    if not user_path(named, "data.tokenizer").is_file():
        data["tokenizer"] = str(kept.resolve())


def _overlay(tree: dict[str, Any], name: str, text: str) -> None:
    key = _flag_key(name, text)
    *path, last = name.split(".")
    if key is None and (table := _table_of(name)):
        path, last = table.split("."), name.removeprefix(f"{table}.")  # the user's names may have dots
    node = tree
    for step in path:
        if not isinstance(node.get(step), dict):
            # A value of another type, such as "none", makes way for the table of the flag.
            node[step] = {}
        node = node[step]
    if key is None and name not in optional_tables() and _is_none(text):
        node.pop(last, None)
    elif key is None and _holds_texts(_table_of(name)):
        node[last] = text
    else:
        node[last] = None if name in optional_tables() else _value(key, text)


def _flag_key(name: str, text: str) -> Key | None:
    """Return the key of a dotted flag; None for an entry of a table with the user's keys, or 'none'."""
    known = known_keys()
    if name in known and ("object" not in known[name].types or _is_none(text)):
        return known[name]
    if _table_of(name) or (name in optional_tables() and _is_none(text)):
        return None
    if name in optional_tables():
        first = next(key for key in known if key.startswith(f"{name}."))
        raise UserError(
            f"--{name}: is a table of keys, not {text}; give its keys, such as --{first}, or none"
        )
    if name in known:
        entry = "NAME TEXT" if _holds_texts(name) else "NAME 0.5"
        raise UserError(f"--{name}: is a table; give its entries, such as --{name}.{entry}, or none")
    raise UserError(f"--{name}: unknown key{nearest(name, known)}")


def _table_of(name: str) -> str:
    """Return the table with the user's keys that has a dotted flag as an entry, or an empty string."""
    return next(
        (t for t, key in known_keys().items() if "object" in key.types and name.startswith(f"{t}.")), ""
    )


def _holds_texts(table: str) -> bool:
    """Return True for a table with the user's keys whose values are texts, not numbers."""
    return table in known_keys() and known_keys()[table].text == "table of texts"


def _value(key: Key | None, text: str) -> Any:
    """Return a flag's value as its key takes it: text as given, a list split at commas, the rest as TOML.

    'none' empties a list, and a table with the user's keys.
    """
    if key is not None and key.optional and _is_none(text):
        return None
    if key is not None and key.types in (("array",), ("object",)) and _is_none(text):
        return [] if key.types == ("array",) else {}
    if key is not None and (key.is_text or text in key.choices):
        return text
    if key is not None and "array" in key.types and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _tidy(node: dict[str, Any], prefix: str, where: Where) -> None:
    """Replace 'none' by None, and refuse booleans and texts that pydantic would convert to another type.

    A whole number may be written with a fraction of 0, since TOML reads 1e9 so.
    """
    for name, value in node.items():
        key = known_keys().get(prefix + name)
        may_be_none = key.optional if key else prefix + name in optional_tables()
        if isinstance(value, dict) and _table_of(prefix + name):
            entry, kind = name, "text" if _holds_texts(_table_of(prefix + name)) else "number"
            while isinstance(value, dict) and value:
                inner, value = next(iter(value.items()))
                entry += f".{inner}"
            raise UserError(
                f"{where(prefix + name)}: is a table, where a {kind} should be; a name with dots needs "
                f'quotes, as in "{entry}" = {show(value)}'
            )
        if isinstance(value, dict) and not (key and key.is_text):
            _tidy(value, f"{prefix}{name}.", where)
        elif _is_none(value) and may_be_none:
            node[name] = None
        elif isinstance(value, int) and not -(2**63) < value < 2**63 and not (key and "<=" in key.text):
            raise UserError(
                f"{where(prefix + name)}: {show(value)} is not valid: it should be at most 2^63 - 1"
            )
        elif key is not None and not _fits(key, value):
            wanted = " or ".join(part.strip() for part in key.text.split("|"))
            wanted = re.sub(r"^(?=integer)", "an ", re.sub(r"^(?=number|list|table)", "a ", wanted))
            raise UserError(f"{where(key.name)}: {show(value)} is not valid: it should be {wanted}")


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "none"


def _fits(key: Key, value: Any) -> bool:
    if isinstance(value, bool):
        return key.is_switch
    if key.is_text:
        return isinstance(value, str) or (value is None and key.optional)
    if key.choices or {"array", "object"} & {*key.types}:
        return True
    return not isinstance(value, str) and not (key.is_switch and isinstance(value, (int, float)))
