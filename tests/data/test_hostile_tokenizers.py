"""Tokenizers of strangers: no identifier, pattern or replacement takes all memory, and all errors are one
sentence."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from meshwright.data import tokenizer as ours
from meshwright.exchange.hf_tokenizer import write_tokenizer
from meshwright.spec import UserError

END = "<|endoftext|>"


def byte_level() -> dict[str, Any]:
    """The tree of a tokenizer.json, byte-level, whose end of document is 256."""
    return dict(json.loads(ours.byte_tokenizer().json))


def written(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder / "tokenizer.json"


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refusal:
        call()
    words = str(refusal.value)
    assert len(words.splitlines()) == 1 and len(words) < 500, words[:1000]
    return words


@pytest.mark.parametrize("number", [2**24 + 1, 2**31, 2**32 - 1])
def test_an_identifier_beyond_every_vocabulary_is_refused(number: int, tmp_path: Path) -> None:
    tree = byte_level()
    tree["model"]["vocab"]["Ġword"] = number
    path = written(tmp_path, tree)
    assert str(number) in refused(lambda: ours.Tokenizer.open(path))
    (tmp_path / "out").mkdir()
    assert str(number) in refused(lambda: write_tokenizer(tmp_path / "out", path, 64, 300))


def test_identifiers_may_have_gaps(tmp_path: Path) -> None:
    tree = byte_level()
    tree["model"]["vocab"]["Ġword"] = number = 2**20
    tokenizer = ours.Tokenizer.open(written(tmp_path, tree))
    assert tokenizer.vocab_size == number + 1
    assert tokenizer.decode([*b"a", number, *b"b", number - 1]) == "a wordb"
    assert tokenizer.decode_bytes(tokenizer.encode("naïve")) == "naïve".encode()
    assert tokenizer.is_byte_level


REDOS = Regex(r"(x+x+)+y")


def test_a_pattern_that_takes_exponential_time_is_one_sentence(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, END: 1}, merges=[], unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.Split(REDOS, "isolated")
    backend.add_special_tokens([END])
    tokenizer = ours.Tokenizer.open(written(tmp_path, json.loads(backend.to_str())))
    assert "cannot encode" in refused(lambda: tokenizer.encode("x" * 1_000))


@pytest.mark.parametrize("part", ["normalizer", "decoder", "pre_tokenizer"])
def test_replacements_that_multiply_a_text_are_refused(part: str, tmp_path: Path) -> None:
    """Five that each put 32 letters in place of one make 32 MiB of each letter."""
    tree = byte_level()
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 32}
    steps: dict[str, tuple[str, dict[str, Any]]] = {
        "normalizer": ("normalizers", replace),
        "decoder": ("decoders", replace),
        "pre_tokenizer": ("pretokenizers", tree["pre_tokenizer"]),
    }
    key, step = steps[part]
    tree[part] = {"type": "Sequence", key: [step] * (5 if part != "pre_tokenizer" else 24)}
    path = written(tmp_path, tree)
    assert "times" in refused(lambda: ours.Tokenizer.open(path))
    (tmp_path / "out").mkdir()
    assert "times" in refused(lambda: write_tokenizer(tmp_path / "out", path, 64, 300))


def test_replacements_of_published_tokenizers_are_not_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, END: 2}, merges=[]))
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(), normalizers.Lowercase(), normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"), normalizers.Replace(Regex(" {2,}"), "▁"),
            normalizers.Replace("``", '"'), normalizers.Replace("''", '"'),
        ]
    )  # fmt: skip
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([END])
    tokenizer = ours.Tokenizer.open(written(tmp_path, json.loads(backend.to_str())))
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"


def template(first: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }


def test_an_unknown_token_of_a_post_processor_is_one_sentence(tmp_path: Path) -> None:
    tree = byte_level()
    tree["post_processor"] = template({"SpecialToken": {"id": "<nobody>", "type_id": 0}})
    path = written(tmp_path, tree)
    (tmp_path / "out").mkdir()
    for call in (
        lambda: ours.Tokenizer.open(path),
        lambda: write_tokenizer(tmp_path / "out", path, 64, 300),
    ):
        assert "<nobody>" in refused(call)


def test_the_table_of_spellings_has_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    """And not that of its largest identifier."""
    tree = byte_level()
    tree["model"]["vocab"] |= {f"Ġw{number}": 1_000 + number * 10_007 for number in range(100)}
    tokenizer = ours.Tokenizer.open(written(tmp_path, tree))
    tracemalloc.start()
    assert tokenizer.decode([1_000]) == " w0"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
