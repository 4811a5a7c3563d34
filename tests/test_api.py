"""The Python API, on real processes and real files: train, resume, generate, export, import, inspect."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import small
from layouts import EXPERTS
from meshwright import api
from meshwright.api.models import checkpoints_of
from meshwright.checkpoint import Lease
from meshwright.cli.main import main
from meshwright.spec import RunSpec, UserError, load

KEYS = {
    "final_loss", "val_bits_per_byte", "tokens_per_second", "mfu", "peak_memory_bytes", "parameters_sha256",
    "samples_sha256", "steps",
}  # fmt: skip


def spec_of(folder: Path, **flags: object) -> RunSpec:
    base = {
        "model.vocab_size": 300,
        "data.corpus": folder / "text",
        "data.tokenizer": "byte",
        "data.seq_len": 16,
        "data.cache": folder / "tokens",
        "data.val_fraction": 0.1,
        "train.batch_tokens": 128,
        "train.steps": 6,
        "train.eval_tokens": 256,
    }
    return small.spec_of(base, **flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    (folder / "text").mkdir()
    for number in range(20):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(60))
        (folder / "text" / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of two real processes, with a ZeRO-3 layout."""
    out = folder / "run"
    flags: dict[str, object] = {"train__steps": 10, "train__stop_at": 6}
    result = api.train(spec_of(folder, layout__dp=2, layout__zero=3, **flags), out=out, quiet=True)
    assert result.keys() >= KEYS
    assert result["steps"] == 6 and result["parameters"] == spec_of(folder).model.parameters
    assert result == json.loads((out / "result.json").read_text())
    return out


def test_a_run_leaves_its_record(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {"run.json", "metrics.jsonl", "events.jsonl", "result.json", "report.html"}
    assert names >= {"checkpoints", "tokenizer.json"}
    assert load(run).layout.zero == 3
    sample = json.loads((run / "result.json").read_text())["sample"]
    assert sample["prompt"].startswith("document ")


def test_a_run_tells_its_machine_its_commit_and_each_rank(run: Path) -> None:
    info, result = (json.loads((run / name).read_text()) for name in ("run.json", "result.json"))
    assert info["machine"]["hosts"] == 1 and info["machine"]["cores"] >= 1 and "commit" in info
    assert [row["place"] for row in result["ranks"]] == [{"dp": 0}, {"dp": 1}]
    for row in result["ranks"]:
        assert 0 < row["states_bytes"] < row["memory_before_bytes"] <= row["peak_memory_bytes"]
        assert row["step_seconds"] > 0 and 0 <= row["waiting"] <= 1
    assert result["peak_memory_bytes"] == max(row["peak_memory_bytes"] for row in result["ranks"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [row["elapsed_seconds"] for row in rows if "loss" in row]
    assert times == sorted(times) and times[0] > 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Python, libraries, corpus" in page and "<h2>Ranks</h2>" in page


def test_a_run_is_not_overwritten(run: Path, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(UserError, match="already holds a run"):
        api.train(spec_of(folder), out=run, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_used_folder_is_refused_before_any_rank_starts(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.api.runs.run_on_ranks", None)
    with pytest.raises(UserError, match="already holds a run; continue it with --resume auto"):
        api.train(spec_of(folder), out=run, supervise=True)


def test_a_corpus_that_is_not_there_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.corpus"):
        api.train(spec_of(folder, data__corpus=tmp_path / "gone"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resume_in_this_process_from_two(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out, symlinks=True)
    moved = load(out, [("layout.dp", "1"), ("layout.zero", "0")])
    result = api.train(moved, out=out, resume="auto", quiet=True)
    assert result["steps"] == 10  # the earlier stop is not remembered
    assert [row["step"] for row in map(json.loads, (out / "metrics.jsonl").open()) if "loss" in row] == [
        *range(1, 11)
    ]


def test_a_run_imports_no_compiler(folder: Path, tmp_path: Path) -> None:
    """Nor does one that goes on from a checkpoint: Dynamo takes most of a second to import."""
    model = {**EXPERTS, "model.moe.dense_first": 1}  # a layer of each kind
    spec = spec_of(folder, **{**model, "train.steps": 2, "checkpoint.every": 1})
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"spec": spec.to_json()}))
    script = (
        "import sys; from pathlib import Path; from meshwright import api; from meshwright.spec import load\n"
        "spec, out = load(Path(sys.argv[1])), Path(sys.argv[2])\n"
        "api.train(spec, out=out, quiet=True); api.train(spec, out=out, resume=1, quiet=True)\n"
        "print([name for name in ('torch.optim', 'torch._dynamo') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(file), str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.splitlines()[-1] == "['torch.optim']"


def test_generate_and_export_agree(run: Path, tmp_path: Path) -> None:
    text = api.generate(run, "document", max_new_tokens=12)
    assert isinstance(text, str)
    api.export(run, tmp_path / "hf", "float32")
    assert api.generate(tmp_path / "hf", "document", max_new_tokens=12) == text
    decoder = api.load_hf(tmp_path / "hf")
    tokens = torch.randint(0, 300, (2, 9))
    with torch.no_grad():
        assert torch.equal(decoder(tokens), api.load_run(run)(tokens))


def test_a_layout_of_its_own_generates_the_same_text(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real ranks, with other axes than the two that trained; an HF folder is imported first."""
    prompts = ["document 3: word", "word5 word8 word41", "d"]
    alone = api.generate(run, prompts, max_new_tokens=12)
    assert len(set(alone)) > 1
    assert api.generate(run, prompts, max_new_tokens=12, layout=[("layout.tp", "2")], batch=2) == alone
    api.export(run, tmp_path / "hf")
    layout = {"layout.pp": 2, "layout.dp": 2}
    assert api.generate(tmp_path / "hf", prompts, max_new_tokens=12, layout=layout) == alone
    assert capfd.readouterr().out == ""
    with pytest.raises(UserError, match="is an HF folder, which has one set of weights"):
        api.generate(tmp_path / "hf", prompts, weights="ema", layout=layout)


def test_a_closed_pipe_ends_the_ranks_of_a_generation_quietly(run: Path) -> None:
    words = f"{sys.executable} -m meshwright generate {run} --layout.tp 2 --prompt document"
    script = f"{words} --max-new-tokens 200 | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_more_ranks_than_a_host_has_memory_for_is_one_sentence(run: Path) -> None:
    with pytest.raises(UserError, match=r"1000000 ranks on one host: .* give fewer ranks"):
        api.generate(run, "document", layout={"layout.dp": 1_000_000})


def test_prompts_and_their_continuations_are_files(run: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('\ufeff{"prompt": "document 3", "id": 7}\r\n\n{"prompt": "", "text": 1}\n')
    words = ["generate", str(run), "--prompts", str(prompts), "--max-new-tokens", "3", "--out"]
    assert main([*words, str(out)]) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["id"], first["new_tokens"], first["stopped"]) == (7, 3, False)
    assert first["text"] == api.generate(run, "document 3", max_new_tokens=3)
    assert second["text"] == api.generate(run, "", max_new_tokens=3)
    kept = out.read_text()
    for name, reason in ((prompts, "is the file of --prompts"), (tmp_path, "is a folder"),
                         (tmp_path / "no" / "x", "there is no folder")):  # fmt: skip
        with pytest.raises(UserError, match=f"--out: .*{reason}"):
            main([*words, str(name)])
    for text, reason in (
        ("{", "line 1 .* is not JSON"),
        ('{"a": 1}', 'no text "prompt"'),
        ("\n", "no prompt"),
    ):
        prompts.write_text(text)
        with pytest.raises(UserError, match=f"--prompts: .*{reason}"):
            main([*words, str(out)])
    assert out.read_text() == kept


def test_a_run_on_synthetic_numbers_has_no_text_to_generate(tmp_path: Path) -> None:
    base = {"data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 64, "train.steps": 1}
    api.train(small.spec_of(base), out=tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"'synthetic'.* no tokenizer to read a prompt; generate from a run"):
        api.generate(tmp_path / "run", "a")
    with pytest.warns(UserWarning, match=r"has no tokenizer\.json, so .*hf has none"):
        api.export(tmp_path / "run", tmp_path / "hf")


@pytest.mark.parametrize(("key", "value"), [("norm_eps", 0.5), ("rope_theta", 77.0), ("tied", True)])
def test_a_record_that_was_changed_generates_and_exports_nothing(
    run: Path, tmp_path: Path, key: str, value: object
) -> None:
    edited = tmp_path / "run"
    shutil.copytree(run, edited)
    record = json.loads((edited / "run.json").read_text())
    before, record["spec"]["model"][key] = record["spec"]["model"][key], value
    (edited / "run.json").write_text(json.dumps(record))
    change = f"model.{key} was {json.dumps(before)} and is {json.dumps(value)}"
    words = f"changed after the checkpoint of step 6 .* {change}"
    for call in (lambda: api.generate(edited, "a"), lambda: api.export(edited, tmp_path / "hf")):
        with pytest.raises(UserError, match=words):
            call()
    assert not (tmp_path / "hf").exists()


def test_import_goes_on_training(run: Path, folder: Path, tmp_path: Path) -> None:
    api.export(run, tmp_path / "hf")
    api.import_hf(tmp_path / "hf", tmp_path / "again")
    tokens = torch.randint(0, 300, (1, 9))
    with torch.no_grad():
        assert torch.equal(api.load_run(tmp_path / "again")(tokens), api.load_run(run)(tokens))
    moved = (tmp_path / "again").rename(tmp_path / "moved")
    flags = [(f"data.{key}", str(value)) for key, value in spec_of(folder).data.model_dump().items()
             if key in ("corpus", "seq_len", "cache", "val_fraction")]  # fmt: skip
    flags += [("train.batch_tokens", "128"), ("train.steps", "3")]
    result = api.train(load(moved, flags), out=moved, resume="auto", quiet=True)
    trained = json.loads((run / "result.json").read_text())
    assert result["steps"] == 3
    assert result["final_loss"] < trained["final_loss"] + 1


def test_checkpoints_are_listed_and_checked(run: Path) -> None:
    (row,) = api.checkpoint_list(run / "checkpoints")
    assert row["step"] == 6 and row["latest"] and row["problem"] is None and row["layout"] == "dp=2, zero=3"
    assert api.checkpoint_verify(run / "checkpoints")["problems"] == []


def test_a_flipped_bit_is_refused_and_the_run_stays(run: Path, folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, train__steps=2)
    api.train(spec, out=tmp_path, quiet=True)
    piece = next((tmp_path / "checkpoints").rglob("*.bin"))
    damaged = bytearray(piece.read_bytes())
    damaged[100] ^= 1
    piece.write_bytes(damaged)
    assert api.checkpoint_verify(tmp_path / "checkpoints")["problems"]
    with pytest.raises(UserError, match=piece.name):
        api.train(load(tmp_path, [("train.steps", "4")]), out=tmp_path, resume="auto", quiet=True)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2


def test_verify_on_real_processes(folder: Path, tmp_path: Path) -> None:
    found = api.verify(spec_of(folder, layout__dp=2, layout__zero=2), steps=2, out=tmp_path / "verified")
    assert found["equal"] and found["worst_relative"] <= 1e-10
    assert json.loads((tmp_path / "verified" / "verify.json").read_text()) == found


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run, tmp: api.export(run, tmp / "hf", "int8"), "float32, bfloat16, float16"),
        (lambda run, tmp: api.generate(run, "\ud800"), "the prompt is not valid text"),
        (lambda run, tmp: api.generate(run, ["a", "\ud800"]), "prompt 2 of 2 is not valid text"),
        (lambda run, tmp: api.generate(run, [1]), "prompt: 1 is not valid"),
        (lambda run, tmp: api.generate(run, "a", batch=0), "batch: 0"),
        (lambda run, tmp: api.generate(run, "a", max_new_tokens=1.5), "max_new_tokens: 1.5"),
        (lambda run, tmp: api.generate(run, "a", max_new_tokens=10**30), "max_new_tokens: 10"),
        (lambda run, tmp: api.generate(run, "a", top_k=3), "top_k 3 has no effect at temperature 0"),
        (lambda run, tmp: api.generate(tmp, "a", layout={"layout.tp": 2}), "neither a run's folder"),
        (lambda run, tmp: api.generate(run, "a", seed=2**64), "seed"),
        (lambda run, tmp: api.generate(run, "a", max_new_tokens=10**12), "max_new_tokens"),
        (lambda run, tmp: api.verify(load(run), steps=0), "steps"),
        (lambda run, tmp: api.checkpoint_list(tmp / "gone"), "does not exist"),
        (lambda run, tmp: api.import_hf(tmp, Path("/proc/nowhere")), "config.json"),
    ],
)
def test_mistakes_are_sentences(run: Path, tmp_path: Path, call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as mistake:
        call(run, tmp_path)
    assert words in str(mistake.value) and "\n" not in str(mistake.value)


def test_a_damaged_newest_checkpoint_is_told(folder: Path, tmp_path: Path) -> None:
    api.train(spec_of(folder, train__steps=4, checkpoint__every=2), out=tmp_path, quiet=True)
    (piece,) = (tmp_path / "checkpoints" / "step-00000004").glob("*.bin")
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-00000002 is used instead"):
        api.load_run(tmp_path)


def test_a_later_start_without_a_checkpoint_is_told(folder: Path, tmp_path: Path) -> None:
    """The first one with `--resume auto`, as scripts of jobs have it, is as any first start."""
    first, later = tmp_path / "first", tmp_path / "later"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.train(spec_of(folder, train__steps=1), out=first, resume="auto", quiet=True)
    later.mkdir()
    shutil.copy(first / "run.json", later)  # as a run leaves it that was killed before its first checkpoint
    with pytest.warns(UserWarning, match="starts from its initial weights"):
        api.train(spec_of(folder, train__steps=1), out=later, resume="auto", quiet=True)
    for out, told in ((first, False), (later, True)):
        messages = [str(json.loads(line).get("message")) for line in (out / "events.jsonl").open()]
        assert any("starts from its initial weights" in message for message in messages) == told


def test_the_checkpoints_of_a_run_are_found_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, train__steps=1, checkpoint__dir=tmp_path / "elsewhere")
    api.train(spec, out=tmp_path / "run", quiet=True)
    assert [row["step"] for row in api.checkpoint_list(tmp_path / "run")] == [1]
    assert api.checkpoint_verify(tmp_path / "run")["problems"] == []


def test_a_folder_of_checkpoints_is_found_without_the_run_s_record(tmp_path: Path) -> None:
    assert checkpoints_of(tmp_path) == tmp_path
    (tmp_path / "checkpoints").mkdir()
    assert checkpoints_of(tmp_path) == tmp_path / "checkpoints"


def test_a_resume_whose_checkpoints_are_gone_is_refused(folder: Path, tmp_path: Path) -> None:
    spec, out = spec_of(folder, train__steps=2), tmp_path / "run"
    api.train(spec, out=out, quiet=True)
    metrics = (out / "metrics.jsonl").read_bytes()
    other = spec_of(folder, train__steps=2, checkpoint__dir=tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"elsewhere holds no checkpoint, but .*run has saved one at step 2"):
        api.train(other, out=out, resume="auto", quiet=True)
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_two_runs_cannot_share_a_folder(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with Lease(out, "another run"), pytest.raises(UserError, match="in use by another run"):
        api.train(spec_of(folder, checkpoint__dir=tmp_path / "elsewhere"), out=out, quiet=True)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.filterwarnings("ignore:RunRecord misses a part of the run")
@pytest.mark.parametrize("shared", [False, True])
def test_a_run_that_lost_its_folder_leaves_the_record_alone(
    folder: Path, tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.train.loop import TrainingRun

    out, lease = tmp_path / "run", tmp_path / "run" / "lease.json"
    save = TrainingRun._save_last

    def taken_over(run: TrainingRun) -> None:
        save(run)
        lease.write_text(json.dumps({**json.loads(lease.read_text()), "token": "another's"}))
        (out / "result.json").write_text('{"steps": 77}')

    monkeypatch.setattr(TrainingRun, "_save_last", taken_over)
    spec = spec_of(folder, train__steps=2, checkpoint__dir=out if shared else tmp_path / "elsewhere")
    with pytest.raises(UserError, match="lost the lease"):
        api.train(spec, out=out, quiet=True)
    assert (out / "result.json").read_text() == '{"steps": 77}'


def test_the_run_s_folder_may_be_the_folder_of_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, train__steps=1, checkpoint__dir=tmp_path)
    assert api.train(spec, out=tmp_path, quiet=True)["steps"] == 1


@pytest.mark.parametrize(("resume", "words"), [("5", "no checkpoint of step 5"), ("newest", "neither")])
def test_a_refused_resume_leaves_nothing(folder: Path, tmp_path: Path, resume: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        api.train(spec_of(folder), out=tmp_path / "run", resume=resume, quiet=True)
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_made_are_sentences(folder: Path, tmp_path: Path) -> None:
    nowhere = Path("/proc/nowhere")
    with pytest.raises(UserError, match="/proc/nowhere cannot be made"):
        api.train(spec_of(folder, checkpoint__dir=tmp_path), out=nowhere, quiet=True)
    with pytest.raises(UserError, match="/proc/nowhere cannot be made"):
        api.verify(spec_of(folder), out=nowhere)


def test_a_finished_run_that_starts_again_writes_no_row_twice(folder: Path, tmp_path: Path) -> None:
    for resume in (None, "auto"):
        api.train(spec_of(folder, train__steps=2), out=tmp_path, resume=resume, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [("val_loss" in row, row["step"]) for row in rows] == [(False, 1), (False, 2), (True, 2)]
