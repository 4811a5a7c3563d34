"""Plans that cannot be: each mistake is one sentence that says what would do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshwright import api
from meshwright.hardware.find import cluster
from meshwright.planner.plan import estimate
from meshwright.spec import RunSpec, UserError

WISH: dict[str, Any] = {"gpus": 8, "seq_len": 4096, "batch_tokens": "256k"}


def test_what_cannot_fit_says_what_is_short_and_what_would_do() -> None:
    wish: dict[str, Any] = {"seq_len": 8192, "batch_tokens": "1M", "max_stages": 1}
    with pytest.raises(UserError) as error:
        api.plan("llama3-70b", "h100", gpus=8, **wish)
    text = str(error.value)
    assert text.startswith(
        "llama3-70b: nothing fits 8 x H100 SXM 80 GB: of 85.52 GB a plan may fill 77.68 GB"
    )
    assert "states" in text and "activations" in text
    count = int(text.partition("power of two of nodes that does is ")[2].split()[0])
    assert count > 8
    found = api.plan("llama3-70b", "h100", gpus=count, top=1, **wish)
    assert found.best.memory.device <= found.capacity == pytest.approx(77.676e9, rel=1e-4)


def test_what_cannot_fit_names_other_ways_of_training() -> None:
    """Moments on the host where that does, and `fit` for this program on GPUs of one node."""
    wish: dict[str, Any] = {"gpus": 4, "seq_len": 2048, "batch_tokens": "1M"}
    with pytest.raises(UserError) as error:
        api.plan("llama3-8b", "rtx-4090", **wish)
    assert "it fits with --train.offload host" in str(error.value)
    assert "`meshwright fit llama3-8b --gpu rtx-4090 --count 4`" in str(error.value)
    offloaded = api.plan("llama3-8b", "rtx-4090", overrides=[("train.offload", "host")], top=1, **wish)
    assert offloaded.best.memory.device <= offloaded.capacity
    with pytest.raises(UserError, match="nothing fits") as error:
        api.plan("llama3-8b", "tpu-v5e", gpus=4, seq_len=4096, batch_tokens="256k")
    assert "meshwright fit" not in str(error.value)
    refused: list[dict[str, Any]] = [{"model": "gemma3-27b"}, {"model": "llama3-70b", "stack": "megatron-lm"}]
    for other in refused:
        with pytest.raises(UserError) as error:
            api.plan(cluster="rtx-4090", **wish, **other)
        assert "train.offload" not in str(error.value)
        assert ("meshwright fit" in str(error.value)) == ("stack" not in other)


@pytest.mark.parametrize(
    ("model", "where", "wish", "says"),
    [
        ("llama3-8", "h100", {}, "did you mean 'llama3-8b'"),
        (
            "llama3-8b",
            "v100",
            {"overrides": [("precision.compute", "bf16")]},
            "'bf16' needs bf16, and V100 SXM 32 GB computes in fp16, fp64, fp32; give fp16",
        ),
        (
            "llama3-8b",
            "v100",
            {"overrides": [("precision.compute", "bf16")], "stack": "megatron-lm"},
            "'bf16' needs bf16, and V100",
        ),
        (
            "llama3-8b",
            "tpu-v5p",
            {"overrides": [("precision.compute", "fp8")], "stack": "maxtext"},
            "'fp8' has no kernels on .*; try bf16",
        ),
        (
            "llama3-8b",
            "h100",
            {"gpus": 100_000_000},
            "--gpus: 100,000,000 is more than the 1,048,576 devices",
        ),
        ("llama3-8b", "h10", {}, "did you mean 'h100'"),
        ("llama3-8b", "h100", {"gpus": 20}, "20 devices are not a multiple of the 8 .* try 16 or 24"),
        (
            "llama3-8b",
            "gb200-nvl72",
            {"gpus": 100},
            "100 devices are not a multiple of the 72 .* try 72 or 112",
        ),
        ("llama3-8b", "h100", {"gpus": "64..8"}, "--gpus: '64..8' is not valid"),
        ("llama3-8b", "h100", {"gpus": "9..15"}, "no power-of-two number of nodes"),
        ("llama3-8b", "cpu", {"gpus": None}, "--gpus: is missing"),
        ("llama3-8b", "h100", {"batch_tokens": None}, "--batch-tokens: is missing"),
        ("llama3-8b", "h100", {"batch_tokens": "1k"}, "less than one sequence of 4,096 tokens"),
        ("llama3-8b", "h100", {"batch_tokens": "many"}, "--batch-tokens: 'many' is not valid"),
        ("llama3-8b", "h100", {"seq_len": 0}, "--seq-len: must be at least 1 token, got 0"),
        ("gpt3-175b", "h100", {}, "positions of model.max_seq_len = 2048"),
        (
            "llama3-8b",
            "h100",
            {"stack": "megatron-4"},
            "there is no stack 'megatron-4'; did you mean 'megatron",
        ),
        ("llama3-8b", "h100", {"objective": "speed"}, "is not one of time, cost, longest-context, largest-"),
        ("llama3-8b", "h100", {"max_stages": 0}, "--max-stages: must be at least 1, got 0"),
        ("llama3-8b", "h100", {"top": 0}, "--top: must be from 1 to 20 layouts, got 0"),
        ("llama3-8b", "h100", {"tokens": "x"}, "--tokens: 'x' is not valid"),
        ("llama3-8b", "h100", {"tokens": 0.0}, "--tokens: '0.0' is not valid: a number of at least 1"),
        ("llama3-8b", "h100", {"tokens": -1e12}, "--tokens: '-1000000000000.0' is not valid"),
        ("llama3-8b", "h100", {"batch_tokens": "0"}, "--batch-tokens: '0' is not valid"),
        ("llama3-8b", "h100-96", {"objective": "cost"}, "give --price USD"),
        ("llama3-8b", "h100", {"overrides": [("layout.tp", "3")]}, "3 does not divide model.heads"),
        ("llama3-8b", "h100", {"overrides": [("layout.tp", "x")]}, '--layout.tp: "x" is not valid'),
        ("llama3-8b", "h100", {"overrides": [("layout.dp", "3")]}, "no layout of 8 ranks|not a multiple"),
        ("llama3-8b", "h100", {"overrides": [("layout.tpp", "2")]}, "--layout.tpp: unknown key"),
        ("llama3-8b", "h100", {"batch_tokens": 3 * 4096, "gpus": 8 * 37}, "no layout shares 3 sequences"),
        (
            "llama3-8b",
            "h100",
            {"batch_tokens": 3 * 4096, "gpus": 8 * 37},
            "try --gpus 256 or 512, or --batch-tokens 151552, which are 37 sequences",
        ),
        ("llama3-405b", "h100", {"batch_tokens": "16M", "gpus": 10**6}, "try --gpus 524288 or 1048576"),
        ("llama3-8b", "h100", {"top": 50}, "--top: must be from 1 to 20 layouts, got 50"),
        *[
            ("llama3-8b", "h100", {"overrides": given, **more}, says)
            for given, more, says in [
                ([("data.seq_len", "2048")], {}, "--seq-len: 4096 is given .* --data.seq_len 2048; give one"),
                ([("train.batch_tokens", "8192")], {}, "--batch-tokens: 256k .* --train.batch_tokens 8192;"),
                ([("train.tokens", "9")], {"tokens": "2T"}, "--tokens: 2T is given .* --train.tokens 9;"),
                ([("train.steps", "9")], {"tokens": "2T"}, "--tokens: 2T is given .* --train.steps 9;"),
                (
                    [("model.preset", "tiny")],
                    {},
                    "MODEL: llama3-8b is given .* --model.preset tiny; give one",
                ),
                (
                    [("data.seq_len", "2048")],
                    {"seq_len": None, "objective": "longest-context"},
                    "--seq-len: 2,048 is given, but the objective",
                ),
                (
                    [("layout.schedule", "zb-v")],
                    {"max_stages": 1},
                    "layout.schedule: zb-v has no effect, .* with --max-stages = 1; leave one of them out",
                ),
                ([("layout.virtual", "3")], {"gpus": 1}, "layout.virtual: 3 has no effect, .*; leave it out"),
                ([("layout.tp", "32")], {}, "without layout.tp there are some, and with layout.tp = 8"),
            ]
        ],
    ],
)
def test_a_mistake_is_one_sentence(model: str, where: str, wish: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        api.plan(model, where, **{**WISH, **wish})
    assert "\n" not in str(error.value)


def test_an_estimate_is_of_a_format_that_the_device_has() -> None:
    spec = RunSpec.model_validate({"precision": {"compute": "bf16"}})
    with pytest.raises(UserError, match=r"precision\.compute: 'bf16' needs bf16, and V100 SXM 16 GB"):
        estimate(spec, cluster("v100-16", 1))


def test_an_estimate_is_of_as_many_devices_as_ranks() -> None:
    with pytest.raises(UserError, match="is 1 rank, but h100-sxm has 8 devices"):
        estimate(RunSpec(), cluster("h100", 8))


def test_a_length_beside_the_longest_is_refused() -> None:
    with pytest.raises(UserError, match="--seq-len: 4,096 is given, but the objective 'longest-context'"):
        api.plan("llama3-8b", "h100", objective="longest-context", **WISH)


def test_layers_beyond_any_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.layers"):
        api.plan("llama3-8b", "h100", overrides=[("model.layers", "3000000")], **WISH)


@pytest.mark.full  # the tests above have what it says
def test_a_very_deep_model_that_fits_nothing_is_answered_soon() -> None:
    begin = time.process_time()
    with pytest.raises(UserError, match="nothing fits 1 x H100") as error:
        deep: dict[str, Any] = {"gpus": 1, "seq_len": 1024, "batch_tokens": "64k", "max_memory": 1e9}
        api.plan("llama3-8b", "h100", overrides=[("model.layers", "6000")], **deep)
    assert "\n" not in str(error.value)
    assert time.process_time() - begin < 60
