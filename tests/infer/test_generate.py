"""Generation: the cache changes nothing, and sampling keeps to what it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import processors

from meshwright import api
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.hf import export_hf
from meshwright.infer import generate
from meshwright.infer.sampling import Sampling
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError

SMALL = {
    "preset": None, "layers": 2, "hidden": 48, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "vocab_size": 97, "max_seq_len": 40, "init_std": 0.3,
}  # fmt: skip
SHAPES = {
    "llama": {},
    "qwen": {"qk_norm": True, "tied": True},
    "window": {"sliding_window": 5},
    "windows": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 100.0,
    },
    "latents": {"kv_heads": 4, "mla": {"q_rank": 12, "kv_rank": 8, "rope_dim": 6, "v_dim": 10}},
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "qkv_bias": True},
}
PROMPT = [5, 17, 3, 96, 41, 5, 0]


def make(shape: str = "llama") -> Decoder:
    spec = ModelSpec.model_validate(SMALL | SHAPES[shape])
    return init_whole_(Decoder(spec).double(), seed=1).eval()


def without_cache(decoder: Decoder, prompt: list[int], new: int) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(new):
            tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_recomputing_without_cache(shape: str) -> None:
    decoder = make(shape)
    expected = without_cache(decoder, PROMPT, 30)
    assert len(set(expected)) > 3, "a constant continuation would prove little"
    assert generate(decoder, PROMPT, 30) == expected
    assert generate(decoder, PROMPT[:1], 20) == without_cache(decoder, PROMPT[:1], 20)


def test_rows_of_a_batch_are_independent() -> None:
    decoder = make()
    prompts = [PROMPT, PROMPT[::-1], [9] * 7]
    together = generate(decoder, torch.tensor(prompts), 12)
    assert together.tolist() == [generate(decoder, prompt, 12) for prompt in prompts]


def test_a_row_ends_at_the_stop_token() -> None:
    decoder = make()
    free = generate(decoder, PROMPT, 20)
    stop = free[7]
    expected = free[: free.index(stop)]
    assert generate(decoder, PROMPT, 20, stop_ids=[stop]) == expected
    rows = generate(decoder, torch.tensor([PROMPT, [9] * 7]), 20, stop_ids=[stop]).tolist()
    assert rows[0][: len(expected) + 1] == [*expected, stop]
    assert set(rows[0][len(expected) :]) == {stop}
    assert generate(decoder, PROMPT, 0) == []


def test_sampling_follows_the_seed() -> None:
    decoder = make()
    draws = [generate(decoder, PROMPT, 20, Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_temperature_near_0_takes_the_likeliest_token() -> None:
    decoder = make()
    assert generate(decoder, PROMPT, 12, Sampling(1e-320)) == generate(decoder, PROMPT, 12)


def test_last_bits_of_logits_move_few_draws() -> None:
    """All of 50,000 tokens are about as likely: an order by likelihood would be another one."""
    draw = torch.Generator().manual_seed(0)
    logits = 1e-6 * torch.randn(200, 50_000, generator=draw, dtype=torch.float64)
    changed = logits + 1e-7 * torch.randn(logits.shape, generator=draw, dtype=torch.float64)
    rows = range(200)
    before, after = (Sampling(1.0).choose(each, rows, rows) for each in (logits, changed))
    assert int((before != after).sum()) < 20


def test_sampling_draws_from_the_distribution() -> None:
    """Frequencies of one drawn token over 5,000 rows, within five standard errors."""
    decoder, rows = make(), 5_000
    with torch.no_grad():
        wanted = (decoder(torch.tensor([[5]]))[0, -1] / 0.7).softmax(-1)
    found = generate(decoder, torch.full((rows, 1), 5), 1, Sampling(0.7))
    frequencies = torch.bincount(found[:, 0], minlength=97) / rows
    assert bool(((frequencies - wanted).abs() <= 5 * (wanted / rows).sqrt() + 1e-12).all())


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    decoder, rows = make(), 2_000
    with torch.no_grad():
        likely = decoder(torch.tensor([[5]]))[0, -1].softmax(-1).sort(descending=True)
    prompt = torch.full((rows, 1), 5)

    def drawn(**options: float) -> set[int]:
        return set(generate(decoder, prompt, 1, Sampling(1.0, **options))[:, 0].tolist())

    assert drawn(top_k=3) == set(likely.indices[:3].tolist())
    assert drawn(top_k=1) == drawn(top_p=1e-9) == {int(likely.indices[0])}
    # The fewest tokens whose probabilities reach top_p.
    share = float(likely.values[:4].sum()) - 1e-9
    assert drawn(top_p=share) == set(likely.indices[:4].tolist())
    assert drawn(top_k=200) == drawn()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": []}, "no tokens"),
        ({"tokens": [97]}, "token 97"),
        ({"tokens": [-1]}, "token -1"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 34}, "at most 33"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2}, "top_k 2 has no effect at temperature 0"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_mistakes_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        options = {"tokens": PROMPT, "max_new_tokens": 3} | arguments
        of_prompt = {name: options.pop(name) for name in ("tokens", "max_new_tokens")}
        generate(make("gpt"), **of_prompt, sampling=Sampling(**options))


@pytest.mark.parametrize(
    ("prompt", "how", "sentence"),
    [
        ("a<|new|>", "read", r"token 258 \('<\|new\|>'\), .*; --special-tokens text reads it as characters"),
        ("a[plain]", "read", r"token 259 \('\[plain\]'\), .*; leave it out of the prompt"),
        ("a[plain]", "text", r"token 259 \('\[plain\]'\), .*; leave it out of the prompt"),
        ("a", "read", r"token 257 \('<s>'\), .*; it is put around the prompt: --special-tokens rendered"),
    ],
)
def test_a_token_without_a_row_is_spelled_with_the_way_out(
    tmp_path: Path, prompt: str, how: str, sentence: str
) -> None:
    decoder = init_whole_(Decoder(ModelSpec.model_validate(SMALL | {"vocab_size": 257})), seed=1)
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().json)
    backend.add_special_tokens(["<s>", "<|new|>"])
    backend.add_tokens(["[plain]"])
    if prompt == "a":
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 257)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    export_hf(
        tmp_path / "hf", decoder.spec, decoder.tensors(), tmp_path / "tokenizer.json", side_files=tmp_path
    )
    with pytest.raises(UserError, match=f"the prompt has {sentence}"):
        api.generate(tmp_path / "hf", prompt, special_tokens=how)
    if "<|new|>" in prompt:
        with pytest.warns(UserWarning, match="read as plain characters"):
            api.generate(tmp_path / "hf", prompt, special_tokens="text", max_new_tokens=1)
