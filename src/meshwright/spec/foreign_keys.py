"""Keys of another trainer's file as keys of a run file: what each table of `axolotl_keys` and
`llama_factory_keys` is made of.

A key is taken over, left out because it changes no result, or refused because it would change it and has no
counterpart. What is left out or read otherwise is told in one sentence, and so is all that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text

Keys = Mapping[str, Callable[["KeysRead", str], None]]
"""Functions that take keys over, by the keys' names."""
ADAMW = (
    "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw", "paged_adamw",
    "paged_adamw_32bit",
)  # fmt: skip
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip


class KeysRead:
    """A file of another trainer while it is read: its keys, and the run that they make."""

    def __init__(self, file: Mapping[str, Any]) -> None:
        self.file = file
        self.tree: dict[str, dict[str, Any]] = {}
        self.left_out: list[str] = []
        self.told: list[str] = []
        self.unknown: list[str] = []
        self.refused: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` where it is null or not there."""
        value = self.file.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """The number of a key, also of a text such as 2e-5, which YAML 1.1 does not read as one."""
        value = self.get(key, default)
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            raise UserError(f"{key}: {value!r} is not a number; give one") from None

    def set(self, key: str, value: Any) -> None:
        """Set a dotted key of the run."""
        table, _, name = key.rpartition(".")
        self.tree.setdefault(table, {})[name] = value

    def refuse(self, key: str, why: str) -> None:
        """Note a key that cannot be taken over, and what would work."""
        self.refused.append(f"{key}: {why}")

    def require(self, *keys: str) -> None:
        """Note keys that a file has to have and has not."""
        for key in keys:
            if not self.get(key):
                self.refuse(key, "is missing; give it")

    def read(self, keys: Keys) -> None:
        """Take each key of the file that is not null over, by its entry in `keys`."""
        for key, value in self.file.items():
            if value is None:
                continue
            if key in keys:
                keys[key](self, key)
            elif value in (False, "", [], {}):
                self.unknown.append(key)
            else:
                self.refuse(key, "has no counterpart; remove it to train without it")

    def sentences(self, program: str) -> str:
        """A sentence of what is not as it was in the file; empty where all is."""
        parts = list(self.told)
        if self.left_out:
            parts.append(f"left out, as they change no result: {', '.join(self.left_out)}")
        if self.unknown:
            parts.append(f"left out, as they are off, but not known: {', '.join(self.unknown)}")
        return f"read as a file of {program}; {'; '.join(parts)}" if parts else ""

    def check(self, program: str) -> None:
        """Raise `UserError` if any key was refused."""
        if self.refused:
            raise UserError(
                f"looks like a file of {program}, of which these keys cannot be taken over: "
                f"{'; '.join(self.refused)}"
            )


def to(ours: str) -> Callable[[KeysRead, str], None]:
    """Take a value over as it is."""
    return lambda reading, key: reading.set(ours, reading.get(key))


def number_to(ours: str) -> Callable[[KeysRead, str], None]:
    """Take a number over."""
    return lambda reading, key: reading.set(ours, reading.number(key))


def whole_to(ours: str, otherwise: str) -> Callable[[KeysRead, str], None]:
    """Take whole steps over; a share of the steps, which some keys take, is told and left out."""

    def take(reading: KeysRead, key: str) -> None:
        value = reading.number(key)
        if value >= 1:
            reading.set(ours, int(value))
        elif value > 0:
            reading.told.append(
                f"{key}: {value:g} is a share of the steps, which {ours} does not take ({otherwise})"
            )

    return take


def leave_out(reading: KeysRead, key: str) -> None:
    """Leave a key out that changes no result."""
    reading.left_out.append(key)


def handled(reading: KeysRead, key: str) -> None:
    """Do nothing, since another key reads this one."""


def only(*fine: Any, instead: str) -> Callable[[KeysRead, str], None]:
    """Accept the values that are what is done here anyway, and refuse others with what to do `instead`."""

    def take(reading: KeysRead, key: str) -> None:
        value = reading.get(key)
        if value not in (*fine, False, "", [], {}):
            reading.refuse(f"{key} = {shown(value)}", instead)

    return take


def shown(value: Any) -> str:
    """A value in a sentence, cut if it is long."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def schedule(reading: KeysRead, key: str) -> None:
    """Take a schedule of transformers over, which falls to 0."""
    name = str(reading.get(key))
    if name not in SCHEDULES:
        reading.refuse(f"{key} = {name}", f"give one of {', '.join(SCHEDULES)}")
        return
    reading.set("train.schedule", SCHEDULES[name])
    if name.startswith("constant"):
        reading.tree["train"].pop("min_lr_ratio", None)
    else:
        reading.tree["train"].setdefault("min_lr_ratio", 0.0)


def optimiser(reading: KeysRead, key: str) -> None:
    """Take an optimiser of transformers over."""
    name = str(reading.get(key))
    found = {**dict.fromkeys(ADAMW, "adamw"), **dict.fromkeys(ADAMW_8BIT, "adamw8bit"), "muon": "muon"}
    if name not in found:
        reading.refuse(f"{key} = {name}", f"give one of {', '.join(found)}")
    else:
        reading.set("train.optimiser", found[name])


def precision(reading: KeysRead, key: str) -> None:
    """Take bf16 or fp16 over; 'auto' is what the device has."""
    if reading.get(key) is True:
        reading.set("precision.compute", key)


def adapters(reading: KeysRead, keys: Mapping[str, str], defaults: Mapping[str, float], targets: Any) -> None:
    """Set `[lora]`, given the program's keys by ours, the defaults of numbers, and the layers with adapters,
    by their names in transformers.

    Where a run goes on from adapters, their config has what the file does not say.
    """
    goes_on = reading.get(keys["weights"])
    if goes_on:
        reading.set("lora.weights", str(goes_on))
    for ours, default in ({} if goes_on else {**defaults, "dropout": 0}).items():
        reading.set(f"lora.{ours}", default)
    for ours in ("rank", "alpha", "dropout"):
        if reading.get(keys[ours]) is not None:
            reading.set(f"lora.{ours}", reading.number(keys[ours]))
    if not goes_on or reading.get(keys["rslora"]) is not None:
        reading.set("lora.rslora", bool(reading.get(keys["rslora"])))
    if reading.get(keys["dora"]):
        reading.set("lora.dora", True)
    names = [targets] if isinstance(targets, str) else [str(name) for name in targets or ()]
    if names:
        reading.set("lora.targets", names)
    elif not goes_on:
        reading.refuse(
            f"{keys['targets']} = none", "give all linear layers, or modules such as q_proj and v_proj"
        )


def quantised_base(reading: KeysRead, key: str, bits: int) -> None:
    """Keep the frozen weights beside adapters in NF4 or int8; the values are not those of bitsandbytes."""
    name = {4: "nf4", 8: "int8"}[bits]
    reading.set("lora.quantise", name)
    scales = (
        "their scales are not quantised again" if bits == 4 else "each 64 inputs have a scale of their own"
    )
    reading.told.append(f"{key}: frozen weights are kept in {name}, and {scales}")


def columns(reading: KeysRead, named: Mapping[str, str]) -> None:
    """Set what the rows call the keys of their format, where they call them otherwise."""
    if others := {key: name for key, name in named.items() if name and name != key}:
        reading.set("data.columns", others)


def length(reading: KeysRead, epochs_key: str, epochs: float) -> None:
    """Set the length of the run: max_steps, or else epochs, by default those of the program."""
    steps = reading.number("max_steps")
    if steps is not None and steps > 0:
        reading.set("train.steps", int(steps))
    else:
        reading.set("train.epochs", float(reading.number(epochs_key, epochs)))


def batch(reading: KeysRead, micro_key: str, default: int) -> None:
    """Set the microbatch, and the batch of all data ranks that the file names, by default one."""
    micro, accumulated = (
        int(reading.number(micro_key, default)),
        int(reading.number("gradient_accumulation_steps", 1)),
    )
    layout = reading.tree.get("layout", {})
    ranks = layout.get("dp", 1) * layout.get("replicate", 1)
    sequences = micro * accumulated * ranks
    reading.set("layout.micro_batch", micro)
    reading.set("train.batch_tokens", sequences * reading.tree["data"]["seq_len"])
    if "dp" not in layout:
        reading.told.append(
            f"a batch is {micro} x {accumulated} sequences, as on one device; for the batch of more give "
            f"--train.batch_tokens, which is {sequences * reading.tree['data']['seq_len']:,} now"
        )


def held_out(reading: KeysRead, key: str) -> None:
    """Take a share of held-out rows over; a number of rows has no counterpart."""
    value = reading.number(key)
    if value < 1:
        reading.set("data.val_fraction", value)
    else:
        reading.refuse(f"{key} = {value}", "give a share of the rows, such as 0.02")


def zero_stage(reading: KeysRead, key: str) -> None:
    """Take the ZeRO stage of a file of DeepSpeed over, where the file names data ranks; else it is told."""
    if reading.get(key) is None:
        return
    stage = _stage(reading.get(key))
    if stage is None:
        reading.left_out.append(key)
    elif reading.tree.get("layout", {}).get("dp", 1) > 1:
        reading.set("layout.zero", stage)
    else:
        reading.told.append(
            f"{key}: a start plans the layout; ZeRO {stage} is --layout.dp and --layout.zero {stage}"
        )


def _stage(value: Any) -> int | None:
    """The stage in the JSON of DeepSpeed, in the file that a path names, or by that file's name."""
    if isinstance(value, str):
        path = Path(value)
        if path.is_file():
            try:
                value = parse_json(read_text(path, MAX_JSON))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"deepspeed: {path} cannot be read ({error}); give DeepSpeed's JSON"
                ) from None
        elif match := re.search(r"z(?:ero)?[-_]?([0-3])", path.stem):
            return int(match[1])
    if isinstance(value, Mapping) and isinstance(value.get("zero_optimization"), Mapping):
        stage = value["zero_optimization"].get("stage")
        return stage if stage in (0, 1, 2, 3) else None
    return None


def hub_or_path(name: str, config: Any = None) -> str:
    """A data set as `data.corpus` names it: a path that is there, or one of the hub."""
    if Path(name).expanduser().exists() or "://" in name:
        return name
    return f"hf:{name}" + (f":{config}" if config else "")


def common_defaults(reading: KeysRead, seed: int) -> None:
    """Set what transformers' Trainer has by default and a run file has not."""
    defaults: Sequence[tuple[str, Any]] = (
        ("train.weight_decay", 0.0), ("train.beta2", 0.999), ("train.seed", seed), ("data.pack", False),
        ("data.val_fraction", 0.0),
    )  # fmt: skip
    for key, value in defaults:
        reading.set(key, value)
