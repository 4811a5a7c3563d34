"""Likelihoods of texts and of continuations: those of transformers in float64, under every layout."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import CASES, save_theirs
from meshwright import api
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_sources
from meshwright.data.loader import SplitReader
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.infer.forward import no_token_dropped
from meshwright.infer.scores import Score, ScoredText, scores
from meshwright.infer.sharded import ShardedDecoder, spec_to_evaluate
from meshwright.runs.record import read_metrics
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import from_tree
from meshwright.train.held_out import Likelihood, likelihoods
from meshwright.train.nll import nll
from ranks import Ranks

SEQ_LEN = 24
TEXTS = ["Once upon a time, a mesh.", "Größe ist nicht alles, " * 4, "x", "def f(x):\n    return x ** 2\n"]
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp=2 pp=2": {"tp": 2, "pp": 2},
    "dp=2": {"dp": 2},
    "dp=2 tp=2 ep=2": {"dp": 2, "tp": 2, "ep": 2},
    "tp=2 etp=2": {"tp": 2, "etp": 2},
    "dp=2 pp=3 ep=2": {"dp": 2, "pp": 3, "ep": 2},
}
QUICK = {
    ("llama", "tp=2 pp=2"), ("gpt2", "dp=2"), ("mistral window", "one"), ("qwen3_moe", "tp=2 etp=2"),
    ("deepseek_v3", "dp=2 pp=3 ep=2"),
}  # fmt: skip
FAMILIES = ("llama", "gpt2", "mistral window", "qwen3_moe", "deepseek_v3")


def rows() -> list[ScoredText]:
    """Texts of unlike lengths, of which the last tokens are predicted."""
    ids = [byte_tokenizer().encode(text) for text in TEXTS]
    return [ScoredText([256, *tokens][:40], min(count, len(tokens))) for count, tokens in enumerate(ids, 1)]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a case to its run's folder, imported from float64, and the model of transformers."""
    made: dict[str, tuple[Path, Any]] = {}

    def family(case: str) -> tuple[Path, Any]:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            name, fields = CASES[case]
            theirs = save_theirs(folder / "float32", name, fields | {"vocab_size": 260}).double()
            theirs.save_pretrained(folder / "hf")
            byte_tokenizer().save(folder / "hf")
            theirs.set_experts_implementation("eager")  # others take no float64
            api.import_hf(folder / "hf", folder / "run")
            made[case] = folder / "run", theirs
        return made[case]

    return family


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A run that reads the texts, all of them as its training samples."""
    folder = tmp_path_factory.mktemp("corpus")
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = {"corpus": str(file), "tokenizer": "byte", "seq_len": SEQ_LEN, "val_fraction": 0.0}
    data |= {"cache": str(folder / "cache")}
    return from_tree({"data": data, "train": {"batch_tokens": SEQ_LEN}, "model": {"vocab_size": 260}})


def their_nats(theirs: Any, tokens: list[int]) -> torch.Tensor:
    """-log p of each token but the first, in float64, by a model of transformers."""
    given = torch.tensor([tokens])
    with torch.no_grad():
        logits = theirs(given).logits[0, :-1]
    assert logits.dtype == torch.float64
    return torch.nn.functional.cross_entropy(logits, given[0, 1:], reduction="none")


def their_likelihood(theirs: Any) -> Likelihood:
    """That of the texts, in windows that attention crosses neither, nor documents."""
    documents = [[256, *text.encode()] for text in TEXTS]
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    stream.append((256, len(documents)))
    found = 0.0
    for first in range(0, len(stream) - 1, SEQ_LEN):
        window = range(first, min(first + SEQ_LEN, len(stream) - 1))
        for _, places in groupby(window, key=lambda place: stream[place][1]):
            inside = list(places)
            tokens = [stream[place][0] for place in (*inside, inside[-1] + 1)]
            found += float(their_nats(theirs, tokens).sum())
    return Likelihood(found, len(stream) - 1, len("".join(TEXTS).encode()))


def evaluated(
    mesh: Mesh, spec: RunSpec, run: Path, corpus: RunSpec
) -> tuple[list[Likelihood], list[Score], list[Score]]:
    model = ShardedDecoder(spec, mesh)
    model.load(run, load(run))
    reader = SplitReader(open_sources(corpus).train, spec, mesh.data_rank, spec.layout.data_ranks)
    with no_token_dropped(model.decoder):
        texts = likelihoods(reader, partial(nll, model.pipeline, spec.micro_batch), mesh)
    return texts, scores(model, rows()), scores(model, rows()[:1])


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[] if (case, layout) in QUICK else pytest.mark.full)
        for case in FAMILIES
        for layout in LAYOUTS
        if case in FAMILIES[3:] or "e" not in layout.replace("one", "")
    ],
)
def test_likelihoods_are_those_of_transformers(
    ranks: Ranks, families: Any, corpus: RunSpec, case: str, layout: str
) -> None:
    run, theirs = families(case)
    trained = load(run)
    keys = [(f"layout.{axis}", str(size)) for axis, size in LAYOUTS[layout].items()]
    spec = spec_to_evaluate(trained.model, trained.precision, keys, corpus.data)
    expected = their_likelihood(theirs)
    rules = "nccl" if "pp" in LAYOUTS[layout] else "gloo"
    one = spec_to_evaluate(trained.model, trained.precision, [], corpus.data)
    (((own,), own_scores, _),) = ranks.run(one.layout, evaluated, one, run, corpus)
    for (text,), found, alone in ranks.run(spec.layout, evaluated, spec, run, corpus, rules=rules):
        assert (text.tokens, text.utf8_bytes) == (expected.tokens, expected.utf8_bytes)
        assert abs(text.nll / own.nll - 1) < 1e-12
        assert abs(text.nll / expected.nll - 1) < 1e-8  # theirs computes norms and rotations in float32
        for mine, single in zip(found, own_scores, strict=True):
            assert abs(mine.nats - single.nats) < 1e-11
        for row, score in zip([*rows(), rows()[0]], [*found, *alone], strict=True):
            tokens = list(row.tokens)
            nats = their_nats(theirs, tokens)[-row.predicted :]
            likeliest = theirs(torch.tensor([tokens])).logits[0, :-1].argmax(-1).tolist()
            assert abs(score.nats + float(nats.sum())) < 1e-6
            assert bool(score.greedy) == (likeliest[-row.predicted :] == tokens[-row.predicted :])


def test_a_greedy_continuation_is_told(families: Any, ranks: Ranks, corpus: RunSpec) -> None:
    """One of random texts hardly is: this one is what the model chooses."""
    run, theirs = families("llama")
    tokens = [256, 65]
    for _ in range(3):
        tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    trained = load(run)
    spec = spec_to_evaluate(trained.model, trained.precision, [], corpus.data)
    (found,) = ranks.run(
        spec.layout, score_of, spec, run, [ScoredText(tokens, 3), ScoredText([*tokens[:-1], 7], 3)]
    )
    assert [bool(score.greedy) for score in found] == [True, False]


def score_of(mesh: Mesh, spec: RunSpec, run: Path, given: list[ScoredText]) -> list[Score]:
    model = ShardedDecoder(spec, mesh)
    model.load(run, load(run))
    return scores(model, given)


MIXTURE = """
[model]
layers = 2
hidden = 32
ffn = 40
heads = 4
kv_heads = 2
vocab_size = 260
[data]
tokenizer = "byte"
seq_len = 32
val_fraction = 0.3
cache = "{root}/cache"
[data.mixture]
"{root}/prose.txt" = 2.0
"{root}/code.jsonl" = 1.0
[train]
steps = 4
batch_tokens = 256
lr = 0.05
warmup_steps = 0
eval_every = 2
ema = 0.5
[checkpoint]
every = 2
[precision]
compute = "fp64"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sources with checkpoints of steps 2 and 4, and beside it a text that it has not seen."""
    root = tmp_path_factory.mktemp("trained")
    prose = [f"{number} green bottles, hanging on the wall. " * (1 + number % 3) for number in range(20)]
    (root / "prose.txt").write_text("<|endoftext|>".join(prose))
    code = [f"def f{number}(x):\n    return x + {number}\n" * 3 for number in range(16)]
    (root / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in code))
    (root / "other.txt").write_text("Größe ist nicht alles.\n" * 9)
    (root / "run.toml").write_text(MIXTURE.format(root=root))
    api.train(load(root / "run.toml"), out=root / "run", quiet=True)
    return root


def test_checkpoints_have_the_likelihoods_that_the_run_told(trained: Path) -> None:
    found = api.evaluate(trained / "run", step="all", data={"other": trained / "other.txt"})
    told = {row["step"]: row for row in read_metrics(trained / "run") if "val_loss" in row}
    assert [row["step"] for row in found["checkpoints"]] == [2, 4]
    for row in found["checkpoints"]:
        *own, other = row["domains"].items()
        assert [name for name, _ in own] == [str(trained / "prose.txt"), str(trained / "code.jsonl")]
        for name, values in own:
            assert abs(values["loss"] / told[row["step"]]["val_sources"][name]["loss"] - 1) < 1e-12
            bits = told[row["step"]]["val_sources"][name]["bits_per_byte"]
            assert abs(values["bits_per_byte"] / bits - 1) < 1e-12
        tokens, size = (sum(values[key] for _, values in own) for key in ("tokens", "bytes"))
        nats = sum(values["loss"] * values["tokens"] for _, values in own)
        assert abs(nats / tokens / told[row["step"]]["val_loss"] - 1) < 1e-12
        assert abs(nats / math.log(2) / size / told[row["step"]]["val_bits_per_byte"] - 1) < 1e-12
        text = (trained / "other.txt").read_bytes()
        assert other[0] == "other" and (other[1]["tokens"], other[1]["bytes"]) == (len(text) + 1, len(text))
        assert abs(other[1]["perplexity"] / math.exp(other[1]["loss"]) - 1) < 1e-12
    average = api.evaluate(trained / "run", weights="ema")["checkpoints"][0]
    assert average["step"] == 4
    nats = sum(values["loss"] * values["tokens"] for values in average["domains"].values())
    assert abs(nats / tokens / told[4]["val_loss_ema"] - 1) < 1e-12


def test_a_layout_of_its_own_evaluates_alike(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the run and its checkpoint of step 2, and from the HF folder of that checkpoint."""
    one = api.evaluate(trained / "run", step=2, data={"other": trained / "other.txt"}, tokens=100)
    words = [
        "--data",
        f"other={trained / 'other.txt'}",
        "--tokens",
        "100",
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert main(["evaluate", str(trained / "run"), "--step", "2", "--layout.tp", "2", *words]) == 0
    ranks = json.loads((tmp_path / "out.json").read_text())
    assert ranks["layout"] != one["layout"] and "perplexity" in capfd.readouterr().out
    api.export(trained / "run", tmp_path / "hf", step=2)
    other = {"data": {"other": trained / "other.txt"}, "tokens": 100, "seq_len": 32}
    exported = api.evaluate(tmp_path / "hf", **other)["checkpoints"][0]["domains"]["other"]
    expected = one["checkpoints"][0]["domains"]
    assert sum(values["tokens"] for name, values in expected.items() if name != "other") == 100
    assert expected["other"]["tokens"] == 100
    assert exported["tokens"] == 100 and abs(exported["loss"] / expected["other"]["loss"] - 1) < 1e-12
    for name, values in ranks["checkpoints"][0]["domains"].items():
        assert values["bytes"] == expected[name]["bytes"]
        assert abs(values["loss"] / expected[name]["loss"] - 1) < 1e-12


def test_a_step_is_generated_from_and_exported(trained: Path, tmp_path: Path) -> None:
    run = trained / "run"
    early, late = api.load_run(run, step=2), api.load_run(run)
    assert not torch.equal(early.embed.weight, late.embed.weight)
    api.export(run, tmp_path / "hf", step=2)
    assert torch.equal(api.load_hf(tmp_path / "hf").embed.weight, early.embed.weight)
    with pytest.raises(UserError, match=r"no checkpoint of step 3; it has 2, 4"):
        api.generate(run, "x", step=3)
    sampled = {"temperature": 1.0, "seed": 1, "max_new_tokens": 40}
    assert api.generate(run, "def", step=4, **sampled) == api.generate(run, "def", **sampled)
    assert api.generate(run, "def", step=2, **sampled) != api.generate(run, "def", **sampled)
    with pytest.raises(UserError, match=r"--step: .* is an HF folder"):
        api.generate(tmp_path / "hf", "x", step=2)
    with pytest.raises(UserError, match=r"is an HF folder.*meshwright import"):
        load(tmp_path / "hf")


def test_a_window_has_positions_of_the_model(trained: Path) -> None:
    run = trained / "run"
    most = load(run).model.max_seq_len
    with pytest.raises(UserError, match=rf"--seq-len: {most + 1} tokens .* give at most {most}"):
        api.evaluate(run, seq_len=most + 1)


def test_a_mistake_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    run, other = str(trained / "run"), trained / "other.txt"
    api.tokenize(str(other), "bpe:300", tmp_path / "bpe", vocab_size=300)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    api.export(trained / "run", tmp_path / "hf")
    for words, parts in (
        (["--data", "other"], ["--data", "name and a path"]),
        (["--data", "x=/no/file"], ["--data", "/no/file"]),
        (["--data", f"a={other}", "--data", f"a={other}"], ["'a' is given twice"]),
        (["--data", f"x={tmp_path / 'bpe'}"], ["--data", "another tokenizer", "tokenizer.json"]),
        (["--data", f"x={tmp_path / 'empty.txt'}"], ["--data", "holds no text"]),
        (["--data", f"x={tmp_path / 'bad.jsonl'}"], ["--data", "bad.jsonl", "2"]),
        (["--data", f"{trained / 'prose.txt'}={other}"], ["--data", "the run's own text"]),
        (["--only-data"], ["--only-data", "add a --data"]),
        (["--step", "3"], ["--step", "no checkpoint of step 3", "2, 4"]),
        (["--step", "x"], ["--step", "'x'"]),
        (["--tokens", "0"], ["--tokens"]),
        (["--limit", "3"], ["--limit", "--tasks"]),
        (["--out", "/no/folder/x.json"], ["--out", "/no/folder"]),
        (["--layout.cp", "2"], ["--layout.cp", "no effect"]),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            main(["evaluate", run, *words])
        assert all(part in str(caught.value) for part in parts), str(caught.value)
        assert "\n" not in str(caught.value)
    for words, part in (([], "--data NAME=PATH"), (["--step", "2"], "one set of weights")):
        with pytest.raises(UserError, match=part):
            main(["evaluate", str(tmp_path / "hf"), *words])


def test_text_that_changed_is_not_taken_for_what_was_held_out(trained: Path, tmp_path: Path) -> None:
    """Some of it may have been trained on."""
    file, run = trained / "prose.txt", trained / "run"
    kept = file.read_text()
    try:
        file.write_text(kept + "<|endoftext|>more")
        with pytest.raises(UserError, match="is not that of the checkpoint of step 4"):
            api.evaluate(run)
        with pytest.raises(UserError, match="is not that of the checkpoint of step 4"):
            api.evaluate(run, seq_len=16)
        api.evaluate(run, data={"other": trained / "other.txt"}, only_data=True)
    finally:
        file.write_text(kept)
