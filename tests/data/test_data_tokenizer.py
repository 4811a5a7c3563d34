from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sample_texts import texts
from sample_tokenizers import sentencepiece_like
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from meshwright.data import tokenize as cutting
from meshwright.data.tokenize import bpe_size, build_tokenizer
from meshwright.data.tokenizer import (
    END,
    ByteTokenizer,
    Tokenizer,
    byte_tokenizer,
    number_tokenizer,
    train_bpe,
)
from meshwright.data.vocabulary import check_end
from meshwright.spec import UserError
from meshwright.spec.hf.text_tokens import TextTokens

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
    added = Tokenizer.open(path)
    assert (added.end_id, added.vocab_size) == (4, 5)
    with pytest.raises(
        UserError, match=r"model\.vocab_size 4, and 'nowhere', which ends a document, is number"
    ):
        check_end(added, "texts", 4)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("bpe:99999", r"'bpe:99999' has more entries than model\.vocab_size 2048"),
        ("bpe:100", r"a BPE of 100 entries cannot hold the 256 bytes"),
        ("bpe:many", r"'many' in 'bpe:many' is not a number"),
        ("bpe:", r"'bpe:' lacks its number"),
        ("nowhere.json", r"there is no file nowhere\.json; give .* or a folder with one$"),
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
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    with pytest.raises(UserError, match=rf"beside a tokenizer\.json; give that, or the folder {tmp_path}$"):
        Tokenizer.open(config)
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


def test_what_a_prompt_begins_with(tmp_path: Path, bpe: Tokenizer) -> None:
    assert bpe.prompt([5]) == [0, 5] and bpe.prompt([]) == [0]
    bpe.save(tmp_path)
    assert Tokenizer.open(tmp_path / "tokenizer.json").prompt([5]) == [0, 5]
    path = save_words(tmp_path, "<unk>", "<s>", "</s>", "a")
    config = tmp_path / "tokenizer_config.json"
    for named in ({"bos_token": "<s>"}, {"bos_token": "<s>", "add_bos_token": True}, {"bos_token": "<no>"}):
        config.write_text(json.dumps(named))
        assert Tokenizer.open(path).prompt([3]) == [3]
        assert Tokenizer.open(path, TextTokens(2, before=(2,))).prompt([3]) == [2, 3]
    assert Tokenizer.open(path).prompt([]) == [2]
    config.unlink()
    backend = Backend.from_file(str(path))
    special = [("<s>", 1), ("</s>", 2)]
    for processor in (
        processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
        processors.BertProcessing(("</s>", 2), ("<s>", 1)),
        processors.TemplateProcessing("<s> $A </s>", special_tokens=special),
        processors.TemplateProcessing("<s> $A", special_tokens=special),
        processors.TemplateProcessing("<s> <s> $A", special_tokens=special),
        processors.TemplateProcessing("$A </s>", special_tokens=special),
        processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing("<s> $A </s> <s>", special_tokens=special),
            ]
        ),
    ):
        backend.post_processor = processor
        backend.save(str(path))
        assert Tokenizer.open(path).prompt([3]) == backend.encode("a").ids


def test_the_byte_tokenizer_takes_what_its_config_says(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    assert Tokenizer.open(path).prompt([5]) == [256, 5]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": None}))
    found = Tokenizer.open(path)
    assert isinstance(found, ByteTokenizer) and found.prompt([5]) == [5]


def test_the_models_length_is_written_if_known(tmp_path: Path, bpe: Tokenizer) -> None:
    config = tmp_path / "tokenizer_config.json"
    bpe.save(tmp_path)
    assert "model_max_length" not in json.loads(config.read_text())
    bpe.save(tmp_path, max_seq_len=77)
    assert json.loads(config.read_text())["model_max_length"] == 77
    auto = pytest.importorskip("transformers").AutoTokenizer
    assert auto.from_pretrained(str(tmp_path)).model_max_length == 77


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "gone"):
        with pytest.raises(UserError, match=rf"^{folder}: the tokenizer cannot be written there \([A-Z]"):
            byte_tokenizer().save(folder)
    if os.geteuid() != 0:  # root writes anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UserError, match="Permission denied"):
            byte_tokenizer().save(tmp_path / "closed")


@pytest.mark.parametrize("kind", ["llama 2", "always", "first"])
def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = sentencepiece_like(kind)
    text = " ".join(texts(30, seed=7)) + "  two  spaces\n\n at  line ends \n" * 20
    whole = tokenizer.encode(text)
    assert tokenizer.encode(text[:300]) + tokenizer.encode(text[300:]) != whole[:]
    monkeypatch.setattr(cutting, "PIECE", 300)
    pieces = list(cutting._long_pieces(text, tokenizer))
    assert len(pieces) > len(text) // 400
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == whole


def test_a_long_text_without_a_place_to_cut_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE", 50)
    text = "word" * 100
    assert list(cutting._long_pieces(text, sentencepiece_like("always"))) == [text]
    assert len(list(cutting._long_pieces(text, byte_tokenizer()))) == 8
    assert list(cutting._long_pieces("word " * 11 + "\n", byte_tokenizer())) == [
        "word " * 9 + "word",
        " word \n",
    ]
