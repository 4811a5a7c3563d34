"""Keys of axolotl's files (https://docs.axolotl.ai/docs/config-reference.html) as keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from meshwright.spec.foreign_keys import (
    Keys,
    KeysRead,
    adapters,
    batch,
    columns,
    common_defaults,
    handled,
    held_out,
    hub_or_path,
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
    "tokenizer_type", "trust_remote_code", "is_llama_derived_model", "is_mistral_derived_model",
    "is_falcon_derived_model", "is_qwen_derived_model", "type_of_model", "model_type", "strict",
    "output_dir", "dataset_prepared_path", "dataset_processes", "dataset_exact_deduplication_cache",
    "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_run_id", "wandb_log_model",
    "wandb_mode", "mlflow_tracking_uri", "mlflow_experiment_name", "use_tensorboard", "comet_project_name",
    "hub_model_id", "hub_strategy", "push_dataset_to_hub", "hf_use_auth_token", "save_safetensors",
    "save_strategy", "saves_per_epoch", "evals_per_epoch", "eval_strategy", "eval_batch_size",
    "eval_sample_packing", "eval_table_size", "eval_max_new_tokens", "save_only_model", "test_datasets",
    "flash_attention", "xformers_attention", "sdp_attention", "flex_attention", "tf32",
    "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp",
    "eager_attention", "gradient_checkpointing_kwargs", "pad_to_sequence_len", "debug",
    "liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_swiglu",
    "liger_fused_linear_cross_entropy", "cut_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel",
    "lora_o_kernel", "fsdp", "fsdp_config", "fsdp_version", "local_rank", "ddp", "ddp_timeout",
    "ddp_bucket_cap_mb", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "shuffle_merged_datasets", "group_by_length", "include_tokens_per_second", "heads_k_stride",
    "ring_attn_func", "auto_resume_from_checkpoints", "low_cpu_mem_usage", "lora_fan_in_fan_out",
    "torch_compile_backend", "torch_compile_mode", "gc_steps", "profiler_steps", "seq_len_bucketing",
    "use_wandb", "use_mlflow", "use_comet", "mlflow_run_name", "hub_private_repo", "save_first_step",
    "logging_dir", "attn_implementation", "lora_embedding_kernel", "activation_offloading",
    "dataset_num_proc", "dataset_keep_in_memory", "dataloader_persistent_workers", "eval_causal_lm_metrics",
    "do_bench_eval", "do_causal_lm_eval", "skip_prepare_dataset", "sample_packing_bin_size",
    "sample_packing_group_size", "sample_packing_sequentially", "sample_packing_eff_est",
    "experimental_skip_move_to_device",
)  # fmt: skip
_BITS = "all weights are trained in bf16 or fp32; give adapter: qlora, or remove it"
_ADAPTER_KEYS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "peft_use_rslora",
    "peft_use_dora",
)  # fmt: skip
_FORMATS = {
    "alpaca": "alpaca", "alpaca_chat.load_default": "alpaca", "alpaca_chat.load_qa": "alpaca",
    "sharegpt": "sharegpt", "completion": "text", "chat_template": "chat",
}  # fmt: skip
_QUESTIONS = {"instruction": "question", "output": "answer"}
"""Columns of rows of the type alpaca_chat.load_qa."""
_FILE_KINDS = ("json", "parquet", "csv", "arrow", "text")


def read_axolotl(file: Mapping[str, Any]) -> KeysRead:
    """Return the run of a file of axolotl, with its defaults where it says nothing. Raises `UserError`."""
    reading = KeysRead(file)
    common_defaults(reading, seed=42)
    reading.set("data.seq_len", int(reading.number("sequence_len", 512)))
    reading.set("train.warmup_fraction", 0.03)
    reading.set("train.schedule", "cosine")
    reading.set("train.min_lr_ratio", 0.0)
    if not (reading.get("bf16") or reading.get("bfloat16") or reading.get("fp16")):
        reading.set("precision.compute", "fp32")
    reading.read(KEYS)
    _adapter(reading)
    zero_stage(reading, "deepspeed")
    batch(reading, "micro_batch_size", 1)
    length(reading, "num_epochs", 1.0)
    reading.require("base_model", "datasets", "learning_rate")
    if reading.get("warmup_steps") is not None:
        reading.tree["train"].pop("warmup_fraction", None)
    return reading


def _adapter(reading: KeysRead) -> None:
    kind = reading.get("adapter")
    bits = [key for key in ("load_in_4bit", "load_in_8bit") if reading.get(key)]
    if kind is None:
        reading.left_out += [key for key in _ADAPTER_KEYS if reading.get(key) is not None]
        for key in bits:
            reading.refuse(f"{key} = true", _BITS)
        return
    if kind not in ("lora", "qlora"):
        reading.refuse(f"adapter = {kind}", "give lora or qlora")
        return
    if kind == "qlora" or bits:
        quantised_base(reading, bits[0] if bits else "adapter", 8 if bits == ["load_in_8bit"] else 4)
    adapters(
        reading,
        {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "peft_use_rslora",
         "dora": "peft_use_dora", "targets": "lora_target_modules", "weights": "lora_model_dir"},
        {"rank": 8, "alpha": 16},
        ["all-linear"] if reading.get("lora_target_linear") else reading.get("lora_target_modules"),
    )  # fmt: skip


def _datasets(reading: KeysRead, key: str) -> None:
    """One data set; several would be in proportion to their sizes, which only a mixture's weights can say."""
    sets = reading.get(key)
    if not isinstance(sets, list) or not sets or not all(isinstance(each, Mapping) for each in sets):
        reading.refuse(key, "is not a list of data sets; give one with its path and type")
    elif len(sets) > 1:
        reading.refuse(
            f"{key} with {len(sets)} entries",
            "several corpora need their weights; give one data set, or a run file with [data.mixture]",
        )
    else:
        _dataset(reading, sets[0])


def _dataset(reading: KeysRead, entry: Mapping[str, Any]) -> None:
    place, kind = "datasets[0]", cast(Any, entry.get("type", "chat_template"))
    path, files = str(entry.get("path", "")), entry.get("data_files")
    if path in _FILE_KINDS and files and not Path(path).exists():
        listed = [files] if isinstance(files, str) else list(files)
        if len(listed) > 1:
            reading.refuse(
                f"{place}.data_files", "names several files; put them into one folder, and give that"
            )
        path = str(listed[0])
    elif files:
        reading.refuse(f"{place}.data_files = {shown(files)}", "give the file as path")
    if isinstance(kind, Mapping):
        entry = {**entry, **_named(reading, kind)}
        kind = "alpaca"
    if not isinstance(kind, str) or kind not in _FORMATS:
        reading.refuse(f"{place}.type = {shown(kind)}", f"give one of {', '.join(_FORMATS)}")
        return
    reading.set("data.corpus", hub_or_path(path, entry.get("name")))
    reading.set("data.format", _FORMATS[kind])
    if kind == "completion":
        reading.set("data.text_key", entry.get("field", "text"))
    if kind == "chat_template":
        _chat(reading, entry)
    if kind == "alpaca_chat.load_qa":
        columns(reading, _QUESTIONS)
    if kind == "alpaca":
        reading.told.append(
            f"{place}.type: rows of alpaca are rendered by the model's chat template, where axolotl writes "
            "'### Instruction:' or the type's own format"
        )
    known = {"path", "type", "data_files", "name", "ds_type", "field", "split", *_CHAT_KEYS}
    if entry.get("split", "train") != "train" and not Path(path).exists():
        reading.refuse(f"{place}.split = {entry['split']}", "the split 'train' is read; give its files")
    for other in entry.keys() - known:
        if entry[other] not in (None, False, "", [], {}):
            reading.refuse(f"{place}.{other}", "has no counterpart; remove it to train without it")


def _named(reading: KeysRead, kind: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take the columns over that a type of the user's names; return what it has besides, which is refused."""
    fields = {f"field_{key}": key for key in ("instruction", "input", "output", "system")}
    columns(reading, {ours: str(kind[key]) for key, ours in fields.items() if kind.get(key)})
    return {f"type.{key}": value for key, value in kind.items() if key not in fields}


_CHAT_KEYS = (
    "field_messages", "message_property_mappings", "message_field_role", "message_field_content",
    "chat_template", "roles", "roles_to_train", "train_on_eos", "train_on_eot",
)  # fmt: skip


def _chat(reading: KeysRead, entry: Mapping[str, Any]) -> None:
    """Rows of chats by the names of their keys: those of messages, or of ShareGPT."""
    place = "datasets[0]"
    field = entry.get("field_messages", "messages")
    named = {"role": "role", "content": "content", **(entry.get("message_property_mappings") or {})}
    named["role"] = entry.get("message_field_role") or named["role"]
    named["content"] = entry.get("message_field_content") or named["content"]
    formats = {("role", "content"): ("chat", "messages"), ("from", "value"): ("sharegpt", "conversations")}
    turn = (named["role"], named["content"])
    if turn in formats:
        format, key = formats[turn]
        reading.set("data.format", format)
        columns(reading, {key: field})
    else:
        reading.refuse(
            f"{place} with turns of {' and '.join(turn)}", "name them role and content, or from and value"
        )
    for key, fine in (
        ("chat_template", ("tokenizer_default",)),
        ("roles_to_train", (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"])),
        ("train_on_eos", ("turn",)),
        ("train_on_eot", ("turn",)),
    ):
        if entry.get(key) and entry[key] not in fine:
            reading.refuse(
                f"{place}.{key} = {shown(entry[key])}", f"give {fine[0]}, which is what is done here"
            )


def _template(reading: KeysRead, key: str) -> None:
    """The name of a chat template: that of the tokenizer, or 'jinja' for a file."""
    name = str(reading.get(key))
    if name == "jinja" and not reading.get("chat_template_jinja"):
        reading.refuse(f"{key} = jinja", "give the name of its file as chat_template_jinja")
    elif name != "jinja" and not name.startswith("tokenizer_default"):
        reading.refuse(
            f"{key} = {name}",
            "remove it to take the model's own template, or write it into a file, and give that as "
            "chat_template_jinja",
        )


def _template_file(reading: KeysRead, key: str) -> None:
    given = str(reading.get(key))
    if Path(given).is_file():
        reading.set("data.chat_template", given)
    else:
        reading.refuse(f"{key} = {shown(given)}", "give the name of a file with the template")


def _plugins(reading: KeysRead, key: str) -> None:
    """Plugins with kernels change no result."""
    kernels = ("Liger", "CutCrossEntropy")
    for name in reading.get(key):
        if not any(each in str(name) for each in kernels):
            reading.refuse(f"{key} with {shown(name)}", "has no counterpart; remove it to train without it")
    leave_out(reading, key)


def _special_tokens(reading: KeysRead, key: str) -> None:
    """Tokens for padding are never targets, and others decide what is learned."""
    named = set(reading.get(key)) - {"pad_token"}
    if named:
        reading.refuse(f"{key}.{min(named)}", "give a base_model whose tokenizer has it")
    else:
        leave_out(reading, key)


def _recompute(reading: KeysRead, key: str) -> None:
    reading.set("recompute.policy", "full" if reading.get(key) else "none")


def _bfloat16(reading: KeysRead, key: str) -> None:
    if reading.get(key) is True:
        reading.set("precision.compute", "bf16")


def _train_on_inputs(reading: KeysRead, key: str) -> None:
    if reading.get(key) is True:
        reading.refuse(f"{key} = true", "what the user says is not trained on; give false")


KEYS: Keys = {
    **dict.fromkeys(_NO_EFFECT, leave_out),
    **dict.fromkeys(
        (*_ADAPTER_KEYS, "adapter", "sequence_len", "micro_batch_size", "gradient_accumulation_steps",
         "num_epochs", "max_steps", "deepspeed", "load_in_8bit", "load_in_4bit"), handled),
    "chat_template_jinja": _template_file,
    "plugins": _plugins,
    "base_model": to("model.hf"),
    "base_model_config": only(instead="the architecture is that of base_model; remove it"),
    "tokenizer_config": to("data.tokenizer"),
    "datasets": _datasets,
    "chat_template": _template,
    "train_on_inputs": _train_on_inputs,
    "special_tokens": _special_tokens,
    "tokens": only(instead="give a base_model whose tokenizer has them"),
    "sample_packing": to("data.pack"),
    "val_set_size": held_out,
    "lora_modules_to_save": only(instead="all but the adapters is frozen; remove it"),
    "lora_model_dir": handled,
    "learning_rate": number_to("train.lr"),
    "lr_scheduler": schedule,
    "cosine_min_lr_ratio": number_to("train.min_lr_ratio"),
    "warmup_steps": number_to("train.warmup_steps"),
    "warmup_ratio": number_to("train.warmup_fraction"),
    "optimizer": optimiser,
    "weight_decay": number_to("train.weight_decay"),
    "adam_beta1": number_to("train.beta1"),
    "adam_beta2": number_to("train.beta2"),
    "adam_epsilon": number_to("train.eps"),
    "max_grad_norm": number_to("train.clip"),
    "seed": number_to("train.seed"),
    "bf16": precision,
    "bfloat16": _bfloat16,
    "fp16": precision,
    "gradient_checkpointing": _recompute,
    "torch_compile": to("train.compile"),
    "dp_shard_size": number_to("layout.dp"),
    "dp_replicate_size": number_to("layout.replicate"),
    "tensor_parallel_size": number_to("layout.tp"),
    "context_parallel_size": number_to("layout.cp"),
    "save_steps": whole_to("checkpoint.every", "it saves as often as pays"),
    "save_total_limit": number_to("checkpoint.keep"),
    "eval_steps": whole_to("train.eval_every", "it validates at the end"),
    "logging_steps": whole_to("train.log_every", "it logs each step"),
    "resume_from_checkpoint": only(instead="give --resume auto with the run's folder"),
    "early_stopping_patience": only(instead="a run ends after its steps; remove it"),
    "neftune_noise_alpha": only(instead="embeddings get no noise; remove it"),
    "excess_length_strategy": only("truncate", instead="chats that are too long lose their ends"),
    "rl": only(instead="only supervised fine-tuning is read; a run file has [preference] for pairs"),
}  # fmt: skip
