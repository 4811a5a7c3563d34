"""Files of other trainers given as a run file: whose they are, and what their keys are here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.spec.axolotl_keys import read_axolotl
from meshwright.spec.errors import UserError
from meshwright.spec.files import MAX_TOML, parse_json, parse_toml, read_text
from meshwright.spec.foreign_keys import KeysRead
from meshwright.spec.llama_factory_keys import read_llama_factory


class Program(NamedTuple):
    """Another trainer: it is recognised by `marks` among the keys of a file, the more the likelier."""

    name: str
    marks: frozenset[str]


def _program(name: str, *marks: str) -> Program:
    return Program(name, frozenset(marks))


PROGRAMS = (
    _program(
        "axolotl", "base_model", "sequence_len", "micro_batch_size", "datasets", "sample_packing",
        "num_epochs", "dataset_prepared_path", "val_set_size", "adapter", "chat_template",
        "special_tokens", "load_in_4bit",
    ),
    _program(
        "LLaMA-Factory", "stage", "do_train", "finetuning_type", "dataset", "template", "cutoff_len",
        "model_name_or_path", "preprocessing_num_workers", "overwrite_cache", "dataset_dir", "lora_target",
    ),
    _program(
        "transformers' TrainingArguments", "per_device_train_batch_size", "gradient_accumulation_steps",
        "num_train_epochs", "lr_scheduler_type", "save_strategy", "logging_steps", "save_steps", "max_steps",
        "per_device_eval_batch_size", "report_to", "adam_beta1", "max_grad_norm",
    ),
    _program(
        "DeepSpeed", "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
        "gradient_clipping", "fp16.enabled", "bf16.enabled", "optimizer.params", "steps_per_print",
        "wall_clock_breakdown", "zero_optimization.stage", "activation_checkpointing",
    ),
    _program(
        "Megatron-LM", "num_layers", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "train_iters", "global_batch_size", "seq_length", "max_position_embeddings", "num_attention_heads",
        "ffn_hidden_size", "micro_batch_size", "lr_decay_style", "context_parallel_size",
    ),
    _program(
        "torchtitan", "job", "training.local_batch_size", "training.global_batch_size", "training.dataset",
        "training.seq_len", "parallelism", "parallelism.data_parallel_shard_degree", "lr_scheduler",
        "parallelism.tensor_parallel_degree", "activation_checkpoint", "model.flavor", "metrics", "profiling",
    ),
    _program(
        "nanotron", "parallelism.dp", "parallelism.tp", "parallelism.pp", "tokens.sequence_length",
        "tokens.micro_batch_size", "data_stages", "general", "model.model_config", "tokens.train_steps",
        "optimizer.zero_stage", "checkpoints",
    ),
    _program(
        "litgpt", "train.global_batch_size", "train.micro_batch_size", "train.max_seq_length",
        "checkpoint_dir", "out_dir", "train.lr_warmup_steps", "train.save_interval", "model_name",
    ),
    _program(
        "accelerate", "compute_environment", "distributed_type", "num_processes", "mixed_precision",
        "fsdp_config", "deepspeed_config", "machine_rank", "num_machines", "main_training_function",
    ),
)  # fmt: skip
READ: Mapping[str, Callable[[Mapping[str, Any]], KeysRead]] = MappingProxyType(
    {"axolotl": read_axolotl, "LLaMA-Factory": read_llama_factory}
)
"""Programs whose files are read as run files, by name."""
_FEWEST = 2
"""Keys by which a program is recognised: one alone may be anybody's."""

COUNTERPARTS = {
    "train.lr": ("learning_rate", "lr", "optimizer.lr", "optimizer.params.lr",
                 "optimizer.learning_rate_scheduler.learning_rate"),
    "data.seq_len": ("sequence_len", "cutoff_len", "seq_length", "max_seq_length", "training.seq_len",
                     "tokens.sequence_length", "train.max_seq_length"),
    "layout.micro_batch": ("micro_batch_size", "per_device_train_batch_size",
                           "train_micro_batch_size_per_gpu", "training.local_batch_size",
                           "tokens.micro_batch_size", "train.micro_batch_size"),
    "train.batch_tokens": ("global_batch_size", "train_batch_size", "training.global_batch_size",
                           "train.global_batch_size"),
    "train.steps": ("max_steps", "train_iters", "training.steps", "tokens.train_steps", "train.max_steps"),
    "train.warmup_steps": ("warmup_steps", "lr_warmup_iters", "lr_scheduler.warmup_steps",
                           "optimizer.learning_rate_scheduler.lr_warmup_steps", "train.lr_warmup_steps"),
    "train.schedule": ("lr_scheduler_type", "lr_decay_style"),
    "train.optimiser": ("optim",),
    "train.weight_decay": ("weight_decay", "optimizer.weight_decay", "optimizer.params.weight_decay"),
    "train.clip": ("max_grad_norm", "gradient_clipping", "clip_grad", "training.max_norm", "train.max_norm",
                   "optimizer.clip_grad"),
    "train.seed": ("seed", "general.seed", "training.seed", "debug.seed"),
    "data.corpus": ("datasets", "dataset", "data_path", "training.dataset", "training.dataset_path"),
    "data.val_fraction": ("val_set_size", "val_size"),
    "data.pack": ("sample_packing", "packing"),
    "model.hf": ("base_model", "model_name_or_path", "model.hf_assets_path", "checkpoint_dir"),
    "model.layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "model.hidden": ("hidden_size", "n_embd", "d_model"),
    "model.heads": ("num_attention_heads", "n_head"),
    "model.kv_heads": ("num_key_value_heads", "num_query_groups"),
    "model.ffn": ("intermediate_size", "ffn_hidden_size"),
    "model.norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    "model.tied": ("tie_word_embeddings",),
    "precision.compute": ("bf16", "bf16.enabled", "fp16.enabled", "training.mixed_precision_param",
                          "mixed_precision", "precision", "model.dtype"),
    "recompute.policy": ("gradient_checkpointing", "activation_checkpoint.mode", "recompute_granularity"),
    "layout.zero": ("zero_optimization.stage", "optimizer.zero_stage"),
    "layout.dp": ("dp_shard_size", "parallelism.data_parallel_shard_degree", "parallelism.dp"),
    "layout.replicate": ("dp_replicate_size", "parallelism.data_parallel_replicate_degree"),
    "layout.tp": ("tensor_parallel_size", "tensor_model_parallel_size", "parallelism.tensor_parallel_degree",
                  "parallelism.tp"),
    "layout.cp": ("context_parallel_size", "parallelism.context_parallel_degree"),
    "layout.pp": ("pipeline_model_parallel_size", "parallelism.pipeline_parallel_degree", "parallelism.pp"),
    "layout.ep": ("expert_model_parallel_size", "parallelism.expert_parallel_degree",
                  "parallelism.expert_parallel_size"),
    "checkpoint.every": ("save_steps", "save_interval", "checkpoint.interval", "train.save_interval",
                         "checkpoints.checkpoint_interval"),
}  # fmt: skip
"""Keys of a run file, with those of other programs that say the same, though perhaps in another unit."""

_ALL_KEYS = "all keys: meshwright train --help all"
MOST_NAMED = 6
"""Keys whose counterparts one sentence names."""


def foreign_tree(path: Path) -> dict[str, Any] | None:
    """Return the tables of the run that a file of axolotl or LLaMA-Factory is; None for a run file.

    A warning tells of keys that are left out or read in another way. Raises `UserError` as `check_run_file`,
    and for keys that change what a run learns and have no counterpart.
    """
    program, tree = _program_of(path)
    return None if program is None else _converted(path, program, tree)


def check_run_file(path: Path) -> None:
    """Raise `UserError` for a file that is YAML, or another trainer's TOML or JSON, and cannot be read.

    The sentence names the program and what some of its keys are in a run file.
    """
    _program_of(path)


def _program_of(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return which program of `READ` a file is of, and its content; None for any file that is not foreign."""
    try:
        text = read_text(path, MAX_TOML)
    except (OSError, ValueError):
        return None, {}  # whoever reads it says why not
    kind, tree = _parsed(text, path.suffix.lower())
    if kind == "JSON" and {"spec", "architectures", "model_type", "num_hidden_layers"} & tree.keys():
        return None, {}  # the record of a run, or the architecture of a model
    keys = set(_dotted(tree))
    program = max(PROGRAMS, key=lambda each: len(each.marks & keys))
    found = program.marks & keys
    if len(found) < _FEWEST:
        if kind == "YAML":
            raise UserError(f"{path}: is YAML; a run file is TOML; {_ALL_KEYS}")
        return None, {}
    if program.name in READ:
        return program.name, tree
    raise UserError(f"{path}: {_looks(kind, program, found)}; a run file is TOML{_named(keys)}")


def _converted(path: Path, program: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    try:
        reading = READ[program](tree)
        reading.check(program)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if told := reading.sentences(program):
        warnings.warn(f"{path}: {told}", stacklevel=1)
    return reading.tree


def _parsed(text: str, suffix: str) -> tuple[str, dict[str, Any]]:
    """Return the format of a text and its mapping, empty if it has another value or none can be read."""
    if suffix == ".json" or text.lstrip().startswith("{"):
        return "JSON", _mapping(parse_json, text)
    if suffix not in (".yaml", ".yml"):
        if tree := _mapping(parse_toml, text):
            return "TOML", tree
        if suffix == ".toml" and "=" in text:
            return "TOML", {}
    import yaml

    tree = _mapping(yaml.safe_load, text, yaml.YAMLError)
    return ("YAML" if tree or suffix in (".yaml", ".yml") else ""), tree


def _mapping(parse: Callable[[str], Any], text: str, error: type[Exception] = ValueError) -> dict[str, Any]:
    try:
        tree = parse(text)
    except (error, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _dotted(tree: Mapping[Any, Any], prefix: str = "", depth: int = 3) -> Iterator[str]:
    """Yield the names of keys and tables, with underscores for the dashes of command-line flags."""
    for name, value in tree.items():
        key = f"{prefix}{name}".replace("-", "_")
        yield key
        if isinstance(value, dict) and depth:
            yield from _dotted(value, f"{key}.", depth - 1)


def _looks(kind: str, program: Program, found: frozenset[str]) -> str:
    shown = sorted(found, key=lambda key: (key.count("."), key))[:3]
    return f"is {kind}, and looks like a file of {program.name} (it has {', '.join(shown)})"


def _named(keys: set[str]) -> str:
    """Return what some of the keys are in a run file."""
    pairs = [(theirs, ours) for ours, names in COUNTERPARTS.items() for theirs in names if theirs in keys]
    tokens = {"train.batch_tokens": " (in tokens)"}
    shown = [f"{theirs} is {ours}{tokens.get(ours, '')}" for theirs, ours in pairs[:MOST_NAMED]]
    return f", in which {', '.join(shown)}; {_ALL_KEYS}" if shown else f"; {_ALL_KEYS}"
