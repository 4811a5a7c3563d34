"""Folders of runs that were changed or forged: what the checkpoint does not know is not used."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import small
from faults import write_root
from meshwright import api
from meshwright.checkpoint import CheckpointStore
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.manifest import DTYPES
from meshwright.checkpoint.reader import parse_manifest, read_manifest_text
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec import UserError, load
from meshwright.weights.load import import_run

STEP = Path("checkpoints") / "step-00000002"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    words = " ".join(f"word{i * i % 97}" for i in range(2_000))
    (folder / "text.txt").write_text(words + "\n" + words[::-1])
    flags = {
        "model.vocab_size": 300, "data.corpus": folder / "text.txt", "data.tokenizer": "bpe:280",
        "data.seq_len": 16, "data.cache": folder / "cache", "data.val_fraction": 0, "train.batch_tokens": 64,
        "train.steps": 2,
    }  # fmt: skip
    api.train(small.spec_of(flags), out=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refusal:
        call()
    words = str(refusal.value)
    assert len(words.splitlines()) == 1 and len(words) < 600
    return words


def both(run: Path) -> list[Callable[[], Any]]:
    return [
        lambda: api.generate(run, "word", max_new_tokens=2),
        lambda: api.export(run, run.parent / "out"),
    ]


def test_no_flipped_bit_of_the_tokenizer_is_used_unseen(run: Path) -> None:
    """A bit may change how the file is written, but not which tokenizer it holds."""
    file, draw = run / "tokenizer.json", random.Random(0)
    original, before = file.read_bytes(), Tokenizer.open(file).digest
    unseen = 0
    for position in draw.sample(range(len(original)), 200):
        data = bytearray(original)
        data[position] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        try:
            api.load_run(run)
        except UserError as error:
            assert "tokenizer" in str(error) and len(str(error).splitlines()) == 1
        else:
            assert Tokenizer.open(file).digest == before, f"byte {position}"
            unseen += 1  # such as a bit of a key that has its default value
    assert unseen < 20


def test_another_tokenizer_is_neither_used_nor_exported(run: Path) -> None:
    tree = json.loads((run / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (run / "tokenizer.json").write_text(json.dumps(tree))
    for call in both(run):
        assert "tokenizer.json" in refused(call)
    assert not (run.parent / "out").exists()


def rewrite(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the body of the manifest of the run's checkpoint, with a right hash."""
    body = json.loads((run / STEP / "manifest.json").read_text())["body"]
    change(body)
    write_root(run / STEP, body)


def test_a_checkpoint_that_does_not_know_its_tokenizer_is_used(run: Path) -> None:
    rewrite(run, lambda body: body["state"].pop("tokenizer_sha256"))
    for call in both(run):
        call()


def test_an_imported_tokenizer_is_known_too(run: Path, tmp_path: Path) -> None:
    api.export(run, tmp_path / "hf")
    import_run(tmp_path / "hf", tmp_path / "imported")
    text = api.generate(tmp_path / "imported", "word", max_new_tokens=2)
    assert text == api.generate(run, "word", max_new_tokens=2)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "imported" / "tokenizer.json")
    assert "tokenizer.json" in refused(lambda: api.generate(tmp_path / "imported", "word"))


STATES: dict[str, Callable[[dict[str, Any]], None]] = {
    "empty": lambda state: state.clear(),
    "no spec": lambda state: state.pop("spec"),
    "spec is a list": lambda state: state.update(spec=[]),
    "no model": lambda state: state["spec"].pop("model"),
    "model is a text": lambda state: state["spec"].update(model="tiny"),
    "step is a text": lambda state: state.update(step="x"),
    "step is true": lambda state: state.update(step=True),
    "another step": lambda state: state.update(step=1),
    "updates below 0": lambda state: state.update(updates=-1),
    "no updates": lambda state: state.pop("updates"),
    "updates of many digits": lambda state: state.update(updates=10**400),
    "digest is a number": lambda state: state.update(data_digest=3),
    "samples are a number": lambda state: state.update(samples_sha256=3),
    "loss is a list": lambda state: state.update(loss=[1.0]),
    "loss scale is a text": lambda state: state.update(loss_scale="1"),
    "scales follow from infinity": lambda state: state.update(amax_history=[[[math.inf]]]),
    "clipping follows from infinity": lambda state: state.update(
        zclip={"norms": [], "mean": 1.0, "variance": math.inf}
    ),
    "a spike's mean is no number": lambda state: state["guard"]["spikes"].update(mean=math.nan),
    "no rollbacks": lambda state: state["guard"].pop("rollbacks"),
    "loss scale of 0": lambda state: state.update(loss_scale={"value": 0.0, "good_steps": 0}),
}


@pytest.mark.parametrize("case", STATES)
def test_a_forged_state_is_refused_in_one_sentence(case: str, run: Path) -> None:
    rewrite(run, lambda body: STATES[case](body["state"]))
    spec = load(run, [("train.steps", "4")])
    for call in (*both(run), lambda: api.train(spec, out=run, resume="auto", quiet=True)):
        words = refused(call)
        assert "checkpoints" in words and "lower train.lr" not in words
    assert api.checkpoint_verify(run)["problems"]


def poison(run: Path, name: str, value: float) -> None:
    """Save the checkpoint again with another value in a tensor, and so with right hashes."""
    path = run / STEP
    manifest = parse_manifest(path, read_manifest_text(path, Disk()))
    tensors = {
        key: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for key, entry in manifest.tensors.items()
    }
    store = CheckpointStore(path.parent, keep=1)
    state = store.load(2, tensors)
    tensors[name].flatten()[1] = value
    store.save(2, tensors, state)
    store.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_parameter_that_is_not_finite_is_named(value: float, run: Path) -> None:
    poison(run, "model/blocks.1.mlp.up.weight", value)
    (problem,) = api.checkpoint_verify(run)["problems"]
    assert "blocks.1.mlp.up.weight" in problem and "not finite" in problem
    for call in both(run):
        assert "blocks.1.mlp.up.weight" in refused(call)
    assert not (run.parent / "out").exists()
