"""Every mistake in a run file or a flag is one sentence that names the key, the value and the way out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import from_tree, read_tree
from meshwright.spec.presets import PRESETS
from meshwright.spec.rules import ranks_match
from meshwright.spec.toml import to_toml


def sentence(tree: dict | None = None, *flags: tuple[str, str]) -> str:
    with pytest.raises(UserError) as caught:
        from_tree(tree or {}, flags, source="run.toml")
    text = str(caught.value)
    assert "\n" not in text
    return text


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
    [("train.stpes", "train.steps"), ("trian.steps", "train.steps"), ("layout.zer", "layout.zero")],
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
    ({"train": {"steps": 5, "tokens": 5}}, ["train.tokens", "train.steps", "'none'"]),
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


TWO = {"replicate": 2}
MOE: dict[str, object] = {"preset": "moe-tiny"}


RULES = [
    ({"model": {"heads": 8, "kv_heads": 3}}, ["model.kv_heads", "3", "8", "try 4"]),
    ({"model": {"heads": 7}}, ["model.heads", "7", "256"]),
    ({"model": {"head_dim": 33}}, ["model.head_dim", "33", "even"]),
    (
        {
            "model": {
                "rope_theta": 1,
                "rope_scaling": {"kind": "yarn", "factor": 2, "original_max_seq_len": 64},
            }
        },
        ["model.rope_theta: 1", "'yarn'", "more than 1"],
    ),
    ({"model": {"position": "learned", "max_seq_len": 64}}, ["data.seq_len", "512", "64"]),
    ({"recovery": {"on_spike": "rollback"}}, ["recovery.on_spike: 'rollback'", "try checkpoint.every = 100"]),
    ({"outer": {"every": 5}}, ["outer.every: 5", "layout.replicate is 1", "2 or more"]),
    ({"outer": {"fragments": 2}}, ["outer.fragments: 2", "outer.every = 0", "outer.every = 50"]),
    ({"layout": TWO, "outer": {"every": 5, "delay": 5}}, ["outer.delay: 5", "outer.every = 5", "at most 4"]),
    ({"layout": TWO, "outer": {"every": 9, "fragments": 5}}, ["outer.fragments: 5", "model.layers = 4"]),
    ({"layout": TWO, "outer": {"every": 5, "island": 1}}, ["outer.island: 1", "outer.quorum"]),
    ({"layout": TWO, "outer": {"every": 5, "quorum": 3}}, ["outer.quorum: 3", "layout.replicate = 2"]),
    (
        {"layout": TWO, "outer": {"every": 5, "quorum": 1, "delay": 1}},
        ["outer.delay: 1", "outer.quorum = 1", "leave outer.quorum out"],
    ),
    ({"layout": TWO, "outer": {"every": 5, "quorum": 1, "island": 2}}, ["outer.island: 2", "at most 1"]),
    (
        {"layout": TWO, "outer": {"every": 5}, "train": {"ema": 0.9}},
        ["train.ema: 0.9", "outer.every = 5", "'none'"],
    ),
    ({"layout": {"ep": 2}}, ["layout.ep: 2", "no experts", "set layout.ep = 1, or give model.moe"]),
    ({"layout": {"etp": 2}}, ["layout.etp: 2", "no experts"]),
    ({"layout": {"expert_parts": 2}}, ["layout.expert_parts: 2", "no effect"]),
    (
        {"model": MOE | {"moe": {"every": 99}}},
        ["model.moe.every", "none of model.layers = 4", "every = 3 or"],
    ),
    ({"model": MOE, "layout": {"dp": 3, "ep": 3}}, ["layout.ep: 3", "model.moe.experts = 8", "try 1"]),
    (
        {"model": MOE, "layout": {"dp": 2, "ep": 8}},
        ["layout.ep: 8", "dp 2 x cp 1 x tp 1 = 2 ranks", "try layout.ep = 2"],
    ),
    ({"model": MOE, "layout": {"tp": 2, "etp": 5}}, ["layout.etp: 5", "model.moe.ffn = 128", "try 2"]),
    ({"model": MOE, "layout": {"dp": 2, "etp": 4}}, ["layout.etp: 4", "2 ranks", "layout.etp = 2"]),
    ({"model": MOE | {"moe": {"top_k": 9}}}, ["model.moe.top_k: 9", "model.moe.experts = 8", "at most 8"]),
    ({"model": MOE | {"moe": {"groups": 3}}}, ["model.moe.groups: 3", "model.moe.experts = 8", "try 4"]),
    ({"model": MOE | {"moe": {"groups": 4, "top_groups": 5}}}, ["model.moe.top_groups: 5", "at most 4"]),
    (
        {"model": MOE | {"moe": {"groups": 4, "top_k": 3}}},
        ["model.moe.top_k: 3", "the 2 experts", "at most 2, or top_groups = 2"],
    ),
    (
        {"model": MOE | {"moe": {"dense_first": 4}}},
        ["model.moe.dense_first", "none of model.layers = 4", "dense_first = 3 or less"],
    ),
    ({"model": MOE | {"activation": "gelu"}}, ['model.activation: "gelu"', "model.moe", 'give "swiglu"']),
    (
        {"model": MOE | {"moe": {"shared_ffn": 9}}, "layout": {"tp": 2}},
        ["layout.tp: 2", "model.moe.shared_ffn = 9", "try 1"],
    ),
    (
        {"layout": {"pp": 2, "schedule": "zb-h1"}, "train": {"compile": True}},
        ["train.compile: true", "'zb-h1'", "try layout.schedule = '1f1b'"],
    ),
    ({"layout": {"pp": 7}}, ["layout.pp = 7 x 1", "7 stages", "model.layers = 4", "try layout.pp = 6"]),
    (
        {"layout": {"pp": 2, "virtual": 2}},
        ["layout.virtual", "2", "'zb-h1'", "layout.virtual = 1", "interleaved, bfs, zb-v"],
    ),
    (
        {"layout": {"pp": 2, "schedule": "v-min", "virtual": 3}},
        ["layout.virtual", "3", "'v-min'", "layout.virtual = 2", "interleaved, bfs"],
    ),
    (
        {"layout": {"stages": [1, 3]}},
        ["layout.stages: [1, 3]", "layout.pp = 1 x 1", "give layout.pp"],
    ),
    (
        {"layout": {"pp": 2, "schedule": "interleaved", "virtual": 4}},
        ["layout.virtual", "8 stages", "model.layers = 4", "try layout.virtual = 3"],
    ),
    (
        {"layout": {"pp": 2, "stages": [4]}},
        ["layout.stages", "[4]", "1 stages", "layout.pp = 2 x 1 stages a rank", "try 2,2"],
    ),
    (
        {"layout": {"pp": 2, "stages": [2, 1]}},
        ["layout.stages", "[2, 1]", "3 blocks", "model.layers = 4", "try 2,2"],
    ),
    ({"layout": {"tp": 3}}, ["layout.tp", "3", "model.heads = 8", "try 4"]),
    (
        {"train": {"lr_factors": {"blocks.*.atn.q.weight": 0.5}}},
        ["train.lr_factors.blocks.*.atn.q.weight: matches no parameter", "the nearest are", ".attn.q.weight"],
    ),
    (
        {"train": {"weight_decays": {"*.attn.?.weight": 1, "*.attn.q.*": 0, "blocks.0.attn*": 2}}},
        ["train.weight_decays.blocks.0.attn*: 2 and 1 of '*.attn.?.weight'", "both match blocks.0.attn.q"],
    ),
    (
        {"model": {"mup_base_hidden": 64, "tied": True}},
        ["model.mup_base_hidden: 64", "model.tied", "give model.tied = false"],
    ),
    (
        {
            "model": {
                "mup_base_hidden": 64,
                "kv_heads": 8,
                "mla": {"q_rank": 16, "kv_rank": 8, "rope_dim": 4, "v_dim": 8},
            }
        },
        ["model.mup_base_hidden: 64", "model.mla", "ranks of latents"],
    ),
    ({"layout": {"tp": 2}, "model": {"ffn": 689}}, ["layout.tp", "2", "model.ffn = 689", "try 1"]),
    (
        {"layout": {"tp": 6}, "model": {"heads": 12, "kv_heads": 4, "hidden": 96, "ffn": 96}},
        ["layout.tp", "6", "model.kv_heads = 4", "try 4"],
    ),
    ({"layout": {"tp": 4}, "model": {"vocab_size": 9}}, ["layout.tp", "4", "model.vocab_size = 9", "try 2"]),
    ({"layout": {"cp": 3}}, ["data.seq_len", "512", "2 x layout.cp = 6", "try layout.cp = 4", "510"]),
    (
        {"layout": {"tp": 4}, "data": {"seq_len": 510}, "train": {"batch_tokens": 5100}},
        ["data.seq_len", "510", "layout.tp = 4", "try 512", "sequence_parallel"],
    ),
    (
        {"layout": {"cp": 8, "context_mode": "ulysses"}},
        ["layout.context_mode", "'ulysses'", "4 key-value heads", "layout.cp = 8", "try cp = 4"],
    ),
    ({"layout": {"replicate": 2}}, ["layout.replicate", "layout.zero", "layout.dp = 2"]),
    ({"layout": {"dp": 3}}, ["train.batch_tokens", "8192", "512", "3", "try 7680"]),
    ({"layout": {"micro_batch": 3}}, ["layout.micro_batch", "3", "16", "try 4"]),
    ({"train": {"steps": 5, "stop_at": 6}}, ["train.stop_at", "6", "5"]),
    ({"train": {"steps": 5, "warmup_steps": 6}}, ["train.warmup_steps", "6", "5"]),
    (
        {"train": {"schedule": "wsd", "steps": 6, "warmup_steps": 5, "decay_fraction": 1}},
        ["train.decay_fraction", "decay of 6", "warm-up of 5", "try 0.166"],
    ),
    ({"train": {"schedule": "linear", "decay": "1-sqrt"}}, ["train.decay:", "no effect", "'linear'"]),
    ({"train": {"schedule": "linear", "decay_fraction": 0.5}}, ["train.decay_fraction", "no effect"]),
    ({"train": {"schedule": "constant", "min_lr_ratio": 0.5}}, ["train.min_lr_ratio", "'constant'"]),
    (
        {"train": {"offload_dir": "/scratch"}},
        ["train.offload_dir", "no effect", "'none'", "or give none, the default"],
    ),
    (
        {
            "model": {"preset": "moe-tiny", "layers": 2, "moe": {"experts": 4, "top_k": 2, "ffn": 48}},
            "layout": {"dp": 16, "etp": 16},
            "train": {"optimiser": "adamw8bit"},
        },
        ["layout.etp: 16 slices", "48 channels", "6 channels each", "try layout.etp = 8", "'adamw8bit'"],
    ),
    (
        {"train": {"optimiser": "adamw8bit", "offload": "disk"}},
        ["train.offload", "'disk'", "'adamw8bit'", "in 8 bits", "'adamw'"],
    ),
    (
        {"train": {"lr_base_batch_tokens": 99}},
        ["train.lr_base_batch_tokens", "no effect", "lr_scaling", "8192"],
    ),
    ({"train": {"lr_factors": {"embed.*": "0"}}}, ["train.lr_factors.embed.*", '"0"', "valid number"]),
    ({"train": {"weight_decays": {"embed.*": True}}}, ["train.weight_decays.embed.*", "true", "number"]),
    ({"train": {"offload": "disk", "offload_dir": ""}}, ["train.offload_dir", '""', "at least 1"]),
    (
        {"precision": {"compute": "mxfp8", "amax_history": 8}},
        ["precision.amax_history: 8", "no effect", "'mxfp8'", "fp8 or nvfp4"],
    ),
    (
        {"precision": {"compute": "bf16", "loss_scale": 8.0}},
        ["precision.loss_scale: 8.0", "no effect", "'bf16'", "give fp16"],
    ),
    ({"precision": {"compute": "fp8", "amax_history": 10**30}}, ["amax_history: 1000000", "1024"]),
    ({"train": {"lr_factors": {"embed": {"weight": 0.5}}}}, ["lr_factors.embed:", '"embed.weight" = 0.5']),
    ({"train": {"optimiser": "lion", "eps": 1e-3}}, ["train.eps", "no effect", "'lion'", "1e-08"]),
]


@pytest.mark.parametrize(("tree", "parts"), RULES, ids=[parts[0] for _, parts in RULES])
def test_rule_names_axes_and_values_and_what_would_work(tree: dict, parts: list[str]) -> None:
    text = sentence(tree)
    for part in parts:
        assert part in text


def test_what_a_rule_proposes_is_accepted() -> None:
    assert from_tree({"model": {"kv_heads": 4}}).model.kv_heads == 4
    assert from_tree({"layout": {"dp": 3}, "train": {"batch_tokens": 7680}}).rank_sequences == 5
    assert from_tree({"layout": {"micro_batch": 4}}).microbatches == 4
    assert from_tree({"layout": {"pp": 6}}).layout.world_size == 6
    assert from_tree({"layout": {"pp": 2}}, [("layout.stages", "2,2")]).layout.stages == (2, 2)
    assert from_tree({"layout": {"pp": 2, "virtual": 2, "schedule": "zb-v"}}).layout.chunks == 2
    assert from_tree({"layout": {"tp": 4}}).layout.world_size == 4
    assert from_tree({"layout": {"cp": 2, "context_mode": "ulysses"}}).layout.world_size == 2


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
