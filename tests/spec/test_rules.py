"""Rules between the keys of a spec: what goes together, and the sentence where it does not."""

from __future__ import annotations

import pytest
from refusals import sentence

from meshwright.spec.load import from_tree

TWO = {"replicate": 2}
MOE: dict[str, object] = {"preset": "moe-tiny"}
LONG_ROPE: dict[str, dict[str, object]] = {
    "rope_scaling": {
        "kind": "longrope",
        "factor": 2,
        "original_max_seq_len": 64,
        "short_factors": [1, 1],
        "long_factors": [1, 2, 3, 4],
    }
}
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
    (
        {"model": {"attention_softcap": 50}, "train": {"attention_backend": "FA3"}},
        ["train.attention_backend: 'FA3'", "model.attention_softcap = 50", "leave it out"],
    ),
    (
        {"model": LONG_ROPE | {"head_dim": 8}},
        ["model.rope_scaling.short_factors: 2 factors", "4 pairs", "give 4"],
    ),
    (
        {"model": {"rope_scaling": LONG_ROPE["rope_scaling"] | {"original_max_seq_len": 1}}},
        ["model.rope_scaling.original_max_seq_len: 1", "longrope"],
    ),
    ({"model": {"position": "learned", "max_seq_len": 64}}, ["data.seq_len", "512", "64"]),
    (
        {"recovery": {"on_spike": "rollback"}, "checkpoint": {"every": 0}},
        ["recovery.on_spike: 'rollback'", "try checkpoint.every = 100"],
    ),
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
    ({"layout": {"expert_buffer_factor": 1.5}}, ["layout.expert_buffer_factor: 1.5", "no experts", "'none'"]),
    (
        {"model": MOE, "layout": TWO | {"expert_buffer_factor": 2}, "outer": {"staleness": 1}},
        ["layout.expert_buffer_factor: 2", "outer.staleness = 1", "as none"],
    ),
    (
        {"model": MOE | {"moe": {"every": 99}}},
        ["model.moe.every", "none of model.layers = 4", "every = 3 or"],
    ),
    ({"model": MOE, "layout": {"dp": 3, "ep": 3}}, ["layout.ep: 3", "model.moe.experts = 8", "try 1"]),
    (
        {"model": MOE, "layout": {"dp": 2, "ep": 8}},
        ["layout.ep: 8", "dp 2 x cp 1 x tp 1 = 2 ranks", "set layout.dp = 8", "try layout.ep = 2"],
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
    (
        {"model": MOE | {"moe": {"shared_gate": True, "shared_ffn": 0}}},
        ["model.moe.shared_gate: true", "model.moe.shared_ffn is 0", "shared_gate = false"],
    ),
    (
        {
            "model": MOE | {"hidden": 31, "head_dim": 4, "moe": {"expert_bias": True}},
            "layout": {"dp": 2, "etp": 2},
        },
        ["layout.etp: 2", "model.hidden = 31"],
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
