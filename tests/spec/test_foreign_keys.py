"""Files of axolotl and LLaMA-Factory as run files: each key is taken over, told, or refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from foreign_run_file_texts import AXOLOTL, IDENTITY, LLAMA_FACTORY
from meshwright.cli.main import main
from meshwright.spec import RunSpec, UserError, axolotl_keys, llama_factory_keys, load
from meshwright.spec.foreign_run_files import foreign_tree
from meshwright.spec.load import from_tree

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the architecture of a model, and data as LLaMA-Factory has it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(IDENTITY))
    (tmp_path / "chats.jsonl").write_text('{"conversations": [{"from": "human", "value": "Hello"}]}\n')
    return tmp_path


def read(text: str, **changes: Any) -> tuple[dict[str, Any], str]:
    """The tables of a file with changed keys, of which None are removed, and the warning."""
    file = {**yaml.safe_load(text), **changes}
    kept = {key: value for key, value in file.items() if value is not None}
    Path("their.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tree = foreign_tree(Path("their.yaml"))
    assert tree is not None
    return tree, str(told[0].message) if told else ""


def spec_of(text: str, **changes: Any) -> RunSpec:
    return from_tree(read(text, **changes)[0])


def refusal(text: str, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(text, **changes)
    sentence = str(caught.value)
    assert sentence.startswith("their.yaml: ") and "\n" not in sentence and caught.value.code == 2
    return sentence


def test_a_file_of_axolotl_is_a_run() -> None:
    tree, told = read(AXOLOTL)
    assert tree == {
        "model": {"hf": "model"},
        "data": {
            "corpus": "chats.jsonl", "format": "sharegpt", "seq_len": 4096, "pack": True,
            "val_fraction": 0.05,
        },
        "lora": {"rank": 32, "alpha": 16, "dropout": 0.05, "rslora": False, "targets": ["all-linear"]},
        "train": {
            "weight_decay": 0.01, "beta2": 0.999, "seed": 42, "warmup_fraction": 0.1, "schedule": "cosine",
            "min_lr_ratio": 0.0, "optimiser": "adamw8bit", "lr": 2e-4, "log_every": 1, "epochs": 4.0,
            "batch_tokens": 2 * 4 * 2 * 4096,
        },
        "recompute": {"policy": "full"},
        "layout": {"dp": 2, "zero": 2, "micro_batch": 2},
    }  # fmt: skip
    assert told.startswith(
        "their.yaml: read as a file of axolotl; left out, as they change no result: model_type"
    )
    assert "wandb_project" in told and "saves_per_epoch" in told and "lora_r" not in told
    assert from_tree(tree).microbatches == 4


def test_a_file_of_llama_factory_is_a_run() -> None:
    tree, told = read(LLAMA_FACTORY)
    assert tree == {
        "model": {"hf": "model"},
        "data": {
            "corpus": "data/identity.json", "format": "alpaca", "seq_len": 2048, "pack": False,
            "val_fraction": 0.1,
        },
        "lora": {
            "rank": 8, "alpha": 16, "dropout": 0, "rslora": False,
            "targets": ["q_proj", "v_proj"],
        },
        "train": {
            "weight_decay": 0.0, "beta2": 0.999, "seed": 42, "warmup_fraction": 0.1, "schedule": "cosine",
            "min_lr_ratio": 0.0, "lr": 1e-4, "log_every": 10, "eval_every": 500, "epochs": 3.0,
            "batch_tokens": 8 * 2048,
        },
        "precision": {"compute": "bf16"},
        "recompute": {"policy": "full"},
        "layout": {"micro_batch": 1},
        "checkpoint": {"every": 500},
    }  # fmt: skip
    assert "template = llama3: the model's own chat template takes its place" in told
    assert "a batch is 1 x 8 sequences, as on one device" in told
    assert from_tree(tree).microbatches == 8


def test_defaults_are_those_of_the_programs() -> None:
    spec = spec_of(
        "base_model: model\ndatasets: [{path: chats.jsonl, type: completion}]\nlearning_rate: 1e-5\n"
    )
    assert (spec.data.seq_len, spec.data.pack, spec.data.format, spec.lora) == (512, False, "text", None)
    assert (spec.train.epochs, spec.train.schedule, spec.train.min_lr_ratio) == (1, "cosine", 0)
    assert (spec.train.lr, spec.train.warmup_fraction, spec.precision.compute) == (1e-5, 0.03, "fp32")
    spec = spec_of("model_name_or_path: model\nstage: sft\ndataset: identity\n")
    assert (spec.data.seq_len, spec.train.epochs, spec.train.lr, spec.train.schedule) == (
        2048,
        3,
        5e-5,
        "linear",
    )
    assert spec.lora is not None and (spec.lora.rank, spec.lora.alpha, spec.lora.targets) == (
        8,
        16,
        ("all-linear",),
    )
    assert spec.train.rising_steps == 0 and spec.train.batch_tokens == 8 * 2048


def test_an_adapter_to_go_on_from_is_taken_over() -> None:
    """The adapter's config has the keys that the file does not."""
    tree, told = read(AXOLOTL, lora_model_dir="out/adapter", lora_target_linear=None, lora_r=None)
    assert tree["lora"] == {"weights": "out/adapter", "alpha": 16, "dropout": 0.05}
    tree, told = read(LLAMA_FACTORY, adapter_name_or_path="out", lora_target=None)
    assert tree["lora"] == {"weights": "out", "rank": 8} and "adapter_name_or_path" not in told
    assert "adapter_name_or_path = a,b: give one adapter" in refusal(
        LLAMA_FACTORY, adapter_name_or_path="a,b"
    )


def test_all_weights_are_trained_without_an_adapter() -> None:
    tree, told = read(AXOLOTL, adapter=None)
    assert "lora" not in tree and "lora_r, lora_alpha, lora_dropout" in told
    tree, told = read(LLAMA_FACTORY, finetuning_type="full")
    assert "lora" not in tree and "lora_rank" in told


@pytest.mark.parametrize(
    ("text", "changes", "key", "value"),
    [
        (AXOLOTL, {"max_steps": 30}, "train.steps", 30),
        (AXOLOTL, {"warmup_steps": 10}, "train.warmup_steps", 10),
        (AXOLOTL, {"lr_scheduler": "constant_with_warmup"}, "train.schedule", "constant"),
        (AXOLOTL, {"cosine_min_lr_ratio": 0.2}, "train.min_lr_ratio", 0.2),
        (AXOLOTL, {"bf16": True}, "precision.compute", "bf16"),
        (AXOLOTL, {"bf16": None, "fp16": True}, "precision.compute", "fp16"),
        (AXOLOTL, {"tensor_parallel_size": 2}, "layout.tp", 2),
        (AXOLOTL, {"context_parallel_size": 2}, "layout.cp", 2),
        (AXOLOTL, {"save_steps": 100}, "checkpoint.every", 100),
        (AXOLOTL, {"chat_template": "tokenizer_default"}, "data.chat_template", None),
        (AXOLOTL, {"chat_template": "jinja", "chat_template_jinja": "their.yaml"}, "data.chat_template",
         "their.yaml"),
        (AXOLOTL, {"lora_target_linear": None, "lora_target_modules": ["down_proj"]}, "lora.targets",
         ("*.mlp.down.weight",)),
        (AXOLOTL, {"datasets": [{"path": "org/name", "name": "part", "type": "alpaca"}]}, "data.corpus",
         "hf:org/name:part"),
        (AXOLOTL, {"datasets": [{"path": "json", "data_files": "chats.jsonl", "type": "sharegpt"}]},
         "data.corpus",
         "chats.jsonl"),
        (AXOLOTL, {"datasets": [{"path": "chats.jsonl"}]}, "data.format", "chat"),
        (AXOLOTL, {"datasets": [{"path": "a", "field_messages": "talk"}]}, "data.columns",
         {"messages": "talk"}),
        (AXOLOTL, {"datasets": [{"path": "a", "type": {"field_instruction": "q", "field_output": "a"}}]},
         "data.columns", {"instruction": "q", "output": "a"}),
        (AXOLOTL, {"datasets": [{"path": "a", "type": "alpaca_chat.load_qa"}]}, "data.columns",
         {"instruction": "question", "output": "answer"}),
        (AXOLOTL, {"adapter": "qlora", "load_in_4bit": True}, "lora.quantise", "nf4"),
        (AXOLOTL, {"load_in_8bit": True}, "lora.quantise", "int8"),
        (AXOLOTL, {"lora_target_linear": None, "lora_target_modules": "all-linear"}, "lora.targets",
         ("all-linear",)),
        (LLAMA_FACTORY, {"quantization_bit": 4, "quantization_method": "bnb", "double_quantization": True},
         "lora.quantise", "nf4"),
        (LLAMA_FACTORY, {"quantization_bit": 8}, "lora.quantise", "int8"),
        (AXOLOTL, {"optimizer": "paged_adamw_32bit"}, "train.optimiser", "adamw"),
        (LLAMA_FACTORY, {"warmup_ratio": None, "warmup_steps": 20}, "train.warmup_steps", 20),
        (LLAMA_FACTORY, {"max_steps": 9}, "train.steps", 9),
        (LLAMA_FACTORY, {"lora_alpha": 64, "lora_target": "all"}, "lora.alpha", 64),
        (LLAMA_FACTORY, {}, "lora.targets", ("*.attn.q.weight", "*.attn.v.weight")),
        (LLAMA_FACTORY, {"packing": True}, "data.pack", True),
        (LLAMA_FACTORY, {"optim": "adamw_torch"}, "train.optimiser", "adamw"),
        (LLAMA_FACTORY, {"pure_bf16": True, "bf16": None, "finetuning_type": "full"}, "precision.master",
         "bf16"),
        (LLAMA_FACTORY, {"disable_gradient_checkpointing": True}, "recompute.policy", "none"),
        (LLAMA_FACTORY, {"stage": "pt"}, "data.format", "text"),
    ],
)  # fmt: skip
def test_a_key_is_taken_over(text: str, changes: dict[str, Any], key: str, value: object) -> None:
    found: Any = spec_of(text, **changes)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("text", "changes", "part"),
    [
        (AXOLOTL, {"load_in_4bit": True, "adapter": None},
         "load_in_4bit = true: all weights are trained in bf16 or fp32; give adapter: qlora, or remove it"),
        (AXOLOTL, {"adapter": "llama-adapter"}, "adapter = llama-adapter: give lora or qlora"),
        (AXOLOTL, {"excess_length_strategy": "drop"}, "chats that are too long lose their ends"),
        (AXOLOTL, {"chat_template": "chatml"},
         "chat_template = chatml: remove it to take the model's own template"),
        (AXOLOTL, {"train_on_inputs": True}, "train_on_inputs = true: what the user says is not trained on"),
        (AXOLOTL, {"rl": "dpo"}, "rl = dpo: only supervised fine-tuning is read; a run file has"),
        (AXOLOTL, {"optimizer": "lomo"}, "optimizer = lomo: give one of adamw_torch"),
        (AXOLOTL, {"lr_scheduler": "rex"}, "lr_scheduler = rex: give one of cosine"),
        (AXOLOTL, {"some_new_key": 3}, "some_new_key: has no counterpart; remove it to train without it"),
        (AXOLOTL, {"datasets": [{"path": "a"}, {"path": "b"}]},
         "datasets with 2 entries: several corpora need"),
        (AXOLOTL, {"datasets": [{"path": "a", "type": {"field_output": "x", "format": "{instruction}"}}]},
         "datasets[0].type.format: has no counterpart"),
        (AXOLOTL, {"datasets": [{"path": "a", "type": "pygmalion"}]}, "datasets[0].type = pygmalion: give"),
        (AXOLOTL, {"datasets": [{"path": "a", "shards": 4}]}, "datasets[0].shards: has no counterpart"),
        (AXOLOTL, {"datasets": [{"path": "a", "message_field_role": "who"}]},
         "datasets[0] with turns of who and content: name them role and content, or from and value"),
        (AXOLOTL, {"datasets": [{"path": "a", "train_on_eos": "all"}]},
         "datasets[0].train_on_eos = all: give turn"),
        (AXOLOTL, {"lora_target_linear": None},
         "lora_target_modules = none: give all linear layers, or modules such as q_proj"),
        (AXOLOTL, {"special_tokens": {"eos_token": "</s>"}}, "special_tokens.eos_token: give a base_model"),
        (AXOLOTL, {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins with axolotl.integrations.kd"),
        (AXOLOTL, {"val_set_size": 100}, "val_set_size = 100: give a share of the rows"),
        (AXOLOTL, {"learning_rate": "fast"}, "learning_rate: 'fast' is not a number"),
        (AXOLOTL, {"base_model": ""}, "base_model: is missing"),
        (LLAMA_FACTORY, {"stage": "dpo"}, "stage = dpo: give sft or pt; a run file has [preference]"),
        (LLAMA_FACTORY, {"finetuning_type": "freeze"}, "finetuning_type = freeze: give lora or full"),
        (LLAMA_FACTORY, {"quantization_bit": 4, "finetuning_type": "full"},
         "quantization_bit = 4: give 4 or 8 bits of bitsandbytes, and nf4, with finetuning_type: lora"),
        (LLAMA_FACTORY, {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_bit = 4: give"),
        (LLAMA_FACTORY, {"enable_thinking": False}, "enable_thinking = false: give rows with"),
        (LLAMA_FACTORY, {"max_samples": 1000}, "max_samples = 1000: all rows are read"),
        (LLAMA_FACTORY, {"dataset": "identity,other"}, "dataset = identity, other: several corpora need"),
        (LLAMA_FACTORY, {"dataset": "identiti"}, "has no such entry; did you mean 'identity'?"),
        (LLAMA_FACTORY, {"dataset_dir": "nowhere"}, "dataset_dir: nowhere/dataset_info.json cannot be read"),
        (LLAMA_FACTORY, {"neftune_noise_alpha": 5}, "neftune_noise_alpha = 5: embeddings get no noise"),
    ],
)  # fmt: skip
def test_what_changes_the_result_and_has_no_counterpart_is_refused(
    text: str, changes: dict[str, Any], part: str
) -> None:
    assert part in refusal(text, **changes)


def test_keys_that_are_off_and_not_known_are_told_apart() -> None:
    told = read(AXOLOTL, some_new_key=False, dataset_num_proc=4)[1]
    assert told.endswith("left out, as they are off, but not known: some_new_key")
    assert "dataset_num_proc" in told.partition("left out, as they change no result: ")[2].partition(";")[0]


def test_a_quantised_base_is_told_not_to_be_that_of_bitsandbytes() -> None:
    told = read(AXOLOTL, adapter="qlora", load_in_4bit=True)[1]
    assert "load_in_4bit: frozen weights are kept in nf4, and their scales are not quantised again" in told
    assert "quantization_bit: frozen weights are kept in int8" in read(LLAMA_FACTORY, quantization_bit=8)[1]


def test_all_that_is_refused_is_listed_at_once() -> None:
    sentence = refusal(AXOLOTL, rl="kto", some_new_key=3, optimizer="lomo")
    assert "looks like a file of axolotl, of which these keys cannot be taken over: " in sentence
    assert all(key in sentence for key in ("rl = kto", "some_new_key", "optimizer = lomo"))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"file_name": "a.json"}, ("data/a.json", "alpaca")),
        ({"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output"}},
         ("data/a.json", "alpaca")),
        ({"hf_hub_url": "org/data", "subset": "en", "formatting": "sharegpt"},
         ("hf:org/data:en", "sharegpt")),
        ({"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "messages"},
          "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                   "assistant_tag": "assistant"}},
         ("data/a.json", "chat")),
        ({"file_name": "a.json", "columns": {"prompt": "question", "response": "output"}},
         ("data/a.json", "alpaca", {"instruction": "question"})),
        ({"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
         ("data/a.json", "sharegpt", {"conversations": "talk"})),
        ({"file_name": "a.json", "formatting": "sharegpt",
          "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                   "assistant_tag": "assistant"}},
         ("data/a.json", "chat", {"messages": "conversations"})),
        ({"file_name": "a.json", "formatting": "sharegpt", "tags": {"user_tag": "me"}},
         "with the tags from, value, me, gpt: name them"),
        ({"file_name": "a.json", "columns": {"images": "pictures"}}, "with the column images: has no"),
        ({"file_name": "a.json", "ranking": True}, "with ranking: has no counterpart"),
        ({"script_url": "x"}, "its entry has no file_name and no hf_hub_url"),
    ],
)  # fmt: skip
def test_rows_of_dataset_info(row: Mapping[str, Any], found: tuple[Any, ...] | str) -> None:
    Path("data/dataset_info.json").write_text(json.dumps({"identity": row}))
    if isinstance(found, str):
        assert found in refusal(LLAMA_FACTORY)
    else:
        data = read(LLAMA_FACTORY)[0]["data"]
        assert (data["corpus"], data["format"], *filter(None, [data.get("columns")])) == found


def test_the_stage_of_deepspeeds_file_is_read() -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert read(AXOLOTL, deepspeed="ds.json")[0]["layout"]["zero"] == 3
    assert (
        "--layout.dp and --layout.zero 3"
        in read(LLAMA_FACTORY, deepspeed="examples/deepspeed/ds_z3_config.json")[1]
    )
    assert "their.yaml: deepspeed: model cannot be read" not in read(AXOLOTL, deepspeed="model")[1]


@pytest.mark.parametrize("verb", ["spec check", "spec show"])
def test_verbs_read_such_a_file(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("their.yaml").write_text(AXOLOTL)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert main([*verb.split(), "their.yaml"]) == 0
    assert [str(each.message)[:10] for each in told if "axolotl" in str(each.message)] == ["their.yaml"]
    assert capsys.readouterr().out


def test_flags_win_and_from_python_too() -> None:
    Path("their.yaml").write_text(AXOLOTL)
    with pytest.warns(UserWarning, match="read as a file of axolotl"):
        spec = load(Path("their.yaml"), [("train.lr", "1e-3"), ("train.steps", "5"), ("lora", "none")])
    assert (spec.train.lr, spec.train.total_steps, spec.train.epochs, spec.lora) == (1e-3, 5, None, None)


def test_a_model_of_the_hub_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"model.hf: .* or a model of the hub as --from org/name"):
        spec_of(AXOLOTL, base_model="org/name")


def test_dora_is_asked_for_by_the_keys_of_peft() -> None:
    for file, key in ((AXOLOTL, "peft_use_dora"), (LLAMA_FACTORY, "use_dora")):
        tree, _ = read(f"{file}\n{key}: true\n")
        assert tree["lora"]["dora"] is True and not tree["lora"]["rslora"]


def test_no_key_stands_in_two_lists() -> None:
    for keys in (axolotl_keys, llama_factory_keys):
        assert len(keys._NO_EFFECT) == len(set(keys._NO_EFFECT))
        assert all(keys.KEYS[name].__name__ == "leave_out" for name in keys._NO_EFFECT)
