"""Tokenizers of GGUF files: which pre-tokenizer of llama.cpp a file's is, and what none of them does."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.gguf_tokenizer import read_tokenizer
from meshwright.spec import UserError

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'meshwright[gguf]'")

TEXT = ["the cat sat on the mat, it's 1234 degrees: naïve\n\n  and so on " * 40]


def tokenizer_file(folder: Path, pre: Any, ignore_merges: bool = False, **parts: Any) -> Path:
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    tree = json.loads(backend.to_str()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder / "tokenizer.json"


def splits(*expressions: str) -> Any:
    from tokenizers import Regex

    steps = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in expressions]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


@pytest.mark.parametrize(
    ("pre", "ignore_merges", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), False, "gpt-2"),
        (splits(LLAMA3), True, "llama-bpe"),
        (splits(LLAMA3.replace("{1,3}", "")), False, "qwen2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                  pre_tokenizers.ByteLevel(add_prefix_space=False)]), False, "smollm"),
        (splits(r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-ヿ]+", DEEPSEEK_V3), False, "deepseek-v3"),
    ],
)  # fmt: skip
def test_a_pre_tokenizer_is_found_by_what_it_does(
    tmp_path: Path, pre: Any, ignore_merges: bool, name: str
) -> None:
    assert read_tokenizer(tokenizer_file(tmp_path, pre, ignore_merges), 280).pre == name


def test_a_tokenizer_of_bytes_has_a_merge_that_joins_nothing(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    found = read_tokenizer(tmp_path / "tokenizer.json", 257)
    assert found.merges == ["Ġ Ġ"] and "ĠĠ" not in found.tokens and found.eos == 256


@pytest.mark.parametrize(
    ("pre", "parts", "words"),
    [
        (splits(r"\w+"), {}, r"a pre-tokenizer that llama\.cpp does not know \(\\w\+ \+ ByteLevel\)"),
        (
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            {},
            "is not a byte-level BPE|ByteLevel with options",
        ),
        (splits(LLAMA3), {}, "takes words without merges otherwise"),
        (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            {"normalizer": {"type": "Lowercase"}},
            "Lowercase",
        ),
        (pre_tokenizers.Whitespace(), {}, "is not a byte-level BPE"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_know_is_one_sentence(
    tmp_path: Path, pre: Any, parts: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as told:
        read_tokenizer(tokenizer_file(tmp_path, pre, **parts), 280)
    assert "export to a folder" in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(UserError, match=r"has a token of id .*, and the model has 100 embeddings"):
        read_tokenizer(tokenizer_file(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False)), 100)


def test_templates_for_two_texts_are_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def logged(named: str) -> list[str]:
        backend = Tokenizer.from_file(str(tokenizer_file(tmp_path, byte_level)))
        backend.add_special_tokens(["<a>"])
        backend.post_processor = processors.TemplateProcessing(
            "<a> $A", "<a> $A <a> $B:1", special_tokens=[("<a>", backend.token_to_id("<a>"))]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        names = {"bos_token": named, "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
        caplog.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_tokenizer(tmp_path / "tokenizer.json", 290)
        return [record.getMessage() for record in caplog.records]

    assert logged("<a>") == []
    assert logged("</s>") == ["Unknown leading special token '<a>' in TemplateProcessing<single>"]
