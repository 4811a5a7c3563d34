from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_texts import texts
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from meshwright.data.tokenize import bpe_size, build_tokenizer
from meshwright.data.tokenizer import (
    END,
    ByteTokenizer,
    Tokenizer,
    byte_tokenizer,
    number_tokenizer,
    train_bpe,
)
from meshwright.spec import UserError

TRICKY = ["", " ", "a", "\n\n\t x", "naïve ☃ 漢字 👩‍👩‍👧", f"a{END}b", "\x01\x7f\u00a0\u00ad", "é" * 50]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(iter(texts(60)), 350)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_text_comes_back_and_never_holds_end(kind: str, bpe: Tokenizer) -> None:
    tokenizer = byte_tokenizer() if kind == "byte" else bpe
    for text in [*TRICKY, *texts(10, seed=3)]:
        ids = tokenizer.encode(text)
        assert tokenizer.end_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        cuts = [tokenizer.decode_bytes([i]) for i in ids]
        assert b"".join(cuts) == text.encode()
    assert tokenizer.decode([tokenizer.end_id]) == END


def test_bytes_are_ids_also_for_other_readers_of_the_file(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    tokenizer.save(tmp_path)
    other = Backend.from_file(str(tmp_path / "tokenizer.json"))
    other.encode_special_tokens = True
    for text in TRICKY:
        assert tokenizer.encode(text) == list(text.encode())
        assert other.encode(text, add_special_tokens=False).ids == list(text.encode())
        assert other.decode(list(text.encode()), skip_special_tokens=False) == text


def test_training_is_deterministic(bpe: Tokenizer) -> None:
    assert train_bpe(iter(texts(60)), 350).digest == bpe.digest
    assert train_bpe(iter(texts(60, seed=1)), 350).digest != bpe.digest
    assert bpe.vocab_size == 350 and bpe.end_id == 0


def test_a_corpus_too_small_for_its_vocabulary_gives_a_smaller_one() -> None:
    assert 257 <= train_bpe(iter(["ab ab"]), 5000).vocab_size < 300


def test_save_and_open_keep_the_tokenizer(tmp_path: Path, bpe: Tokenizer) -> None:
    for tokenizer in (bpe, byte_tokenizer(), number_tokenizer(50)):
        tokenizer.save(tmp_path)
        again = Tokenizer.open(tmp_path / "tokenizer.json")
        assert again.digest == tokenizer.digest and again.end_id == tokenizer.end_id
        assert type(again) is type(tokenizer)
    assert isinstance(byte_tokenizer(), ByteTokenizer)


def test_transformers_opens_what_is_saved(tmp_path: Path, bpe: Tokenizer) -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    bpe.save(tmp_path)
    loaded = auto.from_pretrained(str(tmp_path))
    assert loaded.eos_token_id == bpe.end_id
    text = texts(1)[0]
    assert loaded(text, add_special_tokens=False)["input_ids"] == bpe.encode(text)


def test_numbers() -> None:
    tokenizer = number_tokenizer(50)
    assert tokenizer.decode([3, 48, 0]) == "3 48 0"
    assert tokenizer.encode("3 48 0") == [3, 48, 0]
    assert (tokenizer.vocab_size, tokenizer.end_id) == (50, 49)


def save_words(folder: Path, *words: str) -> Path:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_the_end_of_a_loaded_tokenizer(tmp_path: Path) -> None:
    path = save_words(tmp_path, "a", "b", "</s>", "stop")
    assert Tokenizer.open(path).end_id == 2
    for eos in ("stop", {"content": "stop"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert Tokenizer.open(path).end_id == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "nowhere"}))
    with pytest.raises(UserError, match=r"no end-of-document token 'nowhere'"):
        Tokenizer.open(path)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("bpe:99999", r"'bpe:99999' has more entries than model\.vocab_size 2048"),
        ("bpe:100", r"a BPE of 100 entries cannot hold the 256 bytes"),
        ("bpe:many", r"'many' in 'bpe:many' is not a number"),
        ("bpe:", r"'bpe:' lacks its number"),
        ("nowhere.json", r"there is no file nowhere\.json"),
    ],
)
def test_settings_that_cannot_be(setting: str, sentence: str) -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer: .*" + sentence):
        build_tokenizer(setting, 2048, [], 0.0)


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        Tokenizer.open(path)
    save_words(tmp_path, "a", "b")
    with pytest.raises(UserError, match=r"no end-of-document token any of"):
        Tokenizer.open(path)


def test_the_size_of_a_bpe() -> None:
    assert bpe_size("bpe", 2048) == 2048
    assert bpe_size("bpe:300", 2048) == 300
    assert bpe_size("byte", 2048) is None
    assert bpe_size("bpe.json", 2048) is None


@pytest.mark.parametrize("eos", [5, ["a"], {"x": 1}, {"content": 5}])
def test_an_end_that_is_no_name_is_one_sentence(tmp_path: Path, eos: object) -> None:
    path = save_words(tmp_path, "a", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    with pytest.raises(UserError, match=r"data\.tokenizer: eos_token in .*config\.json is .*, not the name"):
        Tokenizer.open(path)


def test_a_word_without_a_token_is_one_sentence(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a a") == [0, 0]
    with pytest.raises(UserError, match=r"data\.tokenizer: the tokenizer cannot encode this text"):
        tokenizer.encode("a b")
