"""Exports to URLs: the files of the same export to a disk, and nothing left where one fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servers import Bucket

from meshwright import api
from meshwright.cli.main import main
from meshwright.data.tokenizer import train_bpe
from meshwright.exchange.hf import export_hf
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import UserError
from meshwright.storage import remote, upload
from small_decoders import make_decoder


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)


def export(target: Path | str) -> None:
    """Write a small decoder in several files."""
    decoder = make_decoder()
    export_hf(target, decoder.spec, decoder.tensors(), max_shard_bytes=30_000)


def imported(tmp_path: Path) -> Path:
    """A run's folder with a small decoder and a BPE."""
    spec = make_decoder().spec.model_copy(update={"vocab_size": 270})
    decoder = init_whole_(Decoder(spec), seed=1)
    train_bpe(["some words and more words"], 270).save(tmp_path)
    export_hf(tmp_path / "hf", spec, decoder.tensors(), tmp_path / "tokenizer.json")
    api.import_hf(tmp_path / "hf", tmp_path / "run")
    return tmp_path / "run"


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_writes_the_files_of_a_disk_to_s3(
    s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(imported(tmp_path))
    assert main(["export", run, str(tmp_path / "disk"), "--dtype", "float16"]) == 0
    capsys.readouterr()
    assert main(["export", run, "s3://bucket/models/disk", "--dtype", "float16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "s3://bucket/models/disk"}
    assert s3.files("models/disk") == on_disk(tmp_path / "disk")
    with pytest.raises(
        UserError, match=r"^export: s3://bucket/models/disk exists, and is not an empty folder"
    ) as told:
        main(["export", run, "s3://bucket/models/disk"])
    assert told.value.code == 2
    (tmp_path / "of url").mkdir()
    assert main(["export", run, f"file://{tmp_path}/of url/disk", "--dtype", "float16"]) == 0
    assert on_disk(tmp_path / "of url" / "disk") == on_disk(tmp_path / "disk")


def test_files_are_sent_one_by_one_and_the_config_last(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []
    send = upload.upload

    def watched(file: Path, url: str, key: str) -> None:
        sent.append((file.name, sum(each.suffix == ".safetensors" for each in file.parent.iterdir())))
        send(file, url, key)

    monkeypatch.setattr(upload, "upload", watched)
    export("s3://bucket/models/b/")
    export(tmp_path / "disk")
    assert s3.files("models/b") == on_disk(tmp_path / "disk")
    weights = [name for name, _ in sent if name.endswith(".safetensors")]
    assert len(weights) > 2 and [name for name, _ in sent][: len(weights)] == weights
    assert max(count for _, count in sent) == 1  # of the weights one file is on the disk at a time
    assert sent[-1][0] == "config.json"


@pytest.mark.filterwarnings("ignore:.*it is sent again")
def test_a_cut_connection_is_got_over(s3: Bucket, tmp_path: Path, no_wait: None) -> None:
    export(tmp_path / "disk")
    s3.proxy.cuts, s3.proxy.done = [700, 20, 300], 0
    export("s3://bucket/models/c")
    assert s3.proxy.done == 3
    assert s3.files("models/c") == on_disk(tmp_path / "disk")


def test_what_was_sent_is_removed_when_an_export_fails(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, no_wait: None
) -> None:
    store, _ = remote.filesystem("s3://bucket/models", "export")
    put, tries = store.put_file, []

    def fails(file: str, path: str) -> None:
        tries.append(path)
        if "00003" in path:
            raise ConnectionResetError("reset by peer")
        put(file, path)

    monkeypatch.setattr(store, "put_file", fails)
    with (
        pytest.warns(
            UserWarning, match=r"models/d/model-00003-.* was cut \(reset by peer\); it is sent again"
        ),
        pytest.raises(
            UserError, match=r"export: s3://bucket/models/d/model-00003-.* cannot be written"
        ) as told,
    ):
        export("s3://bucket/models/d")
    assert told.value.code == 2 and "\n" not in str(told.value)
    assert len(tries) == 2 + remote.TRIES
    assert s3.files("models/d") == {}


def test_a_gguf_file_is_sent(s3: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf of the extra gguf writes GGUF files")
    run = imported(tmp_path)
    api.export(run, tmp_path / "m.gguf")
    api.export(run, "s3://bucket/gguf/m.gguf")
    assert s3.files("gguf") == {"m.gguf": (tmp_path / "m.gguf").read_bytes()}
    with pytest.raises(UserError, match=r"export: s3://bucket/gguf/m\.gguf exists"):
        api.export(run, "s3://bucket/gguf/m.gguf")


@pytest.mark.parametrize("url", ["http://host/folder", "https://host/m.gguf"])
def test_http_is_not_written_to(url: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^export: http.* cannot be written to; give a folder of a disk, s3://"
    ):
        upload.check_new(url, "export")
