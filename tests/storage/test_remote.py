"""Corpora by fsspec: the tokens of the same files on a disk, whatever becomes of the connection."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from servers import Bucket, RangeServer

from meshwright import api
from meshwright.data.corpus import open_corpus
from meshwright.data.sources import open_source
from meshwright.spec import UserError
from meshwright.spec.load import from_tree
from meshwright.storage import remote


def counts(corpus: Path | str, out: Path, tokenizer: str = "byte") -> dict[str, object]:
    """The counts of a corpus's tokens, with their hash."""
    found = api.tokenize(str(corpus), tokenizer, out, vocab_size=300, val_fraction=0.1)
    return found.to_json()


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)


@pytest.mark.filterwarnings("ignore:.*left out 1 compressed file")
def test_a_folder_of_s3_has_the_tokens_of_the_same_folder_on_a_disk(
    s3: Bucket, corpus: Path, tmp_path: Path
) -> None:
    url = s3.put(corpus, "folder")
    on_disk = counts(corpus, tmp_path / "disk", "bpe")
    assert counts(url, tmp_path / "s3", "bpe") == on_disk
    assert counts(f"file://{corpus}", tmp_path / "file", "bpe") == on_disk
    assert on_disk["skipped"] == {"empty": 1, "binary": 1, "compressed": 1}
    assert on_disk["documents"] == open_documents(corpus) > 900


def open_documents(corpus: Path) -> int:
    return len(list(open_source(str(corpus), "text").documents()))


@pytest.mark.filterwarnings("ignore:.*left out 1 compressed file")
@pytest.mark.filterwarnings("ignore:.*was cut at byte")
def test_cut_connections_to_s3_change_no_token(
    s3: Bucket, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wait: None
) -> None:
    monkeypatch.setattr(remote, "MOST_RANGE", 2**16)
    url = s3.put(corpus, "cut")
    on_disk = counts(corpus, tmp_path / "disk")
    s3.proxy.cuts, s3.proxy.done = [200_000, 40_000, 1000, 300_000, 70_000], 0
    assert counts(url, tmp_path / "s3") == on_disk
    assert s3.proxy.done == 5


def test_a_cut_file_is_read_on_from_the_byte_that_was_reached(
    http: RangeServer, tmp_path: Path, no_wait: None
) -> None:
    text = "".join(f"{number} " for number in range(200_000))
    (tmp_path / "long.txt").write_text(text)
    source = open_source(f"{http.url}/long.txt", "text")
    http.cuts = [10**9, 10**9, 1000, 200_000]  # of its head, and of its documents
    with pytest.warns(UserWarning, match=r"long\.txt was cut at byte 65536 \(.*\); it is read on from there"):
        assert list(source.documents()) == [text]
    assert http.starts[:5] == [0, 0, 65_536, 65_536, 65_536] and http.starts[5:] == [327_680]


def test_a_connection_that_stays_cut_is_one_sentence(
    http: RangeServer, tmp_path: Path, no_wait: None
) -> None:
    (tmp_path / "a.txt").write_text("a" * 100)
    source = open_source(f"{http.url}/a.txt", "text")
    http.cuts = [10] * 100
    with (
        pytest.warns(UserWarning, match="was cut at byte 0"),
        pytest.raises(
            UserError, match=r"data\.corpus: http.*a\.txt cannot be read \(.+\); see whether"
        ) as told,
    ):
        list(source.documents())
    assert told.value.code == 2 and "\n" not in str(told.value)
    assert len(http.starts) == remote.TRIES


def test_a_server_without_ranges_is_told(http: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 300_000)
    http.serves_ranges = False
    with pytest.raises(UserError, match=r"data\.corpus: http.*a\.txt cannot be read .*range"):
        list(open_source(f"{http.url}/a.txt", "text").documents())


def test_a_file_that_changes_while_it_is_read_is_told(
    http: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a" * 1000}) + "\n" + json.dumps({"text": "b" * 200_000}))
    source = open_source(f"{http.url}/rows.jsonl", "text")
    path.write_text(path.read_text().replace("b", "c"))
    with pytest.raises(UserError, match=r"rows\.jsonl was changed while it was read; start again"):
        list(source.documents())


def test_a_corpus_of_s3_is_tokenized_once_and_again_when_it_changes(s3: Bucket, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("hello world " * 200)
    url = s3.put(texts, "changes")
    tree = {
        "data": {"corpus": url, "tokenizer": "byte", "seq_len": 16, "cache": str(tmp_path / "cache")},
        "train": {"batch_tokens": 64},
    }
    first = open_corpus(from_tree(tree)).digest
    assert open_corpus(from_tree(tree)).digest == first
    assert len(list((tmp_path / "cache").glob("changes-*"))) == 1
    (texts / "a.txt").write_text("hello again " * 200)
    s3.put(texts, "changes")
    assert open_corpus(from_tree(tree)).digest != first


def test_parquet_of_s3_has_the_rows_of_the_same_file_on_a_disk(s3: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets of the extra hf reads parquet")
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "rows"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(50)]}), folder / "x.parquet")
    url = s3.put(folder, "rows")
    on_disk = list(open_source(str(folder), "text").documents())
    assert list(open_source(url, "text").documents()) == on_disk and len(on_disk) == 50
    assert list(open_source(f"{url}/x.parquet", "text").documents()) == on_disk


@pytest.mark.parametrize(
    ("corpus", "sentence"),
    [
        ("s3://bucket/nothing", r"there is no file or folder s3://bucket/nothing"),
        ("s3://nowhere/at-all", r"there is no file or folder s3://nowhere/at-all"),
        ("sss3://bucket/x", r"begins with sss3://, which fsspec does not know; give a path, or one of s3://"),
        ("file:///no/such/file", r"there is no file or folder file:///no/such/file"),
    ],
)
def test_urls_that_name_nothing(s3: Bucket, corpus: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"data\.corpus: .*{sentence}") as told:
        open_source(corpus, "text")
    assert told.value.code == 2 and "\n" not in str(told.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs:// needs the package gcsfs; pip install 'meshwright\[gcs\]'"):
        open_source("gs://bucket/x", "text")


def test_a_folder_of_tokens_is_not_read_from_s3(s3: Bucket, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    api.tokenize(str(tmp_path / "a.txt"), "byte", tmp_path / "tokens", vocab_size=257)
    with pytest.raises(UserError, match=r"tokens holds tokens already .*; copy that folder to a disk"):
        open_source(s3.put(tmp_path / "tokens", "tokens"), "text")


def test_places_of_hidden_files_and_folders_are_left_out(s3: Bucket, tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", ".d/e.txt"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text(name)
    url = s3.put(tmp_path / "x", "places")
    s3.client.put_object(Bucket="bucket", Key="places/empty/", Body=b"")
    assert list(open_source(url, "text").documents()) == ["a/c.txt", "b.txt"]
    assert list(open_source(f"{url}/", "text").documents()) == ["a/c.txt", "b.txt"]
    assert list(open_source(f"{url}/b.txt", "text").documents()) == ["b.txt"]
