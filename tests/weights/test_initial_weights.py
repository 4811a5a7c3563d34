"""Runs that start from weights: those of a folder to the bit in every layout, and a line that says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs_from_weights import exported_equals, flags, tokenizer_of, told, trained
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import CASES, read_whole, same_files, save_theirs
from meshwright import api
from meshwright.checkpoint.gather_full import gather_full
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec, UserError, load
from meshwright.train.step import Trainer
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks


def initial(mesh: Mesh, spec: RunSpec) -> dict[str, Tensor]:
    """The weights that a rank's run starts from, whole, on rank 0; moments must be zeros."""
    trainer = Trainer(spec, mesh)
    trainer.initialise(open_weights(spec))
    assert trainer.optimiser.updates == 0
    assert not any(moment.any() for moment in gather_full(trainer.optimiser.tensors(), mesh).values())
    return gather_full([*trainer.states.parameters(), *trainer.balance.biases().items()], mesh)


LAYOUTS: list[tuple[str, dict[str, object]]] = [
    ("llama", {"dp": 1}),
    ("llama", {"dp": 3, "zero": 3}),
    ("llama", {"tp": 2, "dp": 2, "zero": 2}),
    ("llama tied", {"pp": 2, "tp": 2}),
    ("llama tied", {"dp": 2, "replicate": 2, "zero": 3}),
    ("gpt2", {"tp": 4}),
    ("gpt2 untied", {"dp": 2, "zero": 3, "pp": 2}),
    ("qwen3 tied, biases", {"tp": 2, "dp": 3, "zero": 3}),
    ("mixtral", {"dp": 2, "ep": 2, "zero": 3}),
    ("qwen3_moe", {"tp": 2, "etp": 2, "dp": 2}),
    ("deepseek_v3", {"dp": 2, "ep": 2, "pp": 3}),
]


@pytest.mark.parametrize(
    ("case", "axes", "compute"),
    [
        pytest.param(*each, compute, marks=pytest.mark.full if (number + place) % 2 else ())
        for number, each in enumerate(LAYOUTS)
        for place, compute in enumerate(("fp32", "fp64"))
    ],
    ids=str,
)
def test_a_run_starts_from_the_folders_weights_to_the_bit_in_every_layout(
    case: str, axes: dict[str, object], compute: str, ranks: Ranks, tmp_path: Path
) -> None:
    save_theirs(tmp_path, *CASES[case])
    _, wanted = read_whole(tmp_path)
    given: dict[str, object] = {
        "model.hf": tmp_path, "data.corpus": "synthetic", "data.tokenizer": "byte", "data.seq_len": 32,
        "train.batch_tokens": 32 * 24, "precision.compute": compute, "layout.micro_batch": 1,
    }  # fmt: skip
    given |= {f"layout.{key}": value for key, value in axes.items()}
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    found, *others = ranks.run(spec.layout, initial, spec)
    assert not any(others) and found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].to(value.dtype), value), name


def test_weights_are_rounded_to_the_format_that_the_run_stores(theirs: Path, ranks: Ranks) -> None:
    given = flags(theirs, **{"model.hf": theirs, "precision.compute": "bf16", "precision.master": "bf16"})
    spec = load(None, list(given.items()))
    (found,) = ranks.run(spec.layout, initial, spec)
    for name, value in read_whole(theirs)[1].items():
        assert torch.equal(found[name], value.bfloat16()), name


def test_training_from_a_folder_and_back(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    given = flags(theirs, **{"model.hf": theirs, "layout.dp": 2, "layout.zero": 3})
    words = [word for key, text in given.items() for word in (f"--{key}", text)]
    assert main(["train", *words, "--out", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"weights: those of {theirs} (131k parameters), the optimiser and the step count start anew" in out
    exported_equals(theirs, run, tmp_path / "out")
    record = json.loads((run / "run.json").read_text())["spec"]
    assert record["model"]["weights"] == str(theirs)
    assert record["data"]["tokenizer"] == str(theirs / "tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (run / name).read_bytes() == (theirs / name).read_bytes(), name


def test_training_from_a_folder_equals_training_on_its_import(theirs: Path, tmp_path: Path) -> None:
    """`import` and a resume at step 0 are the way that both must agree on: loss, and every parameter."""
    how = {"train__steps": 3, "train__lr": 1e-2}
    direct = trained(theirs, tmp_path / "direct", model__hf=theirs, **how)
    api.import_hf(theirs, tmp_path / "run")
    trained_on = trained(theirs, tmp_path / "run", tmp_path / "run", "auto", **how)
    for key in ("final_loss", "parameters_sha256", "samples_sha256", "val_loss"):
        assert direct[key] == trained_on[key], key


def test_a_run_resumes_without_the_folder(theirs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    how = {"train__steps": 4, "train__lr": 1e-2}
    whole = trained(theirs, tmp_path / "whole", model__hf=folder, **how)
    trained(theirs, tmp_path / "run", model__hf=folder, train__stop_at=2, **how)
    shutil.rmtree(folder)
    resumed = trained(theirs, tmp_path / "run", tmp_path / "run", "auto", **how)
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]


def test_a_run_that_has_saved_nothing_yet_starts_from_the_weights_again(theirs: Path, tmp_path: Path) -> None:
    trained(theirs, tmp_path / "run", model__hf=theirs)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "events.jsonl").unlink()
    with pytest.warns(UserWarning, match="starts from its initial weights"):
        trained(theirs, tmp_path / "run", tmp_path / "run", "auto")
    exported_equals(theirs, tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("given", ["other", "random", "run"])
def test_a_resume_takes_no_other_weights(given: str, theirs: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", shutil.copytree(theirs, tmp_path / "other")
    tokenizer_of(other, words=["zz"])
    trained(theirs, run, model__hf=theirs, train__steps=2, train__stop_at=1)
    before = (run / "run.json").read_bytes()
    weights = {"other": str(other), "run": str(run)}.get(given, given)
    with pytest.raises(UserError, match=f"^model.weights: {weights} is not read by --resume"):
        trained(theirs, run, run, "auto", model__weights=weights)
    assert (run / "run.json").read_bytes() == before
    trained(theirs, run, run, "auto", model__weights=theirs.parent / "." / ".." / theirs.parent.name / "hf")
    record = json.loads(before)
    del record["spec"]["model"]["weights"]  # as runs from before the key have it
    (run / "run.json").write_text(json.dumps(record))
    trained(theirs, run, run, "auto", model__weights=weights)


def test_a_run_of_an_import_starts_from_what_was_imported(theirs: Path, tmp_path: Path) -> None:
    imported, other, third = tmp_path / "imported", tmp_path / "other", tmp_path / "third"
    api.import_hf(theirs, imported)
    first = imported / "checkpoints" / "step-00000000"
    assert told(theirs, imported).startswith(f"weights: those of {first} (131k parameters)")
    trained(theirs, other, imported)
    exported_equals(theirs, other, tmp_path / "first")
    trained(theirs, imported, imported, "auto", train__steps=3, train__lr=1e-2)  # trained on in its place
    moved = imported.rename(tmp_path / "moved")
    trained(theirs, third, moved / "run.json")
    exported_equals(theirs, third, tmp_path / "second")


def test_a_run_starts_from_the_weights_of_another(theirs: Path, tmp_path: Path) -> None:
    first, anew, second = tmp_path / "first", tmp_path / "anew", tmp_path / "second"
    trained(theirs, first, model__hf=theirs, train__lr=1e-2)
    line = told(theirs, first, model__weights=first)
    assert f"weights: those of {first} " in line and line.endswith(f"text by {first / 'tokenizer.json'}")
    trained(theirs, second, first, model__weights=first)
    api.export(first, tmp_path / "a")
    api.export(second, tmp_path / "b")
    same_files(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError):
        same_files(tmp_path / "a", theirs)
    trained(theirs, anew, first)  # its settings, and so from the folder
    exported_equals(theirs, anew, tmp_path / "c")


def test_a_run_of_random_weights_says_that_it_starts_anew(theirs: Path, tmp_path: Path) -> None:
    small = {
        "model__layers": 1,
        "model__hidden": 32,
        "model__ffn": 32,
        "model__heads": 2,
        "model__kv_heads": 2,
    }
    assert not told(theirs, **small)  # nobody expects others of a preset
    trained(theirs, tmp_path / "a", **small)
    line = told(theirs, tmp_path / "a")
    assert line.startswith(
        f"weights: random, the tokenizer new; of {tmp_path / 'a'} this run takes the settings"
    )
    assert f"give --model.weights {tmp_path / 'a'}" in line


@pytest.mark.parametrize("given", ["file", "config alone", "random"])
def test_architecture_alone_is_said(given: str, theirs: Path, tmp_path: Path) -> None:
    how: dict[str, object] = {"model__hf": theirs}
    if given == "file":
        how = {"model__hf": theirs / "config.json"}
    elif given == "config alone":
        (tmp_path / "hf").mkdir()
        shutil.copy(theirs / "config.json", tmp_path / "hf")
        how = {"model__hf": tmp_path / "hf"}
    else:
        how["model__weights"] = "random"
    line = told(theirs, **how)
    assert line.startswith(f"weights: random, the tokenizer new; of {how['model__hf']}")
    assert "this run takes the architecture alone" in line
    assert ("which holds no weights" in line) == (given != "random")
    trained(theirs, tmp_path / "run", **how)
    spec = json.loads((tmp_path / "run" / "run.json").read_text())["spec"]
    assert (spec["model"]["weights"], spec["data"]["tokenizer"]) == ("random", "bpe")
    api.export(tmp_path / "run", tmp_path / "out")
    ours, its = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", theirs))
    assert not torch.equal(ours["lm_head.weight"], its["lm_head.weight"])


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("model.layers", "5", "model.layers: 5 contradicts"),
        ("model.vocab_size", "299", "model.vocab_size: 299 leaves out tokens of the 300"),
        ("model.rope_theta", "5e5", "model.rope_theta: 500000.0 contradicts"),
        ("model.tied", "true", "model.tied: true contradicts"),
        ("model.sliding_window", "8", "model.sliding_window: 8 contradicts"),
        ("model.weights", "nowhere", "model.weights: nowhere is not there"),
        ("model.preset", "tiny", "model.preset: 'tiny' is given together with model.hf"),
        ("data.tokenizer", "nowhere/tokenizer.json", "data.tokenizer: there is no file"),
        ("data.tokenizer", "bpe", "data.tokenizer: 'bpe' trains a new tokenizer"),
    ],
)
def test_flags_that_contradict_the_folder_are_one_sentence(
    key: str, value: str, sentence: str, theirs: Path, tmp_path: Path
) -> None:
    given = flags(theirs, **{"model.hf": theirs, key: value})
    with pytest.raises(UserError) as refusal:
        api.train(load(None, list(given.items())), out=tmp_path / "run", quiet=True)
    assert sentence in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_flags_that_agree_with_the_folder_or_only_train_it_are_taken(theirs: Path, tmp_path: Path) -> None:
    trained(theirs, tmp_path / "run", model__hf=theirs, model__layers=3, model__init_std=0.1)
    exported_equals(theirs, tmp_path / "run", tmp_path / "out")


def test_damaged_weights_leave_no_folder_of_a_run(theirs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the tensor model\.norm\.weight"):
        trained(theirs, tmp_path / "run", model__hf=folder)
    assert not (tmp_path / "run").exists()


def test_float64_weights_are_kept_in_float64_and_rounded_with_a_warning(theirs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    tensors = {name: t.double() + 1e-12 for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="weights in float64, which this run rounds to fp32"):
        trained(theirs, tmp_path / "a", model__hf=folder)
    trained(theirs, tmp_path / "b", model__hf=folder, precision__compute="fp64")
    kept = api.load_run(tmp_path / "b").tensors()
    wanted = read_whole(folder)[1]
    assert all(torch.equal(kept[name], value) for name, value in wanted.items())


def test_flags_change_the_architecture_where_no_weights_are_taken(theirs: Path) -> None:
    """Plans, dry runs and `verify` know sizes and layouts; the values of weights are nothing to them."""
    given = flags(theirs, **{"model.hf": theirs, "model.layers": 2, "layout.tp": 2})
    assert load(None, list(given.items())).model.layers == 2


def test_the_flag_of_another_folder_replaces_the_model_of_a_run(theirs: Path, tmp_path: Path) -> None:
    trained(theirs, tmp_path / "run", model__layers=1, model__hidden=32, model__ffn=32)
    spec = load(tmp_path / "run", [("model.hf", str(theirs))])
    assert (spec.model.layers, spec.model.weights) == (3, str(theirs))
    assert spec.data.tokenizer == str(theirs / "tokenizer.json")
    assert load(tmp_path / "run", [("model.preset", "small")]).model.layers == 8
