"""Special tokens in texts, and the token that documents begin with."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_texts import texts
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from meshwright.cpp_library import SWITCH
from meshwright.data.corpus import open_corpus
from meshwright.data.literals import Literals
from meshwright.data.manifest import MANIFEST
from meshwright.data.shards import TokenShards
from meshwright.data.tokenize import tokenize
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec import RunSpec, UserError

MakeSpec = Callable[..., RunSpec]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END, START, STOP = range(3)
CHATS = [
    f"<|im_start|>user\n{text[:50]}<|im_end|>\n<|im_start|>assistant\n{text[50:90]}" for text in texts(30)
]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder with a tokenizer that puts <|im_start|> before a text, and ends one with <|im_end|>."""
    folder = tmp_path / "published"
    folder.mkdir()
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts(30), trainer)
    backend.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[(SPECIAL[1], 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIAL[START], "eos_token": SPECIAL[STOP]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in CHATS))
    return file


def library(folder: Path, reads_special: bool = True) -> Backend:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = not reads_special
    return backend


def documents(shards: TokenShards) -> Iterator[list[int]]:
    """The ids of each document as they lie on disk, without its END."""
    starts = shards.rows(0, shards.documents).starts
    for first, last in pairwise(starts):
        yield shards.take(np.arange(first, last)).tolist()[1:]


def test_a_document_begins_with_what_the_post_processor_puts_first(
    make_spec: MakeSpec, published: Path, chats: Path
) -> None:
    data = {"corpus": str(chats), "tokenizer": str(published), "pack": False, "seq_len": 256}
    corpus = open_corpus(make_spec(data))
    backend = library(published, reads_special=False)
    wanted = {(*backend.encode(text).ids, STOP) for text in CHATS}
    found = set()
    for split in (corpus.train, corpus.validation):
        samples = split.gather(np.arange(split.samples))
        for tokens, targets in zip(samples.tokens.tolist(), samples.targets.tolist(), strict=True):
            count = sum(target >= 0 for target in targets)
            assert tokens[1:count] == targets[: count - 1]
            found.add((*tokens[:count], targets[count - 1]))
    assert found == wanted and {ids[0] for ids in found} == {START}


def test_packed_documents_begin_so_too(make_spec: MakeSpec, published: Path, chats: Path) -> None:
    for mask in (True, False):
        data = {"corpus": str(chats), "tokenizer": str(published), "document_mask": mask}
        corpus = open_corpus(make_spec(data))
        assert corpus.tokenizer.begin_id == START and corpus.tokenizer.end_id == STOP
        samples = corpus.train.gather(np.arange(corpus.train.samples))
        real = samples.targets >= 0
        tokens, targets = samples.tokens[real], samples.targets[real]
        ends = np.flatnonzero(targets == STOP)
        assert tokens[0] == START and (tokens[ends[:-1] + 1] == START).all()
        inside = np.setdiff1d(np.arange(len(targets) - 1), ends)
        assert (tokens[inside + 1] == targets[inside]).all()
        assert STOP not in tokens and (tokens == START).sum() == corpus.train.documents
        assert corpus.train.bytes_for() == sum(len(text.encode()) for text in _train_texts(corpus, CHATS))


def _train_texts(corpus: Any, all_texts: list[str]) -> list[str]:
    held = corpus.validation.text_bytes().decode()
    return [text for text in all_texts if text not in held]


def test_an_own_tokenizer_s_documents_are_as_they_were(tmp_path: Path, chats: Path) -> None:
    """The manifest has no new keys, so that its hash is that of earlier versions."""
    for kind in ("byte", "bpe:300"):
        out = tmp_path / kind.replace(":", "")
        tokenize(str(chats), kind, out, vocab_size=300)
        fields = json.loads((out / MANIFEST).read_bytes())
        assert set(fields) == {
            "version", "dtype", "vocab_size", "end_id", "tokenizer", "utf8_bytes", "shards", "files", "sha256"
        }  # fmt: skip
        shards = TokenShards(out)
        assert shards.tokenizer.begin_id == shards.tokenizer.end_id
        assert shards.tokenizer.prompt([7]) == [shards.tokenizer.end_id, 7]


def test_tokens_of_an_earlier_version_begin_with_end(
    make_spec: MakeSpec, tmp_path: Path, published: Path, chats: Path
) -> None:
    """Their manifest names no first token, whatever the tokenizer's post-processor puts there."""
    tree = json.loads((published / "tokenizer.json").read_text())
    (published / "tokenizer.json").write_text(json.dumps({**tree, "post_processor": None}))
    with pytest.warns(UserWarning, match="literals"):
        tokenize(str(chats), str(published), tmp_path / "old", vocab_size=320)
    assert "begin_id" not in json.loads((tmp_path / "old" / MANIFEST).read_bytes())
    (published / "tokenizer.json").write_text(json.dumps(tree))
    old = tmp_path / "old"
    assert Tokenizer.open(published).begin_id == START
    corpus = open_corpus(make_spec({"corpus": str(old), "tokenizer": "bpe"}))
    samples = corpus.train.gather(np.arange(corpus.train.samples))
    assert START not in samples.tokens and samples.tokens[0, 0] == STOP


@pytest.mark.parametrize("compiled", [True, False])
def test_read_special_tokens_are_those_of_the_library(
    compiled: bool, published: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setenv(SWITCH, "1")
    assert Tokenizer.open(published, reads_special=True).rule is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = tokenize(str(chats), str(published), tmp_path / "out", vocab_size=320, special_tokens="read")
    assert counts.split_literals == 0
    backend = library(published)
    wanted = [backend.encode(text, add_special_tokens=False).ids for text in CHATS]
    assert all(ids[0] == START for ids in wanted)
    found = list(documents(TokenShards(tmp_path / "out")))
    assert found == [ids[1:] for ids in wanted]  # what the document begins with is not written twice
    assert sum(ids.count(STOP) for ids in found) == len(CHATS)
    assert TokenShards(tmp_path / "out").tokenizer.reads_special


def test_literals_that_become_letters_are_counted_and_told(
    make_spec: MakeSpec, published: Path, chats: Path, tmp_path: Path
) -> None:
    sentence = r"chats\.jsonl: 90 literals of special tokens such as <\|im_start\|> were read as plain char"
    for _ in range(2):  # also of a corpus that was tokenized before
        with pytest.warns(UserWarning, match=sentence):
            open_corpus(make_spec({"corpus": str(chats), "tokenizer": str(published)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_corpus(make_spec({"corpus": str(chats), "tokenizer": str(published)}), "lazy")
        read = {"corpus": str(chats), "tokenizer": str(published), "special_tokens": "read"}
        corpus = open_corpus(make_spec(read))
    assert corpus.train.samples < open_corpus(make_spec({**read, "special_tokens": "text"})).train.samples
    with pytest.warns(UserWarning, match="90 literals"):
        tokenize(str(chats), str(published), tmp_path / "out", vocab_size=320)
    with pytest.raises(UserError, match=r"data\.special_tokens: 'read' has no effect on .*out"):
        open_corpus(
            make_spec({"corpus": str(tmp_path / "out"), "tokenizer": "bpe", "special_tokens": "read"})
        )


def test_special_tokens_that_take_spaces_or_have_them(published: Path) -> None:
    """No word of a text can be told by itself beside them, so texts go through the library whole."""
    tree = json.loads((published / "tokenizer.json").read_text())
    tree["added_tokens"][START]["rstrip"] = True
    (published / "tokenizer.json").write_text(json.dumps(tree))
    assert Tokenizer.open(published).rule is not None
    assert Tokenizer.open(published, reads_special=True).rule is None


def test_literals_are_found_where_they_are() -> None:
    literals = Literals(["<|a|>", "<|a|><|b|>", "[X]", ""])
    text = "<|a|><|b|> [X][x] <|a|<|a|>"
    assert literals.of(text) == ["<|a|><|b|>", "[X]", "<|a|>"]
    assert literals.found("x [X]") and not literals.found("<|a|")
    assert Literals([]).of("a") == [] and not Literals([]).found("a")


def test_a_token_beyond_the_model_is_refused_where_it_occurs(
    make_spec: MakeSpec, published: Path, chats: Path, tmp_path: Path
) -> None:
    backend = library(published)
    size = backend.get_vocab_size()
    backend.add_tokens([AddedToken("[PAD]", special=True)])
    backend.save(str(published / "tokenizer.json"))
    data = {"corpus": str(chats), "tokenizer": str(published)}
    corpus = open_corpus(make_spec(data, model={"vocab_size": size}))
    assert corpus.tokenizer.vocab_size == size + 1
    assert corpus.train.gather(np.arange(corpus.train.samples)).tokens.max() < size
    padded = tmp_path / "padded.jsonl"
    padded.write_text(json.dumps({"text": "a [PAD] b"}) + "\n")
    words = (
        rf"more than model\.vocab_size {size}, and the text has one of those: '\[PAD\]', number {size}, in"
    )
    with pytest.raises(UserError, match=words):
        open_corpus(
            make_spec({**data, "corpus": str(padded), "special_tokens": "read"}, model={"vocab_size": size})
        )


def test_a_folder_is_a_tokenizer_if_it_has_its_file(published: Path, tmp_path: Path) -> None:
    assert Tokenizer.open(published).digest == Tokenizer.open(published / "tokenizer.json").digest
    for names, has in ((["vocab.json", "merges.txt"], "has vocab.json, merges.txt but no"), ([], "has no")):
        other = tmp_path / f"other{len(names)}"
        other.mkdir()
        for name in names:
            (other / name).write_text("{}")
        with pytest.raises(
            UserError, match=rf"data\.tokenizer: the folder .* {has} tokenizer\.json.*AutoTok"
        ):
            Tokenizer.open(other)


def test_a_document_has_one_first_token(make_spec: MakeSpec, published: Path, chats: Path) -> None:
    backend = library(published)
    special = [(name, number) for number, name in enumerate(SPECIAL)]
    backend.post_processor = processors.TemplateProcessing(
        "<|im_end|> <|im_start|> $A", special_tokens=special
    )
    backend.save(str(published / "tokenizer.json"))
    assert Tokenizer.open(published).prompt([9]) == [STOP, START, 9]
    with pytest.raises(UserError, match=r"puts 2 tokens before a text \(<\|im_end\|>, <\|im_start\|>\)"):
        open_corpus(make_spec({"corpus": str(chats), "tokenizer": str(published)}))
