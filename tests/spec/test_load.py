"""Run files and flags: what they give, and one sentence for a mistake, with key, value and the way out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from refusals import sentence

from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import from_tree, read_tree
from meshwright.spec.presets import PRESETS
from meshwright.spec.rules import ranks_match
from meshwright.spec.toml import to_toml

UNKNOWN = [
    ({"train": {"stpes": 3}}, "run.toml: train.stpes: unknown key; did you mean 'train.steps'?"),
    ({"trian": {"steps": 3}}, "run.toml: trian: unknown key; did you mean 'train'?"),
    ({"layout": {"steps": 3}}, "run.toml: layout.steps: unknown key; did you mean 'train.steps'?"),
    ({"steps": 3}, "run.toml: steps: unknown key; did you mean 'train.steps'?"),
    ({"model": {"qqqq": 1}}, "run.toml: model.qqqq: unknown key; the keys of [model] are preset, hf,"),
]


@pytest.mark.parametrize(("tree", "start"), UNKNOWN)
def test_unknown_key_in_the_file_names_the_nearest(tree: dict, start: str) -> None:
    assert sentence(tree).startswith(start)


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("train.stpes", "train.steps"),
        ("trian.steps", "train.steps"),
        ("layout.zer", "layout.zero"),
        ("model.num_layers", "model.layers"),
        ("model.num_hidden_layers", "model.layers"),
        ("model.hidden_size", "model.hidden"),
        ("model.intermediate_size", "model.ffn"),
        ("model.num_attention_heads", "model.heads"),
        ("model.num_key_value_heads", "model.kv_heads"),
        ("model.tie_word_embeddings", "model.tied"),
        ("learning_rate", "train.lr"),
        ("train.max_steps", "train.steps"),
        ("layout.tensor_model_parallel_size", "layout.tp"),
    ],
)
def test_unknown_key_on_the_command_line_names_the_nearest(flag: str, near: str) -> None:
    assert sentence({}, (flag, "1")) == f"--{flag}: unknown key; did you mean '{near}'?"


WRONG = [
    ({"checkpoint": {"every": "fast"}}, ['checkpoint.every: "fast"', "an integer >= 0, or 'auto'"]),
    ({"recovery": {"snapshot_every": -3}}, ["recovery.snapshot_every: -3", "an integer >= 0, or 'auto'"]),
    ({"model": 5}, ["model", "table", "5"]),
    ({"recompute": 3}, ["recompute", "table", "3"]),
    ({"recompute": {"policy": "ful"}}, ["recompute.policy", '"ful"', "did you mean 'full'"]),
    ({"recompute": {"policy": "full", "save": ["matmul"]}}, ["recompute.save", "'full'"]),
    ({"recompute": {"policy": "selective", "save": ["norm"]}}, ["recompute.save", '"norm"', "'attention'"]),
    (
        {"model": {"rope_scaling": {"kind": "lin"}}},
        ["model.rope_scaling.kind", '"lin"', "'llama3'"],
    ),
    ({"model": {"rope_scaling": {"kind": "linear", "factor": -1}}}, ["model.rope_scaling.factor: -1"]),
    ({"model": {"rope_scaling": {"factor": 2}}}, ["model.rope_scaling", "needs", "kind"]),
    ({"model": {"preset": "smal"}}, ["model.preset", "'smal'", "did you mean 'small'"]),
    ({"model": {"preset": ["tiny"]}}, ["model.preset", "text"]),
    ({"model": {"hf": 5}}, ["model.hf", "5", "text"]),
    ({"model": {"hf": "/no/such/folder"}}, ["model.hf", "/no/such/folder"]),
    ({"model": {"preset": "none"}}, ["model.layers", "missing", "preset"]),
    ({"model": {"layers": "ten"}}, ["run.toml: model.layers", '"ten"', "integer"]),
    ({"model": {"heads": 3.5}}, ["model.heads", "3.5", "integer"]),
    ({"train": {"lr": 0}}, ["train.lr", "0", "greater than 0"]),
    ({"train": {"lr": float("inf")}}, ["train.lr", "finite"]),
    ({"train": {"seed": True}}, ["train.seed", "true", "integer"]),
    ({"train": {"schedule": "cosin"}}, ["train.schedule", "did you mean 'cosine'"]),
    ({"train": {"trackers": ["wanbd"]}}, ["run.toml: train.trackers", '"wanbd"']),
    ({"layout": {"zero": 5}}, ["layout.zero", "5", "0, 1, 2 or 3"]),
    ({"data": {"mixture": {"stdlib": -1}}}, ["data.mixture.stdlib", "-1", "greater than 0"]),
    ({"data": {"corpus": 7}}, ["data.corpus", "7", "text"]),
    ({"train": {"steps": 5, "tokens": 5}}, ["train.tokens", "train.steps", "give one of them"]),
    ({"layout": {"schedule": "1f1"}}, ["layout.schedule", '"1f1"', "'gpipe'", "did you mean '1f1b'"]),
    ({"layout": {"stages": "evn"}}, ['run.toml: layout.stages: "evn"', "'even', 'balanced'", "[3, 5]"]),
    ({"layout": {"stages": [1, -1]}}, ["run.toml: layout.stages: [1, -1]", "'even', 'balanced'"]),
    ({"layout": {"stages": 4}}, ["layout.stages: 4", "list"]),
    ({"layout": {"dp": "2"}}, ["run.toml: layout.dp", '"2"', "integer"]),
    ({"train": {"lr": "1e-3"}}, ["train.lr", '"1e-3"', "number"]),
    ({"train": {"compile": 1}}, ["train.compile", "1", "true or false"]),
    ({"data": {"cache": ""}}, ["data.cache", '""']),
    ({"checkpoint": {"dir": ""}}, ["checkpoint.dir", '""']),
    ({"model": {"hf": ""}}, ["model.hf", "folder"]),
    ({"model": {"preset": "tiny", "hf": "x"}}, ["model.preset", "model.hf = 'x'", "one of them"]),
    ({"data": {"corpus": "a", "mixture": {"b": 1}}}, ["data.mixture", "b", "data.corpus = 'a'"]),
]


@pytest.mark.parametrize(("tree", "parts"), WRONG, ids=[json.dumps(tree) for tree, _ in WRONG])
def test_wrong_value_says_key_value_and_reason(tree: dict, parts: list[str]) -> None:
    text = sentence(tree)
    for part in parts:
        assert part in text


def test_none_empties_lists_and_tables_with_the_users_keys() -> None:
    train = {"lr_factors": {"*": 0.5}, "trackers": ["wandb"], "batch_warmup": [[4096, 10000]]}
    spec = from_tree({"train": train}, [(f"train.{key}", "none") for key in train])
    assert (spec.train.lr_factors, spec.train.trackers, spec.train.batch_warmup) == ({}, (), ())


def test_a_sentence_says_whether_the_flag_or_the_file_was_wrong() -> None:
    tree = {"train": {"lr": -2.0}}
    assert sentence(tree).startswith("run.toml: train.lr: -2.0 ")
    assert sentence(tree, ("train.lr", "-1")).startswith("--train.lr: -1 ")
    assert sentence({}, ("layout.dp", "3")).startswith("train.batch_tokens: ")  # in neither: a default


def test_ranks_that_are_not_the_layouts_name_every_axis() -> None:
    with pytest.raises(UserError) as caught:
        ranks_match(from_tree({"layout": {"dp": 3}, "train": {"batch_tokens": 7680}}), 4)
    for part in (
        "replicate=1",
        "dp=3",
        "cp=1",
        "tp=1",
        "pp=1",
        "3 ranks",
        "4 were",
        "--nproc 3",
        "--layout.dp 5 with --nproc 5",  # 30 sequences are not shared among 4
    ):
        assert part in str(caught.value)


def test_a_flag_wins_over_the_file_and_keeps_its_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 1e-3\nsteps = 7\n[model]\npreset = 'small'\n")
    spec = load(file, [("train.lr", "5e-4"), ("model.layers", "2")])
    assert (spec.train.lr, spec.train.steps, spec.model.layers) == (5e-4, 7, 2)
    assert spec.model.hidden == PRESETS["small"]["hidden"]


def test_a_flag_for_a_model_takes_the_place_of_the_files(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 300}
    config = {"model_type": "llama", **shape, "num_attention_heads": 4}
    folder, file = tmp_path / "hf", tmp_path / "run.toml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    file.write_text("[model]\npreset = 'small'\nlayers = 5\n")
    model = load(file, [("model.hf", str(folder))]).model
    assert (model.preset, model.layers, model.hidden) == (None, 5, 32)
    file.write_text(f"[model]\nhf = '{folder}'\n")
    model = load(file, [("model.preset", "small")]).model
    assert (model.hf, model.hidden) == (None, PRESETS["small"]["hidden"])


def test_the_last_of_two_flags_wins() -> None:
    assert from_tree({}, [("train.lr", "1.0"), ("train.lr", "2.0")]).train.lr == 2.0


@pytest.mark.parametrize("key", ["train.clip", "layout.micro_batch", "data.cache", "model.rope_scaling"])
def test_none_is_no_value_in_flags_and_files(key: str) -> None:
    part, name = key.split(".")
    assert getattr(getattr(from_tree({}, [(key, "none")]), part), name) is None
    assert getattr(getattr(from_tree({part: {name: "none"}}), part), name) is None


def test_none_stays_a_choice_where_it_is_one() -> None:
    assert from_tree({}, [("train.lr_scaling", "none")]).train.lr_scaling == "none"
    assert from_tree({"recompute": {"policy": "none"}}).recompute.policy == "none"


def test_a_flag_for_another_policy_drops_what_the_file_saves() -> None:
    tree = {"recompute": {"save": ["attention"]}}
    assert from_tree(tree, [("recompute.policy", "full")]).recompute.policy == "full"
    kept = from_tree(tree, [("recompute.policy", "selective")]).recompute
    assert kept.model_dump() == {"policy": "selective", "save": ("attention",)}
    assert "recompute.save" in sentence({}, ("recompute.policy", "full"), ("recompute.save", "attention"))


def test_flags_are_read_by_the_type_of_their_key() -> None:
    spec = from_tree(
        {},
        [
            ("data.corpus", "123"),
            ("train.trackers", "wandb,tensorboard"),
            ("train.compile", "true"),
            ("train.batch_tokens", "16_384"),
            ("recompute.save", "attention"),
        ],
    )
    assert spec.data.corpus == "123"
    assert spec.train.trackers == ("wandb", "tensorboard")
    assert spec.train.compile is True
    assert spec.train.batch_tokens == 16384
    assert from_tree({}, [("data.mixture.stdlib", "0.5")]).data.mixture == {"stdlib": 0.5}
    assert from_tree({}, [("data.mixture.../a.jsonl", "2")]).data.mixture == {"../a.jsonl": 2}
    factors = [("train.lr_factors.embed.*", "0"), ("train.lr_factors.*.nrom?weight", "0.5")]
    with pytest.raises(UserError, match=r"--train\.lr_factors\.\*\.nrom\?weight: matches no"):
        from_tree({}, factors)
    assert from_tree({}, factors[:1]).train.lr_factors == {"embed.*": 0.0}
    filled = {"train": {"lr_factors": {"embed.*": 2, "head.*": 3}}}
    assert from_tree(filled, [("train.lr_factors.embed.*", "none")]).train.lr_factors == {"head.*": 3}
    assert from_tree({"train": {"tokens": 1e9}}).train.tokens == 10**9
    assert spec.recompute.policy == "selective"


def test_a_flag_cannot_smuggle_in_a_second_key() -> None:
    assert "train.steps" in sentence({}, ("train.steps", "5\nlr = 3"))


def test_a_corpus_in_the_place_of_a_run_file_is_told(tmp_path: Path) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"messages": []}\n')
    with pytest.raises(UserError, match=r"jsonl: cannot be read .*given as --data\.corpus .*jsonl"):
        load(rows)


def test_files_that_cannot_be_read_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train\n")
    (tmp_path / "latin.toml").write_bytes(b"[train]\nx = '\xff'\n")
    (tmp_path / "run.json").write_text("[]")
    for path, parts in [
        (tmp_path / "run.tml", ["run.tml", "did you mean 'run.toml'"]),
        (tmp_path / "run.toml", ["run.toml", "line 1"]),
        (tmp_path / "latin.toml", ["latin.toml", "cannot be read"]),
        (tmp_path / "run.json", ["run.json", "spec"]),
        (tmp_path, ["run.json", "spec"]),
        (
            tmp_path / "gone" / "run.toml",
            ["there is no run file", "give a TOML file, or the folder of a run"],
        ),
        (tmp_path / "llama3-8b", ["it is the name of a preset: give --model.preset llama3-8b"]),
    ]:
        with pytest.raises(UserError) as caught:
            read_tree(path)
        for part in parts:
            assert part in str(caught.value)


def test_a_runs_folder_gives_its_spec(tmp_path: Path) -> None:
    spec = from_tree({}, [("train.lr", "0.125")])
    (tmp_path / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
    assert load(tmp_path) == spec


SPECS = [
    {},
    {"model": {"preset": "none", "layers": 1, "hidden": 8, "ffn": 8, "heads": 2, "vocab_size": 16}},
    {"model": {"rope_scaling": {"kind": "llama3"}}, "train": {"clip": "none", "trackers": ["wandb"]}},
    {"model": {"rope_scaling": {"kind": "yarn", "factor": 4, "original_max_seq_len": 64, "mscale": 0.5}}},
    {"recompute": {"policy": "selective", "save": ["matmul"]}, "layout": {"dp": 2, "zero": 3}},
    {"data": {"mixture": {'a/b "q".txt': 1.0, "c\\d": 2.5, "é\x7f": 1.0}}},
    {"data": {"corpus": 'tab\t"quote"'}},
    {"layout": {"pp": 2, "stages": [4, 0]}},
    {"layout": {"pp": 2, "stages": "balanced", "schedule": "v-half"}},
    {"train": {"lr": 1e-30, "eps": 1.5e300, "seed": 2**63 - 1}},
]


@pytest.mark.parametrize("tree", [*SPECS, *({"model": {"preset": name}} for name in PRESETS)], ids=str)
def test_toml_and_json_load_back_to_an_equal_spec(tree: dict) -> None:
    if "gpt3" in str(tree):
        tree = {**tree, "data": {"seq_len": 1024}}
    spec = from_tree(tree)
    assert from_tree(tomllib.loads(to_toml(spec))) == spec
    again = RunSpec.model_validate(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.digest() == spec.digest()


def test_a_flag_for_steps_takes_the_place_of_a_files_tokens_and_the_other_way() -> None:
    for mine, other in (("steps", "tokens"), ("tokens", "steps")):
        train = from_tree({"train": {other: 100_000}}, [(f"train.{mine}", "20000")]).train
        assert getattr(train, mine) == 20_000 and getattr(train, other) is None
    assert from_tree({"train": {"tokens": 100_000}}, [("train.steps", "none")]).train.tokens == 100_000
