"""Files of other trainers are told as such, with what their keys are in a run file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.spec import UserError
from meshwright.spec.foreign_run_files import COUNTERPARTS, PROGRAMS, check_run_file
from meshwright.spec.load import load, read_tree
from meshwright.spec.schema import known_keys

TORCHTITAN = """[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
"""
DEEPSPEED = {
    "train_batch_size": 32,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
MEGATRON = {"num-layers": 32, "tensor-model-parallel-size": 8, "seq-length": 4096, "lr": 3e-4}
TRAINER = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 2e-5, "save_steps": 500}
NANOTRON = "general:\n  seed: 42\nparallelism:\n  dp: 2\n  tp: 4\ntokens:\n  sequence_length: 256\n"
LITGPT = "model_name: pythia-160m\nout_dir: out\ntrain:\n  global_batch_size: 512\n  max_seq_length: 2048\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"

FILES = [
    ("c.toml", TORCHTITAN, "is TOML", "torchtitan", ["optimizer.lr is train.lr", "training.seq_len is data"]),
    ("d.json", json.dumps(DEEPSPEED), "is JSON", "DeepSpeed", ["zero_optimization.stage is layout.zero"]),
    ("e.json", json.dumps(MEGATRON), "is JSON", "Megatron-LM", ["lr is train.lr", "num_layers is model.lay"]),
    ("f.json", json.dumps(TRAINER), "is JSON", "TrainingArguments", ["save_steps is checkpoint.every"]),
    ("g.yaml", NANOTRON, "is YAML", "nanotron", ["parallelism.tp is layout.tp"]),
    ("h", LITGPT, "is YAML", "litgpt", ["train.global_batch_size is train.batch_tokens"]),
    ("i.yaml", ACCELERATE, "is YAML", "accelerate", ["a run file is TOML"]),
    ("j.yaml", "name: x\n", "is YAML", "a run file is TOML", ["meshwright train --help all"]),
    ("k.yaml", "- : [", "is YAML", "a run file is TOML", []),
]


@pytest.mark.parametrize(("name", "text", "kind", "program", "parts"), FILES, ids=[each[0] for each in FILES])
@pytest.mark.parametrize("verb", ["train", "plan", "spec check"])
def test_a_file_of_another_program_is_told(
    verb: str, name: str, text: str, kind: str, program: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refusal:
        main([*verb.split(), str(tmp_path / name)])
    sentence = str(refusal.value)
    assert sentence.startswith(f"{tmp_path / name}: {kind}") and refusal.value.code == 2
    assert "\n" not in sentence and all(part in sentence for part in (program, *parts)), sentence


def test_from_python_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(NANOTRON)
    with pytest.raises(UserError, match="looks like a file of nanotron"):
        load(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", "[train]\nsteps = 3\n"),
        ("run.toml", "[precision]\ncompute = 'bf16'\n[train]\nglobal_batch_size = 3\n"),
        ("run.toml", "not toml = ["),
        ("run.toml", ""),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 9}'),
        ("run.json", '{"spec": {"train": {"steps": 3}}}'),
        ("run.json", "[1]"),
    ],
)
def test_other_files_are_not_refused_here(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    check_run_file(tmp_path / name)
    check_run_file(tmp_path)
    check_run_file(tmp_path / "gone")


def test_a_toml_file_with_a_mistake_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlr 3 = 4\n")
    with pytest.raises(UserError, match=r"cannot be read .*line 2"):
        read_tree(tmp_path / "run.toml")


def test_keys_named_exist_and_mean_one_thing() -> None:
    assert COUNTERPARTS.keys() <= known_keys().keys()
    theirs = [name for names in COUNTERPARTS.values() for name in names]
    assert len(theirs) == len(set(theirs))
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
