"""Training that goes on from adapters that exist: as PEFT goes on from them, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from chat_models import adapter_in, chats, model_in, opened, trained_by_trl, written
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import CASES, save_theirs
from meshwright import api
from meshwright.checkpoint.weights import fill
from meshwright.cli.main import main
from meshwright.exchange.peft_adapter import write_adapter
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.lora import is_adapter
from meshwright.weights.adapters import adapter_shapes
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks
from training_runs import run_it, start

SEQ_LEN, STEPS = 96, 4


def spec_of(base: Path, corpus: Path, **flags: object) -> RunSpec:
    given: dict[str, object] = {
        "model.hf": base, "data.corpus": corpus, "data.cache": corpus.parent / "cache", "layout.dp": 1,
        "data.seq_len": SEQ_LEN, "data.val_fraction": 0, "data.pack": "false",
        "train.batch_tokens": 8 * SEQ_LEN, "train.steps": STEPS, "train.lr": 0.01, "train.warmup_steps": 0,
        "train.schedule": "constant", "train.weight_decay": 0, "precision.compute": "fp64",
        "layout.micro_batch": 1,
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all, rslora": {"target_modules": "all-linear", "use_rslora": True},
    "layers": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
    "dora": {"target_modules": ["q_proj", "k_proj", "down_proj"], "use_dora": True},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_equals_going_on_with_peft(kind: str, tmp_path: Path) -> None:
    base, adapter, rows = tmp_path / "model", tmp_path / "adapter", chats(1, 8)
    model_in(base)
    adapter_in(adapter, base, **CONFIGS[kind])
    theirs = peft.PeftModel.from_pretrained(opened(base), adapter, is_trainable=True)
    losses = trained_by_trl(theirs, base, rows, tmp_path / "trl", 8, max_steps=STEPS, max_length=SEQ_LEN)
    spec = spec_of(base, written(rows, tmp_path / "chats.jsonl"), lora__weights=adapter)
    assert spec.lora is not None and (spec.lora.rank, spec.lora.alpha) == (3, 12)
    api.train(spec, out=tmp_path / "run", quiet=True)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["loss"] for row in lines if "loss" in row] == pytest.approx(losses, rel=1e-9)
    api.export(tmp_path / "run", tmp_path / "ours", adapter=True)
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    wanted = {
        name.replace(".default.", ".").replace("magnitude_vector.weight", "magnitude_vector"): each.detach()
        for name, each in theirs.named_parameters()
        if "lora_" in name
    }
    before = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == wanted.keys() == before.keys()
    for name, each in wanted.items():
        assert not torch.allclose(before[name], each, rtol=1e-3), name
        torch.testing.assert_close(ours[name], each, rtol=1e-9, atol=1e-11)


LAYOUTS: list[tuple[str, dict[str, object], bool]] = [
    ("llama", {"dp": 2, "zero": 3}, False),
    ("llama", {"tp": 2, "dp": 2, "zero": 1}, False),
    ("llama", {"pp": 2, "cp": 2}, False),
    ("glm4", {"tp": 2}, False),
    ("phi3", {"tp": 2, "dp": 2, "zero": 2}, False),
    ("gpt2", {"dp": 2, "zero": 3}, False),
    ("mixtral", {"dp": 2, "ep": 2, "zero": 1}, False),
    ("gpt_oss", {"dp": 4, "ep": 2, "zero": 3}, False),
    ("llama", {"tp": 2, "dp": 2, "zero": 3}, True),
    ("phi3", {"pp": 2, "tp": 2}, True),
]


QUICK = (2, 4, 7)


@pytest.mark.parametrize(
    ("family", "axes", "dora"),
    [
        pytest.param(*each, marks=() if number in QUICK else pytest.mark.full)
        for number, each in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_layouts_go_on_as_one_device(
    ranks: Ranks, corpus: Path, tmp_path: Path, family: str, axes: dict[str, object], dora: bool
) -> None:
    """From a folder that was exported here, whose joined layers have blocks."""
    save_theirs(tmp_path / "hf", *CASES[family])
    experts = ",*.experts.*" if family in ("mixtral", "gpt_oss") else ""
    flags: dict[str, object] = {
        "data__tokenizer": "byte", "data__seq_len": 32, "train__batch_tokens": 8 * 32, "train__steps": 3,
        "model__vocab_size": 300, "model__weights": tmp_path / "hf", "layout__dp": 1,
        "train__optimiser": "sgd",
        "train__lr": 0.1,
    }  # fmt: skip
    keys: dict[str, object] = {
        "lora__rank": 2,
        "lora__targets": f"all-linear{experts}",
        "lora__dora": str(dora).lower(),
    }
    new = spec_of(tmp_path / "hf", corpus, **flags, **keys)
    assert new.lora is not None
    torch.manual_seed(2)
    drawn = {name: torch.randn(shape).double() / 9 for name, shape in adapter_shapes(new).items()}
    write_adapter(tmp_path / "adapter", new.model, new.lora, drawn, None, torch.float64)
    alone = spec_of(tmp_path / "hf", corpus, **flags, lora__weights=tmp_path / "adapter")
    assert alone.lora is not None and adapter_shapes(alone) == adapter_shapes(new)
    assert (alone.lora.targets == new.lora.targets) == (not experts)
    weights = open_weights(alone)
    assert weights is not None and weights.exact
    first, wanted = start(ranks, alone, tmp_path / "alone")
    flags |= {f"layout__{axis}": size for axis, size in axes.items()}
    spec = spec_of(tmp_path / "hf", corpus, **flags, lora__weights=tmp_path / "adapter")
    found = dict[str, Tensor]()
    for result, tensors in ranks.run(spec.layout, run_it, spec, tmp_path / "run", None):
        assert result["final_loss"] == pytest.approx(first["final_loss"], rel=1e-9)
        found |= tensors
    assert found.keys() == wanted.keys()
    for name in filter(is_adapter, wanted):
        assert not torch.equal(found[name], drawn[name])
        apart = (found[name] - wanted[name]).abs().max() / wanted[name].abs().max()
        assert apart < 1e-9, name


def words_of(base: Path, corpus: Path, out: Path, **flags: object) -> list[str]:
    given: dict[str, object] = {
        "data.corpus": corpus, "data.cache": corpus.parent / "cache", "layout.dp": 1, "data.seq_len": SEQ_LEN,
        "train.batch_tokens": 2 * SEQ_LEN, "train.steps": 1, "data.val_fraction": 0, "out": out,
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def test_a_run_goes_on_from_the_adapters_of_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With --adapter alone: on the base model of that run, and then of PEFT's folder."""
    base, corpus = tmp_path / "model", written(chats(1, 8), tmp_path / "chats.jsonl")
    model_in(base)
    first = words_of(base, corpus, tmp_path / "first", lora__rank=2, lora__targets="q_proj,v_proj")
    assert main(["train", "--from", str(base), *first]) == 0
    out = "".join(capfd.readouterr())
    assert "trained: 448 of 36,576 parameters (1.22%); the others are frozen" in out
    assert f"meshwright export {tmp_path / 'first'} {tmp_path / 'first'}-adapter --adapter" in out
    record = json.loads((tmp_path / "first" / "run.json").read_text())
    assert (record["trained_parameters"], record["parameters"]) == (448, 36128)
    api.export(tmp_path / "first", tmp_path / "adapter", adapter=True)
    for number, source in enumerate((tmp_path / "first", tmp_path / "adapter")):
        run = tmp_path / str(number)
        assert main(["train", "--adapter", str(source), *words_of(base, corpus, run, train__lr=1e-30)]) == 0
        out = " ".join(capfd.readouterr().out.split())
        assert f"weights: those of {base} (36.13k parameters)" in out
        assert f"adapters: those of {source}, rank 2, for *.attn.q.weight, *.attn.v.weight" in out
        api.export(run, tmp_path / f"again{number}", adapter=True)
        one, other = (
            load_file(folder / "adapter_model.safetensors")
            for folder in (tmp_path / "adapter", tmp_path / f"again{number}")
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert any(each.any() for name, each in one.items() if "lora_B" in name)


def test_adapters_of_another_base_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = written(chats(1, 8), tmp_path / "chats.jsonl")
    model_in(tmp_path / "model")
    model_in(tmp_path / "other")
    adapter_in(tmp_path / "adapter", tmp_path / "model", target_modules=["q_proj"], use_dora=True)
    for base, told in (("other", True), ("model", False)):
        words = words_of(tmp_path / base, corpus, tmp_path / f"run-{base}")
        adapter = ["--from", str(tmp_path / base), "--adapter", str(tmp_path / "adapter")]
        assert main(["train", *adapter, *words]) == 0
        out = " ".join(capfd.readouterr().out.split())
        assert "rank 3 with magnitudes (DoRA), for *.attn.q.weight" in out
        assert (f"adapters: trained on {tmp_path / 'model'}, as their folder says" in out) == told


def test_a_resume_reads_other_adapters_no_more(tmp_path: Path) -> None:
    base, corpus = tmp_path / "model", written(chats(1, 8), tmp_path / "chats.jsonl")
    model_in(base)
    adapter_in(tmp_path / "adapter", base, target_modules=["q_proj"])
    spec = spec_of(base, corpus, lora__weights=tmp_path / "adapter", train__steps=2)
    api.train(spec, out=tmp_path / "run", quiet=True)
    (tmp_path / "adapter").rename(tmp_path / "moved")
    api.train(load(tmp_path / "run", [("train.steps", "3")]), out=tmp_path / "run", resume="auto", quiet=True)
    other = [("train.steps", "4"), ("lora.weights", str(tmp_path / "moved"))]
    with pytest.raises(
        UserError, match=r"lora\.weights: .*moved is not read by --resume, which goes on with"
    ):
        api.train(load(tmp_path / "run", other), out=tmp_path / "run", resume="auto", quiet=True)


def changed(folder: Path, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def with_tensors(folder: Path, change: Any) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: list[tuple[str, dict[str, object], Any]] = [
    (r"lora\.rank: 4 contradicts .*adapter_config\.json, whose r is 3; leave lora\.r", {"rank": 4}, None),
    (r"lora\.alpha: 5\.0 contradicts .*, whose lora_alpha is 12\.0", {"alpha": 5}, None),
    (r"lora\.rslora: true contradicts .*, whose use_rslora is false", {"rslora": "true"}, None),
    (r"lora\.targets: \[\"\*\.attn\.k\.weight\"\] contradicts .*, which has no adapter of blocks\.0\.attn\.k",
     {"targets": "k_proj"}, None),
    (r"has peft_type 'IA3', and adapters of LORA are trained on", {}, lambda f: changed(f, peft_type="IA3")),
    (r"has r \"3\", where a number above 0", {}, lambda f: changed(f, r="3")),
    (r"multiplies the adapter of model\.layers\.0\.self_attn\.q_proj by 8 and others by 4", {},
     lambda f: changed(f, alpha_pattern={"0.self_attn.q_proj": 24})),
    (r"an adapter of .*\.0\.self_attn\.q_proj of shapes \[3, 8\] and \[32, 3\], where .* has \[3, 32\]",
     {}, lambda f: with_tensors(f, lambda t: t.update({Q: t[Q][:, :8].contiguous()}))),
    (r"has values of model\.layers\.0\.self_attn\.q_proj that are not finite", {},
     lambda f: with_tensors(f, lambda t: t[Q].fill_(torch.nan))),
    (r"has a tensor base_model\.model\.lm_head\.weight, and training goes on from A, B and", {},
     lambda f: with_tensors(f, lambda t: t.update({"base_model.model.lm_head.weight": t[Q].clone()}))),
    (r"lacks the tensor .*0\.self_attn\.q_proj\.lora_B\.weight; copy", {},
     lambda f: with_tensors(f, lambda t: t.pop(Q.replace("_A", "_B")))),
    (r"is not a readable safetensors file", {},
     lambda f: (f / "adapter_model.safetensors").write_bytes(b"x")),
    (r"lora\.weights: .* is not there; give a folder of PEFT, or a run with \[lora\]", {},
     lambda f: f.rename(f.with_name("gone"))),
    (r"holds no adapters, as it has neither", {}, lambda f: (f / "adapter_config.json").unlink()),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "flags", "change"), WRONG, ids=[each[0][:30] for each in WRONG])
def test_what_contradicts_or_is_damaged_is_told(
    tmp_path: Path, sentence: str, flags: dict[str, object], change: Any
) -> None:
    base, corpus = tmp_path / "model", written(chats(1, 8), tmp_path / "chats.jsonl")
    model_in(base)
    adapter_in(tmp_path / "adapter", base, target_modules=["q_proj", "v_proj"])
    if change is not None:
        change(tmp_path / "adapter")
    given = {f"lora__{key}": value for key, value in flags.items()}
    with pytest.raises(UserError, match=sentence):
        open_weights(spec_of(base, corpus, **given, lora__weights=tmp_path / "adapter"))


def test_adapters_without_their_base_are_told(tmp_path: Path) -> None:
    base = tmp_path / "model"
    model_in(base)
    adapter_in(tmp_path / "adapter", base, target_modules=["q_proj"])
    words = words_of(base, Path("synthetic"), tmp_path / "run")
    adapter = ["--adapter", str(tmp_path / "adapter")]
    with pytest.raises(UserError, match=r"are of a trained model, and this run's is random; give the model"):
        main(["train", *adapter, *words, "--model.preset", "tiny"])
    changed(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "nowhere"))
    with pytest.raises(
        UserError, match=r"nowhere is not there.*names it as its base model, another is --from"
    ):
        main(["train", *adapter, *words])
    with pytest.raises(UserError, match=r"--lora.weights: x is given together with --adapter"):
        main(["train", *adapter, "--lora.weights", "x", *words])
    assert not (tmp_path / "run").exists()


def test_layers_that_share_an_a_get_one_each(tmp_path: Path) -> None:
    """A folder that PEFT made for joined layers: the first step is PEFT's, and the rest is told."""
    save_theirs(tmp_path / "hf", *CASES["phi3"])
    model = peft_on(tmp_path / "hf", tmp_path / "adapter")
    corpus = written(chats(1, 8), tmp_path / "chats.jsonl")
    spec = spec_of(tmp_path / "hf", corpus, data__tokenizer="byte", model__vocab_size=300,
                   lora__weights=tmp_path / "adapter")  # fmt: skip
    with pytest.warns(
        UserWarning, match=r"the layers that model\.layers\.0\.self_attn\.qkv_proj joins share"
    ):
        weights = open_weights(spec)
    assert weights is not None and spec.lora is not None and spec.lora.targets == ("all-linear",)
    read = {name: torch.empty(shape).double() for name, shape in adapter_shapes(spec).items()}
    fill(read, weights)
    layer, head_rows = model.base_model.model.model.layers[1].self_attn.qkv_proj, 64
    delta = layer.get_delta_weight("default")
    q, k = (
        spec.lora.scale * read[f"blocks.1.attn.{x}.lora_b.weight"] @ read[f"blocks.1.attn.{x}.lora_a.weight"]
        for x in "qk"
    )
    torch.testing.assert_close(q, delta[:head_rows], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(k, delta[head_rows : head_rows + len(k)], rtol=1e-12, atol=1e-14)


def peft_on(base: Path, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    made = peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=12, target_modules="all-linear")
    ).double()
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(folder)
    return made
