"""Runs that start from weights: those of a folder to the bit in every layout, and a line that says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from hf_models import CASES, read_whole, same_files, save_theirs
from meshwright import api
from meshwright.api.initial_weights import initial_weights_told
from meshwright.checkpoint.gather_full import gather_full
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.data.tokenizer import Tokenizer as Tokenizers
from meshwright.spec import RunSpec, UserError, load
from meshwright.train.step import Trainer
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks

WORDS = "the cat sat on the mat, naïvely"


def tokenizer_of(folder: Path, special: Sequence[str] = (), words: Sequence[str] = ()) -> None:
    """Save a byte-level BPE of 300 entries in a folder, with `special` ones and `words` added after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    letters = (f"{a}{b}{c} " for a in "abcdefg" for b in "hijkl" for c in "mnopq")
    tokenizer.train_from_iterator([WORDS * 50, *letters], trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with random weights and its tokenizer, and corpora beside it."""
    folder = tmp_path_factory.mktemp("theirs") / "hf"
    save_theirs(folder, "Llama", CASES["llama"][1] | {"vocab_size": 300})
    tokenizer_of(folder)
    rows = [json.dumps({"text": f"{WORDS} {number}"}) for number in range(60)]
    (folder.parent / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def flags(theirs: Path, **more: object) -> dict[str, str]:
    """Dotted flags of a short run on the folder's corpus, which changes no weight that is not 0."""
    given: dict[str, object] = {
        "data.corpus": theirs.parent / "corpus.jsonl", "data.cache": theirs.parent / "cache",
        "data.seq_len": 16, "train.batch_tokens": 64, "train.steps": 1, "train.lr": 1e-30, "layout.dp": 1,
    }  # fmt: skip
    return {key: str(value) for key, value in (given | more).items()}


def trained(
    theirs: Path, out: Path, path: Path | None = None, resume: str | None = None, **more: object
) -> Any:
    given = flags(theirs, **{key.replace("__", "."): value for key, value in more.items()})
    return api.train(load(path, list(given.items())), out=out, quiet=True, resume=resume)


def exported_equals(theirs: Path, run: Path, out: Path) -> None:
    api.export(run, out)
    same_files(out, theirs)


def initial(mesh: Mesh, spec: RunSpec) -> dict[str, Tensor]:
    """The weights that a rank's run starts from, whole, on rank 0; moments must be zeros."""
    trainer = Trainer(spec, mesh)
    trainer.initialise(open_weights(spec.model))
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


@pytest.mark.parametrize(("case", "axes"), LAYOUTS, ids=lambda each: str(each))
@pytest.mark.parametrize("compute", ["fp32", "fp64"])
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
    assert f"weights: those of {theirs} (131k parameters), the optimizer and the step count start anew" in out
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


def told(theirs: Path, path: Path | None = None, **more: object) -> str:
    """Return the line about the weights of a run with these flags, or ''."""
    given = flags(theirs, **{key.replace("__", "."): value for key, value in more.items()})
    return initial_weights_told(load(path, list(given.items())), path) or ""


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
        ("model.vocab_size", "320", "model.vocab_size: 320 contradicts"),
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


def test_weights_without_a_tokenizer_ask_for_one(theirs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(
        UserError, match=r"^data.tokenizer: 'bpe' trains a new tokenizer, .*; give the tokeni"
    ):
        trained(theirs, tmp_path / "run", model__hf=folder)
    assert not (tmp_path / "run").exists()
    trained(theirs, tmp_path / "run", model__hf=folder, data__tokenizer=tmp_path / "tokenizer.json")
    exported_equals(theirs, tmp_path / "run", tmp_path / "out")


def test_another_tokenizer_than_the_weights_is_said(theirs: Path, tmp_path: Path) -> None:
    how = {"model__hf": theirs, "data__tokenizer": "byte"}
    assert "text by byte, not by" in told(theirs, **how)
    trained(theirs, tmp_path / "run", **how)
    kept = json.loads((tmp_path / "run" / "tokenizer.json").read_text())
    assert kept != json.loads((theirs / "tokenizer.json").read_text())


def test_the_tokenizer_of_the_weights_by_another_path_is_not_another(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.import_hf(theirs, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    line = told(theirs, Path("run"), model__weights="run")
    assert "those of run " in line and "not by" not in line


def test_ids_that_are_other_tokens_in_the_tokenizer_are_its_own(theirs: Path, tmp_path: Path) -> None:
    """A generation ends as documents do, and both exports say so."""
    folder, other = Path(shutil.copytree(theirs, tmp_path / "hf")), tmp_path / "tokenizer"
    other.mkdir()
    tokenizer_of(other)
    tree = json.loads((other / "tokenizer.json").read_text())
    entries = tree["model"]["vocab"]
    entries["</s>"], entries["!"] = entries["!"], entries["</s>"]
    tree["added_tokens"][1]["id"] = entries["</s>"]
    (other / "tokenizer.json").write_text(json.dumps(tree))
    settings = {"eos_token_id": [1], "pad_token_id": -1, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    run, how = tmp_path / "run", {"data__tokenizer": other, "data__cache": tmp_path / "cache"}
    with pytest.warns(UserWarning, match="has other tokens than .* at .*, ids that the configs"):
        trained(theirs, run, model__hf=folder, **how)
    api.export(run, tmp_path / "out")
    api.export(run, tmp_path / "out.gguf")
    end = entries["</s>"]
    assert Tokenizers.open(run).tokens.stop_ids == (end,) and end != 1
    config, generation = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert config["eos_token_id"] == end and generation.get("eos_token_id", end) == end
    assert generation["temperature"] == 0.5
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert int(reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0]) == end


IDS = {"bos_token_id": 3, "eos_token_id": [5, 1], "pad_token_id": 4}


def test_the_ids_of_the_weights_come_along(theirs: Path, tmp_path: Path) -> None:
    """A tokenizer that does not name its END has it from config.json, in the run and in the export, too."""
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "a"}))
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IDS))
    run = tmp_path / "run"
    trained(theirs, run, model__hf=folder, data__cache=tmp_path / "cache")
    source = Tokenizers.open(folder)
    assert source.tokens.stops == (5, 1)
    assert Tokenizers.open(run).tokens == source.tokens
    api.export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in IDS} == IDS


@pytest.mark.parametrize("names_end", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat.json"])
def test_the_files_of_a_tokenizer_elsewhere_come_along(
    name: str, names_end: bool, theirs: Path, tmp_path: Path
) -> None:
    """The files are the tokenizer's, and what ends a generation is the weights'."""
    folder, other = Path(shutil.copytree(theirs, tmp_path / "hf")), tmp_path / "tokenizer"
    other.mkdir()
    tokenizer_of(other)
    (other / "tokenizer.json").rename(other / name)
    given = {"pad_token": "</s>", "chat_template": "{{ 1 }}"} | ({"eos_token": "<s>"} if names_end else {})
    (other / "tokenizer_config.json").write_text(json.dumps(given))
    (other / "chat_template.jinja").write_text("{{ 2 }}")
    (other / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IDS))
    run = tmp_path / "run"
    trained(
        theirs, run, model__hf=folder, data__tokenizer=other / name, data__cache=tmp_path / "cache",
    )  # fmt: skip
    source, kept = Tokenizers.open(other / name), Tokenizers.open(run)
    assert (kept.end_id, kept.tokens.before) == (source.end_id, ()) and source.end_id == 0
    assert (kept.content_sha256, kept.tokens.stops) == (source.content_sha256, (1, 7))
    assert (run / "tokenizer.json").read_bytes() == (other / name).read_bytes()
    assert (run / "chat_template.jinja").read_text() == "{{ 2 }}"
    assert given.items() <= json.loads((run / "tokenizer_config.json").read_text()).items()
    api.export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in IDS} == IDS


def test_tokens_of_another_tokenizer_are_refused(theirs: Path, tmp_path: Path) -> None:
    api.tokenize(str(theirs.parent / "corpus.jsonl"), "byte", tmp_path / "tokens", vocab_size=300)
    with pytest.raises(
        UserError, match=r"tokenized with another .*; tokenize the corpus again with that of the w"
    ):
        trained(theirs, tmp_path / "run", model__hf=theirs, data__corpus=tmp_path / "tokens")


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


def test_a_tokenizer_with_more_entries_than_the_model_trains_until_one_occurs(
    theirs: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    tokenizer_of(folder, special=["[PAD]"], words=["zebra"])  # numbers 300 and 301
    rows = [json.dumps({"text": f"the cat sat [PAD] {number}"}) for number in range(60)]
    (tmp_path / "without.jsonl").write_text("\n".join(rows))
    (tmp_path / "with.jsonl").write_text("\n".join([*rows, '{"text": "the cat and the zebra"}', *rows]))
    trained(theirs, tmp_path / "run", model__hf=folder, data__corpus=tmp_path / "without.jsonl")
    exported_equals(theirs, tmp_path / "run", tmp_path / "out")
    api.import_hf(folder, tmp_path / "imported")
    how = {"data__corpus": tmp_path / "without.jsonl"}
    trained(theirs, tmp_path / "imported", tmp_path / "imported", "auto", **how)
    with pytest.raises(
        UserError, match=r"has 302 entries, .* 300, .*: 'zebra', number 301, in '.*cat and the zebra"
    ):
        trained(theirs, tmp_path / "other", model__hf=folder, data__corpus=tmp_path / "with.jsonl")
    shards = tmp_path / "tokens"
    api.tokenize(str(tmp_path / "with.jsonl"), str(folder / "tokenizer.json"), shards, vocab_size=302)
    with pytest.raises(UserError, match=r"'zebra', number 301"):
        trained(theirs, tmp_path / "other", model__hf=folder, data__corpus=shards)
    config = {"eos_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"'\[PAD\]', which ends a document, is number 300; .* another eos_token"
    ):
        trained(theirs, tmp_path / "other", model__hf=folder, data__corpus=tmp_path / "without.jsonl")
