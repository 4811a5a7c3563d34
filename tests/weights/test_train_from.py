"""`--from SOURCE`: one flag for a folder, a run, its checkpoint, another program's, and a model of the hub.

The first loss of a run from a folder is the loaded model's, on one rank and on several.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from runs_from_weights import exported_equals, flags, tokenizer_of
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from covering import some
from hf_models import CASES, read_whole, save_theirs
from meshwright import api
from meshwright.api.initial_weights import initial_weights_told
from meshwright.api.source import keys_of_source
from meshwright.checkpoint.weights import fill
from meshwright.cli.main import main
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.exchange.hf import load_hf
from meshwright.spec import RunSpec, UserError, load
from meshwright.weights.initial_weights import open_weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def spec_from(source: Path, theirs: Path, **more: object) -> RunSpec:
    """A short run on the folder's corpus that starts from a source."""
    return load(None, [*keys_of_source(str(source)), *flags(theirs, **more).items()])


def first_loss(run: Path) -> float:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(next(row["loss"] for row in rows if "loss" in row))


def loaded_loss(theirs: Path, spec: RunSpec) -> float:
    """The mean loss over the targets of the first batch, by the folder's decoder in float64."""
    loader = Loader(open_corpus(spec), spec, 0, 1)
    batch = loader.step(0)
    loader.close()
    with torch.no_grad():
        logits = load_hf(theirs, torch.float64)(batch.tokens, batch.positions, batch.documents)
    return float(cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))


LAYOUTS = [{}, {"layout.dp": 2, "layout.zero": 3}, {"layout.tp": 2}, {"layout.pp": 2}]


@pytest.mark.parametrize("axes", some(LAYOUTS, LAYOUTS[1::2]), ids=str)
def test_the_first_loss_is_that_of_the_loaded_model(
    axes: dict[str, object], theirs: Path, tmp_path: Path
) -> None:
    one = spec_from(theirs, theirs, **{"precision.compute": "fp64"})
    spec = spec_from(theirs, theirs, **{"precision.compute": "fp64", **axes})
    api.train(spec, out=tmp_path / "run", quiet=True)
    assert math.isclose(first_loss(tmp_path / "run"), loaded_loss(theirs, one), rel_tol=1e-12)


def test_the_hub_s_cache_is_a_source(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    cached = tmp_path / "models--org--small"
    shutil.copytree(theirs, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert keys_of_source("org/small") == [("model.hf", str(cached / "snapshots" / ("0" * 40)))]
    remedy = r"^--from: org/other .* HF_HUB_OFFLINE is set; .*hf download org/other"
    with pytest.raises(UserError, match=remedy):
        keys_of_source("org/other")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--from", "nowhere"], "--from: nowhere is not there; give the folder of a model or of a run"),
        (["--from", "."], "--from: . is neither a run's folder"),
        (
            ["--from", "THEIRS", "--model.preset", "tiny"],
            "--model.preset: tiny is given together with --from",
        ),
    ],
)
def test_what_is_no_source_is_one_sentence(
    words: list[str], sentence: str, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        main(["spec", "check", *(str(theirs) if word == "THEIRS" else word for word in words)])
    assert sentence in str(refusal.value) and len(str(refusal.value).splitlines()) == 1


def test_a_run_and_another_program_s_checkpoint_need_no_other_key(theirs: Path, tmp_path: Path) -> None:
    wanted, values = read_whole(theirs)
    api.import_hf(theirs, tmp_path / "run")
    api.export(tmp_path / "run", tmp_path / "dcp", format="dcp")
    for source in (tmp_path / "run", tmp_path / "run/checkpoints/step-00000000", tmp_path / "dcp"):
        spec = spec_from(source, theirs)
        assert (spec.model.layers, spec.model.vocab_size) == (wanted.layers, wanted.vocab_size)
        assert Path(spec.data.tokenizer).read_bytes() == (theirs / "tokenizer.json").read_bytes()
        found = {name: torch.zeros_like(value) for name, value in values.items()}
        weights = open_weights(spec)
        assert weights is not None
        fill(found, weights)
        assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("rows", [300, 307])
def test_added_tokens_start_as_the_mean_of_the_others(rows: int, theirs: Path) -> None:
    _, values = read_whole(theirs)
    weights = open_weights(spec_from(theirs, theirs, **{"model.vocab_size": rows}))
    assert weights is not None
    for name in ("embed.weight", "head.weight"):
        old, found = values[name], torch.empty(rows, values[name].shape[1])
        fill({name: found}, weights)
        assert torch.equal(found[:300], old)
        assert torch.equal(found[300:], old.double().mean(0).float().expand(rows - 300, -1))


def test_rows_of_no_token_may_be_left_out(theirs: Path, tmp_path: Path) -> None:
    wanted, values = read_whole(theirs)
    padded = Path(shutil.copytree(theirs, tmp_path / "padded"))
    tensors = {name: value.clone() for name, value in load_file(padded / "model.safetensors").items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.ones(20, wanted.hidden)])
    save_file(tensors, padded / "model.safetensors")
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    spec = spec_from(padded, theirs, **{"model.vocab_size": 300})
    weights, found = open_weights(spec), torch.empty_like(values["head.weight"])
    assert weights is not None
    fill({"head.weight": found}, weights)
    assert torch.equal(found, values["head.weight"])
    assert "the last 20 rows of the embedding and the head, which are of no token, are left out" in (
        initial_weights_told(spec) or ""
    )
    with pytest.raises(UserError, match=r"model\.vocab_size: 299 leaves out tokens of the 300"):
        open_weights(spec_from(padded, theirs, **{"model.vocab_size": 299}))


def test_new_rows_are_told(theirs: Path) -> None:
    line = initial_weights_told(spec_from(theirs, theirs, **{"model.vocab_size": 302})) or ""
    assert "the embedding and the head get 2 new rows for added tokens, each the mean of the 300" in line


@pytest.mark.parametrize(
    "axes",
    [{"layout.tp": 2}, pytest.param({"layout.dp": 2, "layout.zero": 3}, marks=pytest.mark.full)],
    ids=str,
)
def test_tokens_that_a_tokenizer_has_beyond_the_rows_get_rows(
    axes: dict[str, object], theirs: Path, tmp_path: Path
) -> None:
    """They may occur in texts, and are in the export, which transformers opens."""
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    tokenizer_of(folder, special=["<|im_start|>", "<|im_end|>"], words=["zebra"])
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"the zebra sat {number}"}) for number in range(60)))
    spec = spec_from(folder, theirs, **{"data.corpus": corpus, "data.cache": tmp_path / "cache", **axes})
    assert "get 3 new rows for added tokens" in (initial_weights_told(spec) or "")
    api.train(spec, out=tmp_path / "run", quiet=True)
    api.export(tmp_path / "run", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == len(tokenizer) == 303 == tokenizer.convert_tokens_to_ids("zebra") + 1
    _, values = read_whole(theirs)
    for matrix, name in ((model.get_input_embeddings(), "embed.weight"), (model.lm_head, "head.weight")):
        new = values[name].double().mean(0).float().expand(3, -1)
        assert torch.equal(matrix.weight, torch.cat([values[name], new]))


def test_a_tokenizer_elsewhere_may_have_the_added_tokens(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer_of(tmp_path, words=["zebra"])
    assert keys_of_source(str(theirs), {"data.tokenizer": str(tmp_path)})[1:] == [("model.vocab_size", "301")]
    file = tmp_path / "run.toml"
    file.write_text(f'[data]\ntokenizer = "{tmp_path}"\n')
    given = {"data.tokenizer": str(tmp_path), "model.vocab_size": 300}
    assert keys_of_source(str(theirs), given) == keys_of_source(str(theirs)) == [("model.hf", str(theirs))]
    assert main(["spec", "show", str(file), "--from", str(theirs)]) == 0
    assert "vocab_size = 301" in capsys.readouterr().out


def test_rows_beyond_the_tokens_stay(theirs: Path, tmp_path: Path) -> None:
    """An embedding may be padded: 320 rows for 300 tokens."""
    folder = tmp_path / "hf"
    save_theirs(folder, "Llama", CASES["llama"][1] | {"vocab_size": 320})
    tokenizer_of(folder)
    spec = spec_from(folder, theirs, **{"data.cache": tmp_path / "cache"})
    assert (initial_weights_told(spec) or "").endswith(f"text by {folder / 'tokenizer.json'}")
    api.train(spec, out=tmp_path / "run", quiet=True)
    exported_equals(folder, tmp_path / "run", tmp_path / "out")
