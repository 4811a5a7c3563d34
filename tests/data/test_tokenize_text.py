from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sample_texts import texts

from meshwright.data import tokenize as module
from meshwright.data.permutation import mix64
from meshwright.data.publish import publishing
from meshwright.data.shards import TokenShards
from meshwright.data.sources import open_source
from meshwright.data.split import SplitSurvey
from meshwright.data.text_processes import TextProcesses
from meshwright.data.tokenize import build_tokenizer, tokenize
from meshwright.data.tokenizer import byte_tokenizer, train_bpe
from meshwright.data.word_rule import GPT2
from meshwright.spec import UserError


def decoded(folder: Path) -> list[str]:
    """Every document of a folder of shards."""
    opened = TokenShards(folder)
    bounds = opened.rows(0, opened.documents).starts.tolist()
    return [
        opened.tokenizer.decode(opened.take(np.arange(start + 1, stop)).tolist())
        for start, stop in pairwise(bounds)
    ]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe", "bpe:300"])
def test_every_document_comes_back(folder: Path, tmp_path: Path, tokenizer: str) -> None:
    counts = tokenize(str(folder), tokenizer, tmp_path / "out", vocab_size=320)
    assert decoded(tmp_path / "out") == texts(40)
    assert counts.documents == 40 and counts.utf8_bytes == sum(len(t.encode()) for t in texts(40))
    assert counts.vocab_size <= {"byte": 257, "bpe": 320, "bpe:300": 300}[tokenizer]
    opened = TokenShards(tmp_path / "out")
    rows = opened.rows(0, opened.documents)
    assert (counts.tokens, counts.sha256) == (rows.starts[-1], opened.digest)
    assert rows.bytes.tolist() == [len(t.encode()) for t in texts(40)]
    assert counts.to_json()["documents"] == 40


def test_a_given_tokenizer_is_used_again(folder: Path, tmp_path: Path) -> None:
    tokenize(str(folder), "bpe:300", tmp_path / "one", vocab_size=300)
    given = str(tmp_path / "one" / "tokenizer.json")
    tokenize(str(folder), given, tmp_path / "two", vocab_size=300)
    assert TokenShards(tmp_path / "one").digest == TokenShards(tmp_path / "two").digest


def test_pieces_and_chunks_change_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long document is encoded in pieces, cut where GPT-2's rule cuts too, in several chunks."""
    (folder / "long.txt").write_text("\n".join(texts(30, seed=7)))
    whole = tokenize(str(folder), "bpe:300", tmp_path / "whole", vocab_size=300)
    monkeypatch.setattr(module, "PIECE", 600)
    monkeypatch.setattr(module, "CHUNK", 1000)
    pieces = tokenize(str(folder), str(tmp_path / "whole" / "tokenizer.json"), tmp_path / "p", vocab_size=300)
    assert pieces.sha256 == whole.sha256


def test_text_without_a_place_to_cut_comes_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 10)
    monkeypatch.setattr(module, "CHUNK", 25)
    documents = ["x" * 95, "\n" * 40, "a \n" * 30, "é"]
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.py").write_text(text)
    (tmp_path / "1.py").write_text("_" + documents[1])
    tokenize(str(tmp_path), "bpe", tmp_path / "out", vocab_size=260)
    assert decoded(tmp_path / "out") == [documents[0], "_" + documents[1], *documents[2:]]


def test_a_bpe_never_sees_what_is_held_out(folder: Path, tmp_path: Path) -> None:
    tokenize(str(folder), "bpe", tmp_path / "out", vocab_size=300, val_fraction=0.3)
    opened = TokenShards(tmp_path / "out")
    hashes = opened.rows(0, opened.documents).hashes
    survey = SplitSurvey(0.3)
    survey.add(hashes)
    mask = survey.rule().mask(hashes)
    assert 0 < mask.sum() < 40
    seen = [text for text, out in zip(texts(40), mask.tolist(), strict=True) if not out]
    assert opened.tokenizer.digest == train_bpe(iter(seen), 300).digest
    assert opened.tokenizer.digest != train_bpe(iter(texts(40)), 300).digest


def test_a_large_corpus_trains_the_bpe_on_a_sample(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BPE_BYTES", 6000)
    counts = tokenize(str(folder), "bpe", tmp_path / "out", vocab_size=300)
    assert counts.utf8_bytes > 12_000 and counts.documents == 40
    assert decoded(tmp_path / "out") == texts(40)
    limit = np.uint64(6000 / counts.utf8_bytes * 2.0**64)
    sample = [text for text in texts(40) if mix64(module.content_hash(text.encode()))[0] < limit]
    assert 0 < len(sample) < 40
    assert TokenShards(tmp_path / "out").tokenizer.digest == train_bpe(sample, 300).digest


def test_hashes_are_of_the_text_not_of_the_tokens(folder: Path, tmp_path: Path) -> None:
    hashes = []
    for tokenizer in ("byte", "bpe"):
        tokenize(str(folder), tokenizer, tmp_path / tokenizer, vocab_size=300)
        opened = TokenShards(tmp_path / tokenizer)
        hashes.append(opened.rows(0, opened.documents).hashes.tolist())
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 40


def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for tokenizer in ("byte", "bpe"):
        with pytest.raises(UserError, match=r"data\.corpus: .*in holds no text; give another corpus"):
            tokenize(str(tmp_path / "in"), tokenizer, tmp_path / "out", vocab_size=300)
    (tmp_path / "in" / "x.bin").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"holds no text \(1 left out: 1 binary\)"):
        tokenize(str(tmp_path / "in"), "byte", tmp_path / "out", vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_folder_in_use_is_refused_and_kept(folder: Path, tmp_path: Path) -> None:
    tokenize(str(folder), "byte", tmp_path / "out", vocab_size=300)
    before = TokenShards(tmp_path / "out").digest
    with pytest.raises(
        UserError, match=r"out: .*out cannot be written \(it exists and is not an empty folder\)"
    ):
        tokenize(str(folder), "byte", tmp_path / "out", vocab_size=300)
    assert TokenShards(tmp_path / "out").digest == before
    (tmp_path / "empty").mkdir()
    tokenize(str(folder), "byte", tmp_path / "empty", vocab_size=300)
    assert decoded(tmp_path / "empty") == texts(40)


def test_a_tokenizer_that_yields_nothing_for_a_document_still_counts_its_end(tmp_path: Path) -> None:
    with TextProcesses() as processes:
        encoded = list(module._encode(iter(["a", ""]), byte_tokenizer(), processes))
    assert [len(ids) for ids, _, _ in encoded] == [1, 0]


def test_cutting_the_training_text_at_spaces_changes_no_merge(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "long.txt").write_text("  \t".join(texts(30, seed=7)))
    whole = build_tokenizer("bpe:320", 320, [open_source(str(folder), "text")], 0.0)
    monkeypatch.setattr(module, "TRAIN_PIECE", 100)
    cut = build_tokenizer("bpe:320", 320, [open_source(str(folder), "text")], 0.0)
    assert cut.digest == whole.digest


@pytest.mark.parametrize("before", ["", "def f(x):\n " * 300])
def test_a_bpe_trains_on_short_stretches_of_text_without_spaces(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 4 * module.TRAIN_PIECE)
    text = before + "abcacb" * 20_000
    (tmp_path / "x.py").write_text(text)
    tokenize(str(tmp_path / "x.py"), "bpe", tmp_path / "out", vocab_size=270)
    cut = list(module._pieces(text, module.TRAIN_PIECE, GPT2))
    assert max(map(len, cut)) == module.TRAIN_PIECE
    found = TokenShards(tmp_path / "out").tokenizer.digest
    assert found == train_bpe(cut, 270).digest != train_bpe([text], 270).digest
    assert decoded(tmp_path / "out") == [text]


def test_tokens_are_not_tokenized_as_text(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "in" / "tokens"
    tokenize(str(folder), "byte", tokens, vocab_size=300)
    (tmp_path / "in" / "text.txt").write_text("text")
    for corpus, remedy in (
        (tokens, "train on it as it is"),
        (tmp_path / "in", "give that folder, or move it"),
    ):
        with pytest.raises(UserError, match=rf"data\.corpus: {tokens} holds tokens already .*; {remedy}"):
            tokenize(str(corpus), "byte", tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out").exists()


def test_what_a_killed_tokenize_left_is_removed_and_what_another_builds_is_not(
    folder: Path, tmp_path: Path
) -> None:
    stale = tmp_path / ".out.tmp-0123"
    stale.mkdir()
    (stale / "00000.tokens.bin").write_bytes(b"half")
    with publishing(tmp_path / "out", "out") as alive:
        (alive / "file").write_text("x")
        assert not stale.exists()
        tokenize(str(folder), "byte", tmp_path / "out", vocab_size=300)
        assert (alive / "file").exists()
        (alive / "file").unlink()
        shutil.rmtree(tmp_path / "out")
    assert not list(tmp_path.glob(".out.*"))
