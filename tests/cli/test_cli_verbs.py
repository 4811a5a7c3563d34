"""Calls and output of each verb, and the spec verbs from end to end."""

from __future__ import annotations

import json
import os
import pickle
import tomllib
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from stand_ins import be_rank, last_json, stand_in

from meshwright.api import folders, generation, runs
from meshwright.cli.main import main
from meshwright.data.shards import TokenShards
from meshwright.hardware.find import catalogue
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import from_tree


def test_train_passes_the_spec_and_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = stand_in(monkeypatch, "train", {"final_loss": 1.5, "steps": 7})
    assert (
        main(["train", "--train.steps", "7", "--nproc", "2", "--out", "o", "--resume", "auto", "--json"]) == 0
    )
    (spec,), named = train.only
    assert (spec.train.steps, spec.layout.dp) == (7, 2)
    assert named == {
        "out": Path("o"), "resume": "auto", "quiet": False, "supervise": True, "address": None,
        "doctor": False,
    }  # fmt: skip
    told = last_json(capsys)
    assert (told["final_loss"], told["steps"], told["status"]) == (1.5, 7, "finished")


def test_train_on_a_runs_folder_goes_on_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = from_tree({"layout": {"dp": 2}, "train": {"lr": 0.125}})
    (tmp_path / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
    train = stand_in(monkeypatch, "train", {})
    main(["train", str(tmp_path), "--resume", "auto"])
    assert train.only == (
        (spec,),
        {
            "out": tmp_path,
            "resume": "auto",
            "quiet": False,
            "supervise": True,
            "address": None,
            "doctor": False,
        },
    )


def test_a_run_without_out_gets_a_folder_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Noon:
            return cls(2026, 11, 26, 12, tzinfo=tz)

    monkeypatch.setattr(folders, "datetime", Noon)
    monkeypatch.chdir(tmp_path)
    names = []
    tracemalloc.start()
    for _ in range(3):
        names.append(folders.default_out().name)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert names == ["20261126-120000", "20261126-120000-2", "20261126-120000-3"]
    assert most < 2**20  # names are made one by one
    with ThreadPoolExecutor(8) as pool:  # runs that are started in one second
        found = list(pool.map(lambda _: folders.default_out(), range(8)))
    assert len(set(found)) == 8 and all(folder.is_dir() for folder in found)


def test_a_folder_of_a_run_that_did_not_begin_goes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError), folders.folder_of(None) as out:
        raise UserError("no corpus")
    assert not out.exists()
    with folders.folder_of(None) as out:
        (out / "run.json").touch()
    assert (out / "run.json").exists()
    with folders.folder_of(tmp_path / "given") as out:
        assert not out.exists()


def test_under_torchrun_train_is_a_rank_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = stand_in(monkeypatch, "train_worker", {"final_loss": 1.0}, runs)
    monkeypatch.setattr(runs, "run_on_ranks", None)
    outs = []
    for number in (0, 1):
        be_rank(monkeypatch, number)
        assert main(["train", "--json"]) == 0
        outs.append(rank.calls[-1][1]["out"])
        assert bool(capsys.readouterr().out) == (number == 0)
    assert rank.calls[0][0][0].layout.dp == 2
    assert outs[0] == outs[1]


def test_torchruns_ranks_must_be_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 0)
    with pytest.raises(UserError, match=r"dp=4 .* 2 were asked for"):
        main(["train", "--layout.dp", "4"])


def test_generate_passes_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    row = {"prompt": "def", "text": "def f(): pass"}
    (tmp_path / "run.json").write_text(json.dumps({"spec": from_tree({}).to_json()}))
    generate = stand_in(monkeypatch, "continue_prompts", [row], generation)
    main(["generate", str(tmp_path), "--prompt", "def", "--top-k", "5", "--temperature", "0.7", "--json"])
    run, rows, how, layout, on_text = generate.only[0]
    assert (run, rows, layout, on_text) == (tmp_path, [{"prompt": "def"}], [], None)
    assert (how["top_k"], how["temperature"], how["max_new_tokens"]) == (5, 0.7, 128)
    assert last_json(capsys) == row


def test_generate_starts_the_ranks_of_a_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They get the same options; a prompt may begin with dashes."""
    (tmp_path / "run.json").write_text(json.dumps({"spec": from_tree({}).to_json()}))
    start = stand_in(monkeypatch, "run_on_ranks", [], generation)
    main(["generate", str(tmp_path), "--prompt=--x", "--batch", "3", "--layout.tp", "2", "--json"])
    (call, ranks), _ = start.only
    run, rows, how, layout, on_text = pickle.loads(pickle.dumps(call)).args
    assert (run, layout, ranks, rows) == (tmp_path, [("layout.tp", "2")], 2, [{"prompt": "--x"}])
    assert (how["batch"], how["top_k"], on_text) == (3, None, None)


def test_checkpoint_verify_exits_with_1_and_a_line_for_each_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {"step": 4, "tensors": 9, "problems": []}
    stand_in(monkeypatch, "checkpoint_verify", found)
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "4"]) == 0
    stand_in(monkeypatch, "checkpoint_verify", {**found, "problems": ["rank0: head.weight is damaged"]})
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "meshwright: error: rank0: head.weight is damaged\n"
    assert json.loads(out.splitlines()[-1])["step"] == 4


def test_tokenize_tells_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "some"}\n{"text": ""}\n{"text": null}\n{"text": "a\\ud83dz"}\n')
    flags = ["--data.corpus", str(rows), "--data.tokenizer", "byte", "--out"]
    assert main(["tokenize", *flags, str(tmp_path / "first")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "left",
        "out",
        "2",
        "empty,",
        "1",
        "not",
        "UTF-8",
    ]
    rows.write_text('{"text": "some"}\n')
    assert main(["tokenize", *flags, str(tmp_path / "second")]) == 0
    assert "left out" not in capsys.readouterr().out


def test_data_verify_names_the_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some text " * 50)
    tokens = tmp_path / "tokens"
    words = ["--data.corpus", str(tmp_path / "text.txt"), "--data.tokenizer", "byte", "--out", str(tokens)]
    assert main(["tokenize", *words]) == 0
    assert main(["data", "verify", str(tokens)]) == 0
    path = tokens / "00000.tokens.bin"
    before, raw = path.stat(), bytearray(path.read_bytes())
    raw[7] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    capsys.readouterr()
    for _ in range(2):
        assert main(["data", "verify", str(tokens), "--json"]) == 1
        out, err = capsys.readouterr()
        assert err.startswith(f"meshwright: error: {path}: ") and err.count("\n") == 1
        found = json.loads(out.splitlines()[-1])
        assert found["documents"] == 1 and found["damaged"] == 1
    with pytest.raises(UserError, match="altered"):  # what was found to be damaged is not trusted any more
        TokenShards(tokens)
    (tokens / "meshwright-tokens.json").write_text("{")
    assert main(["data", "verify", str(tokens)]) == 1  # damaged too, where 2 would be a mistake of the caller
    out, err = capsys.readouterr()
    assert err.startswith("meshwright: error: ") and "documents" in out
    with pytest.raises(UserError, match=r"holds no meshwright-tokens\.json; give"):
        main(["data", "verify", str(tmp_path)])


def test_spec_show_prints_toml_that_loads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.preset", "qwen3-8b", "--train.clip", "none", "--layout.zero", "3", "--nproc", "2"]
    assert main(["spec", "show", *words]) == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    spec = load(file)
    assert (spec.layout.dp, spec.train.clip, spec.model.heads) == (2, None, 32)
    assert main(["spec", "show", str(file), "--json"]) == 0
    assert RunSpec.model_validate(last_json(capsys)) == spec
    assert tomllib.loads(file.read_text())["layout"]["zero"] == 3


def test_spec_check_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "check", "--layout.dp", "2", "--layout.micro_batch", "4"]) == 0
    line = " ".join(capsys.readouterr().out.split())
    for part in ("OK", "3.017M parameters", "world size 2", "2 microbatches of 4 sequences", "100 steps"):
        assert part in line
    main(["spec", "check", "--layout.dp", "2", "--json"])
    assert last_json(capsys)["world_size"] == 2


def test_spec_presets_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.spec.presets import PRESETS

    assert main(["spec", "presets"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert [line.split()[0] for line in table.splitlines()] == ["preset", *PRESETS]
    assert main(["spec", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"].keys() == RunSpec.model_fields.keys()


RUNS = """source,model,gpu,gpus,tp,pp,layers,hidden,heads,seq_len,micro_batch,global_batch_seqs,precision,\
step_seconds,peak_mem_gib
ours,gpt-a,h100,8,8,1,24,2048,16,2048,1,64,bf16,1.5,
ours,gpt-b,h100,8,1,1,96,12288,96,2048,1,64,bf16,,OOM
ours,gpt-c,h100,8,8,1,24,2048,16,2048,1,64,int4,1.5,
ours,gpt-d,h100,-8,8,1,24,2048,16,2048,1,64,bf16,1.5,
ours,gpt-e,h100,8,8,1,24,2048,16,2048,1,64,bf16,,9.5
""".replace("\\\n", "")


def test_validate_names_the_rows_that_it_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(RUNS)
    assert main(["validate", str(file), "--rows", "--json"]) == 0
    found = last_json(capsys)
    assert [each["row"] for each in found["each"]] == [0, 1, 4]
    assert [(each["row"], each["source"]) for each in found["skipped_rows"]] == [(2, "ours"), (3, "ours")]
    assert "'int4'" in found["skipped_rows"][0]["reason"]
    assert main(["validate", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 row not predicted (row 2, from 0): the precision 'int4' is not one of" in told
    assert "1 row not predicted (row 3, from 0): the cell 'gpus' is '-8'" in told
    assert main(["validate", str(file), "--rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    starts = {line[:4].strip(): line for line in lines[lines.index("rows, from 0, without the heading:") :]}
    assert "1.5 s measured" in starts["0"] and "GB measured" in starts["4"]
    assert starts["1"].endswith("did not fit, predicted not to fit")
    assert "not predicted" in starts["2"] and "'int4'" in starts["2"] and "'gpus' is '-8'" in starts["3"]


@pytest.mark.parametrize("words", [[], *[[name, "--count", "4096"] for name in catalogue()]], ids=" ".join)
def test_what_clusters_prints_is_readable(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    if words:
        assert words[0] in lines[0] and any(line.startswith("source") for line in lines)
    else:
        assert [line.split()[0] for line in lines] == ["cluster", *catalogue()]
    assert main(["clusters", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = [found] if words else found["clusters"]
    assert [each["name"] for each in known] == (words[:1] or list(catalogue()))
    for each in known:
        peak = each["device"]["peak"]
        assert each["source"] and peak["bf16" if "V100" not in each["device"]["name"] else "fp16"] > 0


def test_explain_prints_text_and_json_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["explain", "--model.preset", "tiny", "--layout.dp", "4", "--cluster", "h100"]
    assert main([*words, "--stack", "fsdp", "--out", str(tmp_path / "plan.html")]) == 0
    told = capsys.readouterr().out
    assert "4 x H100 SXM 80 GB (h100-sxm), stack fsdp" in told and "neighbours:" in told
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main([*words, "--json"]) == 0
    found = last_json(capsys)
    assert (found["devices"], found["stack"]) == (4, "meshwright") and found["neighbours"]


@pytest.mark.parametrize(
    ("flag", "name", "meant"), [("--stack", "fsdpp", "fsdp"), ("--cluster", "h101", "h100")]
)
def test_explain_knows_its_names(flag: str, name: str, meant: str) -> None:
    flags = {"--cluster": "h100", "--stack": "fsdp"} | {flag: name}
    with pytest.raises(UserError, match=f"{flag[2:]}.*'{name}'.*did you mean '{meant}"):
        main(["explain", *(word for pair in flags.items() for word in pair)])
