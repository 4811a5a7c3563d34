"""Files of rows that are named: the rows that datasets reads of JSON, CSV, TSV and parquet, or a sentence."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.data import row_files
from meshwright.data.sources import open_source
from meshwright.spec import UserError
from meshwright.storage.stored_file import LocalFile

ROWS: list[dict[str, Any]] = [
    {"text": "hello"},
    {"text": 'two\nlines, a comma, a "quote" and a\ttab', "n": 1},
    {"text": "naïve 日本 🙂", "n": 2, "inner": {"a": [1, 2]}},
    {"text": " spaces kept ", "n": None},
]
BOM = b"\xef\xbb\xbf"


def read(path: Path, key: str = "text") -> list[str]:
    return list(open_source(str(path), key).documents())


def theirs(path: Path, kind: str, **how: Any) -> list[str]:
    """Texts that the package datasets reads of a file."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset(
        kind, data_files=str(path), split="train", cache_dir=str(path.parent / "c"), **how
    )
    return [row["text"] for row in rows]


def table(delimiter: str, ends: str = "\n") -> bytes:
    written = io.StringIO()
    writer = csv.DictWriter(written, ["n", "text"], delimiter=delimiter, lineterminator=ends)
    writer.writeheader()
    writer.writerows({"n": row.get("n"), "text": row["text"]} for row in ROWS)
    return written.getvalue().encode()


LINES = "\n".join(map(json.dumps, ROWS)).encode()
FILES: dict[str, tuple[str, bytes]] = {
    "array.json": ("json", json.dumps(ROWS).encode()),
    "indented.json": ("json", json.dumps(ROWS, indent=2).encode()),
    "lines.json": ("json", LINES),
    "bom.json": ("json", BOM + json.dumps(ROWS).encode()),
    "LINES.JSONL": ("json", LINES + b"\n"),
    "array.jsonl": ("json", json.dumps(ROWS).encode()),
    "crlf.jsonl": ("json", LINES.replace(b"\n", b"\r\n")),
    "bom.jsonl": ("json", BOM + LINES),
    "lines.NDJSON": ("json", LINES),
    "spread.jsonl": ("json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
    "one line.jsonl": ("json", LINES.replace(b"\n", b" ")),
    "spread later.jsonl": (
        "json",
        (json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1:], indent=1)[1:-1].replace("},", "}")).encode(),
    ),
    "cr.jsonl": ("json", LINES.replace(b"\n", b"\r")),
    "lines.jsonlines": ("json", LINES),
    "lines.jl": ("json", LINES),
    "strings.json": ("json", json.dumps([row["text"] for row in ROWS]).encode()),
    "table.csv": ("csv", table(",")),
    "Table.CSV": ("csv", table(",")),
    "crlf.csv": ("csv", table(",", "\r\n")),
    "bom.csv": ("csv", BOM + table(",")),
}


@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_of_datasets(name: str, tmp_path: Path) -> None:
    kind, content = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert read(path) == [row["text"] for row in ROWS]
    if name != "bom.json":  # an array behind a mark, which datasets refuses
        assert theirs(path, kind) == [row["text"] for row in ROWS]


TABLES = {
    "twice": "text,text,text\na,b,c\nd,e\n",
    "behind a quote": 'n,text\n1,"Hello" she said\n2,"x"y"z\n3,"a ""b""c" d\n4,a"b"c\n'
    '5,"a \\"q\\" b"\n6,last',
}


@pytest.mark.parametrize("name", TABLES)
def test_untidy_tables_are_read_as_datasets_reads_them(name: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(TABLES[name])
    assert read(path) == theirs(path, "csv")


def test_the_second_column_of_a_name_has_a_number(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(TABLES["twice"])
    assert read(path, "text.1") == ["b", "e"]
    assert read(path, "text.2") == ["c"]


def test_a_source_of_julia_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jl"
    for content in ("println(1)\n", "[1, 2]\n"):
        path.write_text(content)
        assert read(path) == [content]
    path.write_text('{"body": "a"}\n')
    with pytest.raises(UserError, match="line 1 has no key 'text'"):
        read(path)


def test_columns_of_a_tsv_file(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    path.write_bytes(table("\t"))
    assert read(path) == [row["text"] for row in ROWS] == theirs(path, "csv", sep="\t")


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("indent", [None, 1])
def test_json_is_read_in_blocks_of_any_size(
    block: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_BLOCK", block)
    path = tmp_path / "rows.json"
    numbers: list[Any] = [12, 345, 6.5e7, None, True]
    path.write_text(f"  {json.dumps([*numbers, *ROWS], indent=indent)}\n ")
    assert [row for _, row in row_files.rows_of(LocalFile(path))] == [*numbers, *ROWS]
    path.write_text("\n".join(json.dumps(row, indent=indent) for row in [*ROWS, *numbers]))
    assert [row for _, row in row_files.rows_of(LocalFile(path))] == [*ROWS, *numbers]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
WRONG: dict[str, tuple[bytes, str]] = {
    "cut.json": (
        b'[{"text": "a"}, {"text": "b"',
        r"cut\.json is not JSON at row 2 .*give an array of objects",
    ),
    "more.json": (b'[{"text": "a"}] x', r"more\.json is not JSON .*there is more after its array"),
    "comma.json": (b'[{"text": "a"},]', r"comma\.json is not JSON at row 2"),
    "words.json": (b"hello", r"words\.json is not JSON at row 1"),
    "latin.json": ('["é"]'.encode("latin-1"), r"latin\.json is not UTF-8 .*convert the"),
    "deep.json": (b"[" * 100_000, r"deep\.json is not JSON"),
    "key.json": (
        b'[{"txt": "a"}]',
        r"^data\.text_key: .*key\.json row 1 has no key 'text'; did you mean 'txt'",
    ),
    "scalar.json": (b"[1]", r"scalar\.json row 1 has no key 'text'"),
    "key.csv": (b"body\na\n", r"key\.csv row 1 has no key 'text'; its keys are body"),
    "wide.csv": (b"text\na,b\n", r"wide\.csv row 1 has 2 fields, and its header has 1; put fields with ','"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n', r"cut\.jsonl line 2 is not JSON"),
    "later.jsonl": (b'{"text": "a"}\n{"text": "b"} x\n', r"later\.jsonl is not JSON at row 3"),
    "semicolons.csv": (
        b"n;text\n1;a\n",
        r"row 1 has no key 'text'; its fields are divided by ';'",
    ),
    "tabs.csv": (b"text\tn\na\t1\n", r"row 1 has no key 'text'; its fields are divided by tabs"),
    "wide.txt": ("a".encode("utf-16"), r"wide\.txt is not UTF-8; give UTF-8 text"),
    "no.arrow": (b"ARROW1\0\0", r"no\.arrow cannot be read by datasets"),
    "fetch.txt": (POINTER, r"fetch\.txt is a pointer of Git LFS; fetch the file: git lfs pull"),
    "fetch.parquet": (POINTER, r"fetch\.parquet is a pointer of Git LFS"),
    "quote.csv": (b'text\n"a\n', r"quote\.csv is not CSV: row 1 opens a quote and"),
    "latin.csv": ("text\né\n".encode("latin-1"), r"latin\.csv is not UTF-8"),
    "rows.jsonl.bz2": (b"BZh9\0\0", r"rows\.jsonl\.bz2 is binary; unpack it first"),
    "rows.TAR.GZ": (b"\x1f\x8b\0\0", r"rows\.TAR\.GZ is binary; unpack it first"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_table_is_one_sentence(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as refusal:
        read(path)
    assert len(str(refusal.value).splitlines()) == 1


def test_missing_fields_are_empty_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,text\n1,a\n\n2\n3,\n")
    source = open_source(str(path), "text")
    assert list(source.documents()) == ["a"]
    assert source.skipped == {"empty": 2}


def test_a_document_of_a_json_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "LARGEST_DOCUMENT", 1000)
    monkeypatch.setattr(row_files, "_BLOCK", 100)
    for name, content in (
        ("a.json", json.dumps([{"text": "x" * 2000}])),
        ("a.csv", "text\n" + "x" * 2000),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=r"more than 1 KB"):
            read(tmp_path / name)


def test_in_a_folder_json_and_tables_are_rows_if_they_have_the_key(tmp_path: Path) -> None:
    files = {
        "a.json": json.dumps([{"text": "one"}, {"text": "two"}]),
        "b.JSON": '{"text": "three"}\n{"text": "four"}',
        "c.csv": "id,text\n1,five\n",
        "package.json": '{"name": "x", "version": 1}',
        "prices.csv": "name,price\na,1\n",
        "words.json": "not JSON",
        "z.TXT": "six<|endoftext|>seven",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert read(tmp_path) == [
        "one", "two", "three", "four", "five", files["package.json"], files["prices.csv"],
        files["words.json"], "six", "seven",
    ]  # fmt: skip


def test_files_without_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, rows in (("a", ["one"]), ("b", []), ("c", ["two"])):
        table = pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "d.jsonl").write_text("\n\n")
    (tmp_path / "e.csv").write_text("")
    (tmp_path / "f.json").write_text("")
    source = open_source(str(tmp_path), "text")
    assert list(source.documents()) == ["one", "two"]
    assert source.skipped == {"empty": 4}
    for name, content in (
        ("d.jsonl", ""),
        ("e.csv", "text\n"),
        ("f.json", "[]"),
        ("i.jsonl", " [ ]"),
        ("g.tsv", ""),
        ("h.json", ""),
    ):
        (tmp_path / name).write_text(content)
    for name in ("b.parquet", "d.jsonl", "e.csv", "f.json", "g.tsv", "h.json", "i.jsonl"):
        with pytest.raises(UserError, match=r"holds no text \(1 left out: 1 empty\)"):
            api.tokenize(str(tmp_path / name), "byte", tmp_path / "out", vocab_size=257)


def test_a_pipe_that_is_called_json_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_data_set_that_was_saved_is_read_as_datasets_reads_it(shards: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": f"{number} é", "n": number} for number in range(6)])
    rows.save_to_disk(tmp_path / "first", num_shards=shards)
    datasets.load_from_disk(tmp_path / "first").map(
        lambda row: {"text": "a cache"}, cache_file_name=str(tmp_path / "first" / "cache-1.arrow")
    )
    assert read(tmp_path / "first") == datasets.load_from_disk(tmp_path / "first")["text"][:]
    file = next((tmp_path / "first").glob("data-*.arrow"))
    assert read(file) == theirs(file, "arrow")
    both = datasets.DatasetDict({"train": rows, "test": rows.select([2])})
    both.save_to_disk(tmp_path / "two")
    assert read(tmp_path / "two" / "test") == ["2 é"]
    for folder in (tmp_path / "two", tmp_path):
        with pytest.raises(UserError, match=r"two is a data set with the splits test, train; .*/two/test$"):
            read(folder)


def test_a_cache_of_the_hub_is_read_and_other_links_are_not(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "outside.jsonl").write_text('{"text": "no"}')
    repository = tmp_path / hub.file_download.repo_folder_name(repo_id="me/set", repo_type="dataset")
    (blobs := repository / "blobs").mkdir(parents=True)
    (snapshot := repository / "snapshots" / "abc" / "data").mkdir(parents=True)
    (blobs / "1234").write_text('{"text": "yes"}')
    (snapshot / "train.jsonl").symlink_to("../../../blobs/1234")
    (snapshot / "b.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (blobs / "5678").symlink_to(tmp_path / "outside.jsonl")
    (snapshot / "c.jsonl").symlink_to("../../../blobs/5678")
    for folder in (snapshot, snapshot.parent):
        source = open_source(str(folder), "text")
        assert list(source.documents()) == ["yes"]
        assert source.skipped == {"link": 2}


def test_files_of_text_that_are_left_out_are_told(tmp_path: Path) -> None:
    files = {"a.jsonl": b'{"text": "a"}', "b.jsonl.bz2": b"BZh9\0\0", "c.txt": b"\xe9", "d.png": b"\0"}
    files |= {"e.jsonl": POINTER, "f.txt": POINTER}
    for name, content in files.items():
        (tmp_path / "corpus" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_bytes(content)
    with pytest.warns(UserWarning) as told:
        counts = api.tokenize(str(tmp_path / "corpus"), "byte", tmp_path / "out", vocab_size=257)
    assert counts.skipped == {"compressed": 1, "not UTF-8": 1, "binary": 1, "pointer of Git LFS": 2}
    assert [str(each.message).rpartition(": ")[2] for each in told] == [
        "left out 1 compressed file; unpack what is to be read",
        "left out 2 pointers of Git LFS; fetch with git lfs pull what is to be read",
        "left out 1 text not in UTF-8; convert what is to be read",
    ]


WANTED = r"give an array of objects with a text each, as in \[.*\]$"
REMEDIES: dict[str, tuple[str, str]] = {
    "inside.json": (
        '{"data": [{"text": "a"}]}',
        rf"keys are data; if its rows are in 'data', .* alone: {WANTED}",
    ),
    "chat.jsonl": (
        '{"messages": [{"role": "user", "content": "a"}]}\n',
        r"keys are messages; data.format = 'chat' \(messages\) reads them; .* mixed by data.mixture$",
    ),
    "one.jsonl": ('{"body": "a", "n": 1}\n', r"its keys are body, n; give data\.text_key = 'body'$"),
    "alpaca.json": (
        '[{"instruction": "a", "output": "b"}]',
        r"output; data.format = 'alpaca' .*; to train on text alone, give data\.text_key = one of them",
    ),
    "numbers.jsonl": ('{"a": 1}\n', r"its keys are a; none of them is text"),
    "list.json": ('{"text": ["a", "b"]}', rf"'text' in .* row 1 is a list, not text; {WANTED}"),
    "number.json": ("5", rf"row 1 has no key 'text'; it is no object: {WANTED}"),
    "empty.json": ("{}", rf"it has no keys: {WANTED}"),
    "cut.jsonl": ('{"text": "a"}\n{"text": "b\n', r"line 2 is not JSON \(.*\); mend or remove that line$"),
    "quote.csv": ('text\n"a\n', r"opens a quote and does not close it; mend or remove that line$"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_row_without_its_text_says_what_to_do(name: str, tmp_path: Path) -> None:
    content, sentence = REMEDIES[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        read(tmp_path / name)
