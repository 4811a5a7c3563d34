"""Merged models: each method against a formula of its own in float64, and what must hold for all of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright import api
from meshwright.cli.main import main
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.hf import export_hf, load_hf
from meshwright.model.decoder import Decoder
from meshwright.spec import UserError, load
from meshwright.weights import merge_methods

Array = NDArray[np.float64]
MODEL = {"model.layers": 2, "model.hidden": 16, "model.ffn": 24, "model.heads": 2, "model.vocab_size": 258,
         "model.kv_heads": 1}  # fmt: skip
METHODS: list[dict[str, Any]] = [
    {"method": "linear"},
    {"method": "slerp"},
    {"method": "task_arithmetic"},
    {"method": "ties", "density": 0.3},
    {"method": "dare_ties", "density": 0.4, "seed": 3},
]


def make(folder: Path, seed: int, **keys: object) -> Path:
    """An HF folder of random weights, with a tokenizer."""
    given = MODEL | {f"model.{key}": value for key, value in keys.items()}
    spec = load(None, [(key, str(value)) for key, value in given.items()]).model
    torch.manual_seed(seed)
    decoder = Decoder(spec)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.3)
    byte_tokenizer().save(folder.parent)
    export_hf(folder, spec, decoder.tensors(), folder.parent / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and two models as HF folders, and the first as a run's, too."""
    root = tmp_path_factory.mktemp("merge")
    made = {name: make(root / name, seed) for seed, name in enumerate(("base", "one", "two"))}
    api.import_hf(made["one"], root / "run")
    return {**made, "run": root / "run"}


def weights(folder: Path) -> dict[str, Tensor]:
    decoder = api.load_run(folder) if (folder / "run.json").is_file() else load_hf(folder)
    return decoder.tensors()


def changes_that_are_kept(how: dict[str, Any], value: Array, base: Array, number: int, name: str) -> Array:
    """TIES' trim or DARE's drop of one model's change to the base."""
    change = (value - base).ravel()
    if how["method"] == "ties":
        count = int(np.ceil(how["density"] * change.size))
        kept = sorted(range(change.size), key=lambda i: (-abs(change[i]), i))[:count]
        mask = np.zeros(change.size)
        mask[kept] = 1
        return (change * mask).reshape(base.shape)
    key = int.from_bytes(hashlib.sha256(f"{how['seed']}:{number}:{name}".encode()).digest()[:8], "little")
    drawn = np.array([mixed((index * 0x9E3779B97F4A7C15 + key) % 2**64) for index in range(change.size)])
    mask = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 < how["density"]
    return (change / how["density"] * mask).reshape(base.shape)


def mixed(bits: int) -> np.uint64:
    """splitmix64's finaliser on Python's whole numbers."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return np.uint64(bits ^ (bits >> 31))


def formula(how: dict[str, Any], values: list[Array], shares: list[float], base: Array, name: str) -> Array:
    """The merged tensor as the papers have it."""
    if how["method"] == "linear":
        return np.average(np.stack(values), axis=0, weights=shares)
    if how["method"] == "slerp":
        one, two = values
        cosine = np.sum(one * two) / np.sqrt(np.sum(one**2) * np.sum(two**2))
        angle, t = np.arccos(cosine), shares[1] / sum(shares)
        return np.asarray((np.sin((1 - t) * angle) * one + np.sin(t * angle) * two) / np.sin(angle))
    if how["method"] == "task_arithmetic":
        return base + sum(share * (value - base) for share, value in zip(shares, values, strict=True))
    changes = [changes_that_are_kept(how, value, base, n, name) for n, value in enumerate(values)]
    flat = np.stack([change.ravel() for change in changes])
    elected = np.sign(np.asarray(shares) @ flat)
    merged = base.copy().ravel()
    for i in range(merged.size):
        chosen = [n for n in range(len(flat)) if np.sign(flat[n, i]) == elected[i] != 0]
        if chosen:
            total = sum(shares[n] for n in chosen)
            merged[i] += sum(shares[n] * flat[n, i] for n in chosen) / total
    return merged.reshape(base.shape)


@pytest.mark.parametrize("how", METHODS, ids=lambda how: how["method"])
def test_a_method_is_its_formula(models: dict[str, Path], tmp_path: Path, how: dict[str, Any]) -> None:
    shares, out = [0.7, 0.4], tmp_path / "out"
    base = models["base"] if how["method"] not in ("linear", "slerp") else None
    api.merge([models["run"], models["two"]], out, weights=shares, base=base, **how)
    one, two, below = (weights(models[name]) for name in ("one", "two", "base"))
    for name, value in weights(out).items():
        given = [each[name].detach().double().numpy() for each in (one, two)]
        wanted = formula(how, given, shares, below[name].detach().double().numpy(), name)
        assert np.abs(value.detach().double().numpy() - wanted).max() < 2e-7, name


@pytest.mark.parametrize("how", METHODS, ids=lambda how: how["method"])
def test_weights_of_one_and_nothing_give_the_first_and_a_model_merged_with_itself_is_itself(
    how: dict[str, Any],
) -> None:
    torch.manual_seed(1)
    one, two, base = (torch.randn(9, 5).double() for _ in range(3))
    base[0] = one[0] * 1e-9
    options = {key: value for key, value in how.items() if key != "method"}
    options |= {"density": 1.0} if "density" in options else {}
    options |= {"name": "x"} if "seed" in options else {}
    options |= {"base": base} if how["method"] not in ("linear", "slerp") else {}
    method = merge_methods.METHODS[how["method"]]
    torch.testing.assert_close(method([one, two], [1.0, 0.0], **options), one, rtol=1e-15, atol=0)
    torch.testing.assert_close(method([one, one], [0.5, 0.5], **options), one, rtol=1e-15, atol=0)


def test_slerp_keeps_the_norm_of_unit_vectors_and_takes_parallel_and_zero_ones() -> None:
    one, two = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()
    for share in (0.1, 0.5, 0.9):
        assert float(merge_methods.slerp([one, two], [1 - share, share]).norm()) == pytest.approx(
            1, rel=1e-14
        )
    for other in (one, -one, 2 * one, one * 0):
        expected = 0.75 * one + 0.25 * other
        torch.testing.assert_close(merge_methods.slerp([one, other], [0.75, 0.25]), expected)


def test_draws_keep_the_share_and_depend_on_seed_model_and_name() -> None:
    base, one = torch.zeros(40_000).double(), torch.ones(40_000).double()

    def kept(*weights: float, seed: int = 0, name: str = "x") -> Tensor:
        return merge_methods.dare_ties([one] * len(weights), weights, base, 0.25, seed, name) > 0

    assert float(kept(1.0).double().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(kept(1.0), kept(1.0))
    for other in (kept(1.0, seed=1), kept(1.0, name="y"), kept(0.0, 1.0)):
        assert float((kept(1.0) & other).double().mean()) == pytest.approx(0.0625, abs=0.01)


def test_a_merged_model_is_a_run(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "out", ["--method", "linear", "--weight", "3,1"]
    assert main(["merge", str(models["one"]), str(models["run"]), *words, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(out)}
    assert json.loads((out / "run.json").read_text())["merge"]["weights"] == [3, 1]
    assert api.generate(out, "a", max_new_tokens=4) == api.generate(models["run"], "a", max_new_tokens=4)


MISTAKES: list[tuple[list[str], dict[str, Any], str]] = [
    (["one", "two"], {"method": "mean"}, "'mean' is not one of linear, slerp, ties, dare_ties, task_arith"),
    (["one"], {"method": "linear"}, "linear merges two models or more"),
    (["one", "two", "run"], {"method": "slerp"}, "slerp merges two models, and 3 were given"),
    (["one", "two"], {"method": "linear", "weights": [1]}, r"--weight: 1 is 1 for 2 models; .* 0\.5,0\.5"),
    (["one", "two"], {"method": "linear", "weights": [2, -1]}, "at least 0, not all of them 0"),
    (["one", "two"], {"method": "slerp", "weights": [0, 0]}, "at least 0, not all of them 0"),
    (["one", "two"], {"method": "linear", "weights": [float("nan"), 1]}, "finite"),
    (["one", "two"], {"method": "linear", "base": "base"}, "--base: has no effect with linear"),
    (["one", "two"], {"method": "task_arithmetic"}, "--base: task_arithmetic needs the model"),
    (["one", "two"], {"method": "ties", "base": "base"}, "--density: ties needs the share"),
    (["one", "two"], {"method": "ties", "base": "base", "density": 0.0}, "--density: 0.0 is not valid"),
    (["one", "two"], {"method": "linear", "density": 0.5}, "--density: has no effect with linear"),
    (["one", "two"], {"method": "slerp", "seed": 1}, "--seed: 1 has no effect with slerp"),
    (["one", "wide"], {"method": "linear"}, r"model\.ffn is 32, that of .* is 24; merge models of one arch"),
    (["one", "two"], {"method": "task_arithmetic", "base": "wide"}, r"--base: its model\.ffn is 32"),
    (["one", "words"], {"method": "linear"}, "has another tokenizer than"),
    (["one", "nowhere"], {"method": "linear"}, "does not exist"),
]


@pytest.mark.parametrize(("of", "how", "words"), MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    models: dict[str, Path], tmp_path: Path, of: list[str], how: dict[str, Any], words: str
) -> None:
    root = tmp_path / "made"
    root.mkdir()
    if "wide" in (*of, how.get("base")):
        make(root / "wide", 0, ffn=32)
    if "words" in of:
        shutil.copytree(models["two"], root / "words")
        tokenizer = json.loads((root / "words" / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["add_prefix_space"] = not tokenizer["pre_tokenizer"]["add_prefix_space"]
        (root / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    where = {**models, **{name: root / name for name in ("wide", "words", "nowhere")}}
    how = how | ({"base": where[how["base"]]} if "base" in how else {})
    with pytest.raises(UserError, match=words) as told:
        api.merge([where[name] for name in of], tmp_path / "out", **how)
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


def test_models_of_one_vocabulary_merge_whatever_is_put_before_a_text(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """As of a base and its chat model, whose files differ in the post-processor and in decoders."""
    other = tmp_path / "other"
    shutil.copytree(models["two"], other)
    tree = json.loads((other / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    first = [{"Sequence": {"id": "A", "type_id": 0}}]
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [end, *first],
        "pair": [end, *first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
        },
    }
    (other / "tokenizer.json").write_text(json.dumps(tree))
    for number, named in enumerate((other, models["two"])):
        api.merge([models["one"], named], tmp_path / f"out{number}", method="linear")
    for name, value in weights(tmp_path / "out0").items():
        assert torch.equal(value, weights(tmp_path / "out1")[name])
    (other / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))  # of the free id 257
    with pytest.warns(
        UserWarning, match=r"only one of .*one and .*other has \[PAD\] \(id 257\); in the other"
    ):
        api.merge([models["one"], other], tmp_path / "out2", method="linear")
    for name, value in weights(tmp_path / "out2").items():
        assert torch.equal(value, weights(tmp_path / "out1")[name])
    vocab = tree["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tree))
    sentence = r"has another tokenizer than .*one: 'a' has id 98 in it and id 97 there, so rows of their emb"
    with pytest.raises(UserError, match=sentence):
        api.merge([models["one"], other], tmp_path / "out", method="linear")
