from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest

from meshwright.data import readers, row_files
from meshwright.data.sources import open_source
from meshwright.spec import UserError


def read(corpus: Path | str, key: str = "text") -> list[str]:
    return list(open_source(str(corpus), key).documents())


def test_a_folder_is_walked_in_order_and_what_is_no_text_is_counted(tmp_path: Path) -> None:
    files = {
        "b/two.py": b"two\r\n",
        "a.md": "ä\ufeff".encode(),
        "b.txt": b"three",
        "empty.txt": b" \n",
        "image.png": b"\x89PNG\0\0",
        "latin1.txt": "é".encode("latin-1"),
        ".hidden/x.txt": b"no",
        ".secret": b"no",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    source = open_source(str(tmp_path), "text")
    assert list(source.documents()) == ["ä\ufeff", "two\r\n", "three"]
    assert source.skipped == {"empty": 1, "binary": 1, "not UTF-8": 1, "link": 1}
    assert list(source.documents()) == ["ä\ufeff", "two\r\n", "three"]
    assert source.skipped.total() == 4


def test_one_text_file_and_its_separators(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n<|endoftext|>\ntwo<|endoftext|>\n")  # begins with a byte-order mark
    assert read(path) == ["one\n", "\ntwo"]
    code = tmp_path / "code.py"
    code.write_bytes(b"x = '<|endoftext|>'")
    assert read(code) == ["x = '<|endoftext|>'"]


def test_jsonl_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"body": "one\nline", "n": 1}, {"body": ""}, {"body": None}, {"body": "é"}, {"body": "\ud800"}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    source = open_source(str(path), "body")
    assert list(source.documents()) == ["one\nline", "é"]
    assert source.skipped == {"empty": 2, "not UTF-8": 1}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"}\n{"text": ', r"data\.corpus: .*rows\.jsonl line 2 is not JSON"),
        ('{"txet": "a"}', r"data\.text_key: .*rows\.jsonl line 1 has no key 'text'; did you mean 'txet'\?"),
        ('{"q": "a", "z": 1}', r"has no key 'text'; its keys are q, z"),
        ('{"text": 5}', r"data\.text_key: 'text' in .*rows\.jsonl line 1 is a int, not text"),
        ("[1]", r"rows\.jsonl line 1 has no key 'text'"),
        ('{"text": "a"}\n\n\n{"q": 1}', r"rows\.jsonl line 4 has no key 'text'"),
        ('{"text": "a"}\n\n\n{"text": 1}', r"rows\.jsonl line 4 is a int"),
        ('{"text": "a"}\n\n\n{', r"rows\.jsonl line 4 is not JSON"),
        ("\x00", r"line 1 is not JSON"),
    ],
)
def test_jsonl_mistakes(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=sentence):
        read(path)


def test_jsonl_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(UserError, match=r"rows\.jsonl line 1 is not UTF-8"):
        read(path)


@pytest.mark.parametrize(("raw", "what"), [(b"\xff\xfe", "not UTF-8"), (b"a\0b", "binary")])
def test_a_named_file_must_be_text(tmp_path: Path, raw: bytes, what: str) -> None:
    (tmp_path / "x.txt").write_bytes(raw)
    with pytest.raises(UserError, match=rf"x\.txt is {what}"):
        read(tmp_path / "x.txt")


def test_a_missing_path_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no file or folder .*corpsu\.jsonl; did you mean 'corpus\.jsonl'\?"):
        open_source(str(tmp_path / "corpsu.jsonl"), "text")


def test_the_fingerprint_sees_content_names_and_files_only(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return open_source(str(tmp_path), "text").fingerprint()

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    first = fingerprint()
    os.utime(tmp_path / "a.txt", (1, 1))
    assert fingerprint() == first
    seen = {first}
    (tmp_path / "a.txt").write_text("onf")
    seen.add(fingerprint())
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    seen.add(fingerprint())
    (tmp_path / "d.txt").write_text("three")
    seen.add(fingerprint())
    assert len(seen) == 4


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    source = open_source(str(tmp_path), "text")
    (tmp_path / "a.txt").unlink()
    for read_it in (source.fingerprint, lambda: list(source.documents())):
        with pytest.raises(UserError, match=r"data\.corpus: .*a\.txt cannot be read \(No such file"):
            read_it()


def test_stdlib_is_this_interpreters_sources_without_tests() -> None:
    source = open_source("stdlib", "")
    found = list(source.documents())
    total = sum(len(text.encode()) for text in found)
    assert 5e6 < total < 30e6 and len(found) > 400
    assert Path(os.__file__).read_bytes().decode() in found
    assert not any("site-packages" in f.name or "test" in f.parts for f in source._files)  # type: ignore[attr-defined]


def test_parquet_without_the_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for corpus in (str(tmp_path / "x.parquet"), "hf:nobody/nothing"):
        with pytest.raises(UserError, match=r"pip install 'meshwright\[hf\]'"):
            read(corpus)


def test_hub_data_sets_are_asked_for_by_name_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class DatasetsError(Exception):
        pass

    def load_dataset(path: str, **options: object) -> list[dict[str, str]]:
        asked.append((path, options))
        if path == "nobody/nothing":
            raise DatasetsError("does not exist\nand more")
        return [{"text": "one"}, {"text": ""}, {"text": "two"}]

    fake = types.SimpleNamespace(
        load_dataset=load_dataset, exceptions=types.SimpleNamespace(DatasetsError=DatasetsError)
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read("hf:some/set:small") == ["one", "two"]
    assert read("hf:some/set") == ["one", "two"]
    assert asked == [
        ("some/set", {"split": "train", "streaming": True, "name": name}) for name in ("small", None)
    ]
    with pytest.raises(UserError, match=r"data\.text_key: hf:some/set row 1 has no key 'body'"):
        read("hf:some/set", "body")
    with pytest.raises(UserError, match=r"nobody/nothing cannot be read by datasets \(does not exist\)"):
        read("hf:nobody/nothing")


def test_parquet_rows(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "", "two"]}), path)
    assert read(path) == ["one", "two"]
    assert read(tmp_path) == ["one", "two"]
    with pytest.raises(UserError, match=r"x\.parquet row 1 has no key 'body'; its keys are text"):
        read(path, "body")
    path.write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"x\.parquet cannot be read by datasets"):
        read(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.md", "x.parquet"])
def test_a_document_that_is_too_large_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (readers, row_files):
        monkeypatch.setattr(module, "LARGEST_DOCUMENT", 1000)
    path = tmp_path / name
    for size, fits in ((900, True), (1001, False)):
        text = "x" * size
        if name == "x.parquet":
            pytest.importorskip("datasets")
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": [text]}), path)
        else:
            path.write_text(json.dumps({"text": text}) + "\n" if name == "x.jsonl" else text)
        if fits:
            assert read(path) == [text]
            continue
        with pytest.raises(UserError, match=r"data\.corpus: .*x\.\w+.* more than 1 KB.* divide it"):
            read(path)


def test_a_parquet_file_that_spells_far_more_than_it_has_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["x" * 10_000] * 1000}), path)
    assert path.stat().st_size < 5000
    assert len(read(path)) == 1000  # not so much that it matters
    monkeypatch.setattr(readers, "UNPACKED_FREELY", 10**6)
    with pytest.raises(
        UserError, match=r"x\.parquet has .*B and unpacks to more than 1 MB of text.* as JSONL"
    ):
        read(path)


@pytest.mark.parametrize(
    ("corpus", "sentence"),
    [
        ("", r"'' names nothing; give 'stdlib'"),
        ("hf:", r"'hf:' lacks the data set's name"),
        ("hf::config", r"'hf::config' lacks the data set's name"),
        ("synthetic", r"'synthetic' has no text to tokenize"),
    ],
)
def test_names_that_name_no_text(corpus: str, sentence: str) -> None:
    with pytest.raises(UserError, match=r"data\.corpus: " + sentence):
        open_source(corpus, "text")


def test_a_pipe_is_no_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"data\.corpus: .*pipe is neither a file nor a folder .*; write it"):
        open_source(str(tmp_path / "pipe"), "text")


def test_a_row_nested_too_deep_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 200_000)
    with pytest.raises(UserError, match=r"data\.corpus: .*rows\.jsonl line 1 is not JSON"):
        read(path)
