"""Keys of LLaMA-Factory's files (https://llamafactory.readthedocs.io) as keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.foreign_keys import (
    Keys,
    KeysRead,
    adapters,
    batch,
    columns,
    common_defaults,
    handled,
    held_out,
    leave_out,
    length,
    number_to,
    only,
    optimiser,
    precision,
    quantised_base,
    schedule,
    shown,
    to,
    whole_to,
    zero_stage,
)

_NO_EFFECT = (
    "do_train", "do_eval", "do_predict", "predict_with_generate", "trust_remote_code", "cache_dir",
    "use_fast_tokenizer", "output_dir", "overwrite_output_dir", "overwrite_cache", "tokenized_path",
    "plot_loss", "report_to", "run_name", "preprocessing_num_workers", "dataloader_num_workers",
    "dataloader_pin_memory", "ddp_timeout", "ddp_find_unused_parameters", "save_strategy", "save_only_model",
    "eval_strategy", "evaluation_strategy", "eval_on_start", "per_device_eval_batch_size", "eval_dataset",
    "logging_strategy", "logging_first_step", "logging_dir", "flash_attn", "tf32", "enable_liger_kernel",
    "use_unsloth", "use_unsloth_gc", "upcast_layernorm", "upcast_lmhead_output", "low_cpu_mem_usage",
    "infer_backend", "infer_dtype", "print_param_status", "include_num_input_tokens_seen", "fsdp",
    "fsdp_config", "group_by_length", "preprocessing_batch_size", "disable_tqdm", "push_to_hub",
    "hf_hub_token", "export_dir", "include_tokens_per_second", "save_safetensors", "swanlab_project",
    "use_swanlab", "length_column_name", "remove_unused_columns",
)  # fmt: skip
_ADAPTER_KEYS = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora", "finetuning_type",
)  # fmt: skip
_PLAIN = "adapters begin with a B of zeros, and have one rate; give false"
_QUANTISED_KEYS = ("quantization_bit", "quantization_method", "quantization_type", "double_quantization")
_BITS = "give 4 or 8 bits of bitsandbytes, and nf4, with finetuning_type: lora"


def read_llama_factory(file: Mapping[str, Any]) -> KeysRead:
    """Return the run of a file of LLaMA-Factory, with its defaults where it says nothing.

    Its `dataset_info.json` is read where the folder `dataset_dir` has one. Raises `UserError`.
    """
    reading = KeysRead(file)
    common_defaults(reading, seed=42)
    reading.set("data.seq_len", int(reading.number("cutoff_len", 2048)))
    reading.set("train.lr", 5e-5)
    reading.set("train.schedule", "linear")
    reading.set("train.min_lr_ratio", 0.0)
    reading.set("train.warmup_fraction", 0.0)
    reading.set("recompute.policy", "full")
    if not any(reading.get(key) for key in ("bf16", "fp16", "pure_bf16")):
        reading.set("precision.compute", "fp32")
    reading.read(KEYS)
    _adapter(reading)
    zero_stage(reading, "deepspeed")
    batch(reading, "per_device_train_batch_size", 8)
    length(reading, "num_train_epochs", 3.0)
    if reading.number("warmup_steps", 0) > 0:
        reading.set("train.warmup_steps", int(reading.number("warmup_steps")))
        reading.tree["train"].pop("warmup_fraction")
    reading.require("model_name_or_path", "dataset")
    return reading


def _adapter(reading: KeysRead) -> None:
    kind = reading.get("finetuning_type", "lora")
    _quantised(reading, kind)
    if kind == "full":
        reading.left_out += [key for key in _ADAPTER_KEYS[:-1] if reading.get(key) is not None]
        return
    if kind != "lora":
        reading.refuse(
            f"finetuning_type = {kind}", "give lora or full; a run file has train.frozen for layers"
        )
        return
    rank, named = int(reading.number("lora_rank", 8)), reading.get("adapter_name_or_path")
    target = reading.get("lora_target", None if named else "all")
    names = [name.strip() for name in target.split(",")] if isinstance(target, str) else target
    if named and "," in str(named):
        reading.refuse(
            f"adapter_name_or_path = {named}", "give one adapter; others are merged: meshwright import"
        )
    adapters(
        reading,
        {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora",
         "dora": "use_dora", "targets": "lora_target", "weights": "adapter_name_or_path"},
        {"rank": 8, "alpha": 2 * rank},
        ["all-linear"] if names == ["all"] else names,
    )  # fmt: skip


def _quantised(reading: KeysRead, kind: str) -> None:
    """Keep the frozen weights beside adapters in 4 or 8 bits."""
    bits = reading.number("quantization_bit")
    if bits is None:
        reading.left_out += [key for key in _QUANTISED_KEYS if reading.get(key) is not None]
        return
    method = str(reading.get("quantization_method", "bnb"))
    usual = method in ("bnb", "bitsandbytes") and reading.get("quantization_type", "nf4") == "nf4"
    if kind == "lora" and usual and bits in (4, 8):
        quantised_base(reading, "quantization_bit", int(bits))
    else:
        reading.refuse(f"quantization_bit = {bits:g}", _BITS)


def _stage(reading: KeysRead, key: str) -> None:
    if reading.get(key) not in ("sft", "pt"):
        reading.refuse(
            f"{key} = {reading.get(key)}", "give sft or pt; a run file has [preference] for pairs of answers"
        )


def _dataset(reading: KeysRead, key: str) -> None:
    """The corpus and its format, by the data set's row in `dataset_info.json`."""
    value = reading.get(key)
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
    if len(names) > 1:
        reading.refuse(
            f"{key} = {', '.join(names)}",
            "several corpora need their weights; give one of them, or a run file with [data.mixture]",
        )
        return
    folder = Path(str(reading.get("dataset_dir", "data"))).expanduser()
    row = _info(folder / "dataset_info.json").get(names[0])
    if not isinstance(row, Mapping):
        known = did_you_mean(names[0], list(_info(folder / "dataset_info.json")))
        reading.refuse(f"{key} = {names[0]}", f"{folder / 'dataset_info.json'} has no such entry{known}")
        return
    _corpus(reading, row, folder, names[0])


def _info(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(file, MAX_JSON))
    except (OSError, ValueError) as error:
        raise UserError(
            f"dataset_dir: {file} cannot be read ({error}); give the folder that has the dataset_info.json"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"dataset_dir: {file} has no object; give LLaMA-Factory's dataset_info.json")
    return found


def _corpus(reading: KeysRead, row: Mapping[str, Any], folder: Path, name: str) -> None:
    if file := row.get("file_name"):
        reading.set("data.corpus", str(folder / str(file)))
    elif hub := row.get("hf_hub_url"):
        reading.set("data.corpus", f"hf:{hub}" + (f":{row['subset']}" if row.get("subset") else ""))
    else:
        reading.refuse(f"dataset = {name}", "its entry has no file_name and no hf_hub_url; add one")
    if row.get("split", "train") != "train":
        reading.refuse(f"dataset = {name} with split = {row['split']}", "the split 'train' is read")
    for key in ("ranking", "num_samples", "folder"):
        if row.get(key):
            reading.refuse(f"dataset = {name} with {key}", "has no counterpart; give a file of chats")
    named = row.get("columns") or {}
    if reading.get("stage") == "pt":
        reading.set("data.format", "text")
        reading.set("data.text_key", named.get("prompt", "text"))
    else:
        _format(reading, row, named, name)


_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}
_CHATS = {
    ("role", "content", "user", "assistant"): ("chat", "messages"),
    ("from", "value", "human", "gpt"): ("sharegpt", "conversations"),
}
_BESIDE = ("system", "tools")
"""Columns of chats beside their turns."""


def _format(reading: KeysRead, row: Mapping[str, Any], named: Mapping[str, str], name: str) -> None:
    """The format of a data set, and what its columns are called."""
    if row.get("formatting", "alpaca") == "alpaca":
        reading.set("data.format", "alpaca")
        _columns(reading, named, _ALPACA, name)
        return
    tags = row.get("tags") or {}
    turn = (
        tags.get("role_tag", "from"), tags.get("content_tag", "value"), tags.get("user_tag", "human"),
        tags.get("assistant_tag", "gpt"),
    )  # fmt: skip
    if turn in _CHATS:
        format, key = _CHATS[turn]
        reading.set("data.format", format)
        own = {"messages": "conversations", **named}
        _columns(reading, own, {"messages": key, **{each: each for each in _BESIDE}}, name)
    else:
        reading.refuse(
            f"dataset = {name} with the tags {', '.join(turn)}",
            "name them role, content, user, assistant, or from, value, human, gpt",
        )


def _columns(reading: KeysRead, named: Mapping[str, str], ours: Mapping[str, str], name: str) -> None:
    """Take the names of columns over; `ours` are the keys of the format by those of the program."""
    for key in named.keys() - ours.keys():
        reading.refuse(f"dataset = {name} with the column {key}", "has no counterpart; remove it")
    columns(reading, {ours[key]: str(column) for key, column in named.items() if key in ours})


def _template(reading: KeysRead, key: str) -> None:
    reading.told.append(f"{key} = {reading.get(key)}: the model's own chat template takes its place")


def _thinking(reading: KeysRead, key: str) -> None:
    """Accept the default of templates; rows say otherwise, each for itself."""
    if reading.get(key) is not True:
        reading.refuse(
            f"{key} = {shown(reading.get(key))}",
            'give rows with "chat_template_kwargs": {"enable_thinking": false}',
        )


def _packing(reading: KeysRead, key: str) -> None:
    reading.set("data.pack", bool(reading.get(key)))
    if reading.get(key) and not reading.get("neat_packing"):
        reading.told.append(f"{key}: samples that share one do not see each other, as with neat_packing")


def _checkpointing(reading: KeysRead, key: str) -> None:
    if reading.get(key):
        reading.set("recompute.policy", "none")


def _pure_bf16(reading: KeysRead, key: str) -> None:
    if reading.get(key):
        reading.set("precision.compute", "bf16")
        reading.set("precision.master", "bf16")


KEYS: Keys = {
    **dict.fromkeys(_NO_EFFECT, leave_out),
    **dict.fromkeys(
        (*_ADAPTER_KEYS, *_QUANTISED_KEYS, "cutoff_len", "per_device_train_batch_size",
         "gradient_accumulation_steps", "num_train_epochs", "max_steps", "dataset_dir", "neat_packing",
         "warmup_steps", "deepspeed"), handled),
    "model_name_or_path": to("model.hf"),
    "adapter_name_or_path": handled,
    "stage": _stage,
    "dataset": _dataset,
    "template": _template,
    "packing": _packing,
    "val_size": held_out,
    "train_on_prompt": only(instead="what the user says is not trained on; give false"),
    "mask_history": only(instead="every answer of the assistant is trained on; give false"),
    "max_samples": only(instead="all rows are read; remove it, or give a file of so many rows"),
    "enable_thinking": _thinking,
    "pissa_init": only(instead=_PLAIN),
    "loraplus_lr_ratio": only(instead=_PLAIN),
    "additional_target": only(instead="all but the adapters is frozen; remove it"),
    "learning_rate": number_to("train.lr"),
    "lr_scheduler_type": schedule,
    "warmup_ratio": number_to("train.warmup_fraction"),
    "optim": optimiser,
    "weight_decay": number_to("train.weight_decay"),
    "adam_beta1": number_to("train.beta1"),
    "adam_beta2": number_to("train.beta2"),
    "adam_epsilon": number_to("train.eps"),
    "max_grad_norm": number_to("train.clip"),
    "seed": number_to("train.seed"),
    "bf16": precision,
    "fp16": precision,
    "pure_bf16": _pure_bf16,
    "disable_gradient_checkpointing": _checkpointing,
    "torch_compile": to("train.compile"),
    "save_steps": whole_to("checkpoint.every", "it saves as often as pays"),
    "save_total_limit": number_to("checkpoint.keep"),
    "eval_steps": whole_to("train.eval_every", "it validates at the end"),
    "logging_steps": whole_to("train.log_every", "it logs each step"),
    "resume_from_checkpoint": only(instead="give --resume auto with the run's folder"),
    "neftune_noise_alpha": only(instead="embeddings get no noise; remove it"),
}  # fmt: skip
