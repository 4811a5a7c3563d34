"""Arguments that name a run, and verbs on its corpus: tokenize, data show, data verify."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.options import folder_name, whole
from meshwright.api.source import keys_of_adapters, keys_of_source
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.hardware.cluster import DeviceKind
from meshwright.rank.device_defaults import with_device_defaults
from meshwright.rank.env import resolve, sets_layout
from meshwright.rank.launchers import ranks_flag
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import Overrides, from_tree, read_tree
from meshwright.spec.model_argument import model_tables
from meshwright.spec.rules import ranks_match
from meshwright.units import counted

RUN = Argument("RUN", "a run file (TOML), or the folder of an earlier run", required=False, keys=True)
MODEL = Argument(
    "MODEL",
    "a preset, a model's name (openai/gpt-oss-20b), an HF folder or config.json, a run file (TOML), or the "
    "folder of a run",
    required=False,
    keys=True,
)
"""The word of verbs that ask about a run, which need not be ready to train."""
NPROC = Flag(
    "nproc",
    "processes on this machine: a number, or 'auto' for its GPUs or cores; default the layout's world "
    "size; if no axis is set, `train` plans a layout of so many, and other verbs set layout.dp",
    "N|auto",
    str,
)


def _keys_from(source: str, call: Call) -> Overrides:
    """Return the keys that `--from` stands for beside those of the flags and of the run file."""
    path = call.path()
    tree = read_tree(path) if path is not None and not path.is_dir() else {}
    return keys_of_source(source, {**_dotted(tree), **dict(call.overrides)})


def _dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file's tables by their dotted names."""
    tables = {name: table for name, table in tree.items() if isinstance(table, dict)}
    return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}


FROM = Flag(
    "from",
    "start from a trained model: its weights, architecture and tokenizer; an HF folder, a run or one of its "
    "checkpoints, a checkpoint of another program, or a model of the hub as org/name",
    "SOURCE",
    str,
    fills=_keys_from,
    instead_of=("model.hf", "model.weights", "model.preset"),
)


def _keys_of_adapters(folder: str, call: Call) -> Overrides:
    """Return the keys that `--adapter` stands for: the adapters' place, and their base if none is named."""
    path = call.path()
    tree = _dotted(read_tree(path)) if path is not None else {}
    named = any(key.startswith("model.") for key in (*dict(call.overrides), *tree))
    if named or call.flags.get("from") is not None:
        return [("lora.weights", folder)]
    return keys_of_adapters(folder, {**tree, **dict(call.overrides)})


ADAPTER = Flag(
    "adapter",
    "adapters to go on from: of PEFT, a run, a checkpoint; alone on their base",
    "FOLDER",
    str,
    fills=_keys_of_adapters,
    instead_of=("lora.weights",),
)


def spec_of(
    call: Call,
    ranks: int | None = None,
    kind: DeviceKind | None = None,
    ours: bool = True,
    models: bool = False,
) -> RunSpec:
    """Return the spec of a command line, with its layout fitted to the number of processes.

    With `models`, its first word may be any that `model_tables` takes. `ranks`, the number that a launcher
    has started, takes the place of --nproc; `kind` is that of the devices that the run is asked about, by
    default this machine's, and `ours` is false where it is asked about as another program's.
    """
    tree, overrides, nproc, source = asked(call, ranks, kind, ours, models)
    if ranks is None or not sets_layout(tree, overrides):
        return resolve(tree, overrides, nproc, source)
    spec = from_tree(tree, overrides, source)
    ranks_match(spec, ranks, ranks_flag())
    return spec


def asked(
    call: Call,
    ranks: int | None = None,
    kind: DeviceKind | None = None,
    ours: bool = True,
    models: bool = False,
) -> tuple[dict[str, Any], Overrides, int | str | None, str]:
    """Return the run file's content, the dotted flags, the number of processes, and the file's name.

    The flags have what this machine's devices decide of keys that are left open.
    """
    tree: dict[str, Any] = {}
    source = call.words[0] if call.words else ""
    if source:
        tree, source = model_tables(source) if models else (read_tree(Path(source)), source)
    overrides = with_device_defaults(tree, call.overrides, kind, ours)
    return tree, overrides, ranks or call.flags.get("nproc"), source


@verb(
    "tokenize",
    RUN,
    FROM,
    Flag("out", "folder to write", "DIR", folder_name, required=True),
    JSON,
)
def tokenize(call: Call) -> None:
    """Turn a corpus into a folder of token shards."""
    spec = spec_of(call)
    if spec.data.mixture:
        raise UserError("data.mixture: only one corpus can be tokenized at a time; give it as --data.corpus")
    counts = api.tokenize(
        spec.data.corpus,
        spec.data.tokenizer,
        call.flags["out"],
        vocab_size=spec.model.vocab_size,
        text_key=spec.data.text_key,
        val_fraction=spec.data.val_fraction,
        special_tokens=spec.data.special_tokens,
        format=spec.data.format,
        chat_template=spec.data.chat_template,
        columns=spec.data.columns,
    )
    show.result(call, counts.to_json(), _show_counts)


def _show_counts(result: Mapping[str, Any]) -> None:
    left_out = ", ".join(counted(count, reason) for reason, count in sorted(result["skipped"].items()))
    show.pairs({**result, **({"left_out": left_out} if left_out else {})})


@verb(
    "data show",
    RUN,
    FROM,
    Flag("n", "samples to print", "N", whole(1), default=3),
    JSON,
)
def data_show(call: Call) -> None:
    """Print the first samples that a run trains on; what is trained on is green, or in ⟦brackets⟧."""
    show.result(call, api.data_show(spec_of(call), call.flags["n"]), _show_samples)


def _show_samples(result: Mapping[str, Any]) -> None:
    for sample in result["samples"]:
        found, padding = sample["documents"], sample["padding"]
        padded = f", {padding:,} of padding" if padding else ""
        trained = show.count(sum(each["trained"] for each in found), "token")
        documents = show.count(len(found), "document")
        show.line(
            f"sample {sample['sample']} of {sample['corpus']}: {documents}, {trained} trained on{padded}"
        )
        for each in found:
            show.marked((part["text"], part["trained"]) for part in each["parts"])
            cut = f"; cut here, {show.count(each['lost'], 'token')} lost" if each["lost"] else ""
            role = f"{each['role']}: " if each["role"] else ""
            print(f"({role}{each['trained']:,} of {each['tokens']:,} tokens are trained on{cut})\n")
    samples = show.count(result["of_samples"], "sample")
    documents = show.count(result["of_documents"], "document")
    show.line(f"in all {samples} of {result['seq_len']:,} tokens, with {documents}")


@verb(
    "data verify",
    Argument("FOLDER", "a folder made by `meshwright tokenize`"),
    JSON,
)
def data_verify(call: Call) -> int:
    """Hash every file of a folder of tokens; the exit code is 1, with a line on stderr, if one is damaged."""
    result = api.data_verify(Path(call.words[0]))
    show.result(call, result)
    return show.problems(result["problems"])
