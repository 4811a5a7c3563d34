"""Tasks of lm-eval on a decoder of any layout: the answers of lm-eval's own model of transformers."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import CASES, save_theirs
from meshwright import api
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.data.tokenizer import Tokenizer, byte_tokenizer
from meshwright.infer.sharded import ShardedDecoder, spec_to_evaluate
from meshwright.spec import RunSpec, UserError, load
from ranks import Ranks

CHOICE = """
task: colours
dataset_path: json
dataset_kwargs:
  data_files: {{test: {root}/colours.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATION = """
task: endings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {root}/endings.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{end}}}}"
generation_kwargs: {{until: ["\\n", "o"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
ROLLING = """
task: texts
dataset_path: json
dataset_kwargs:
  data_files: {{test: {root}/endings.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
HUB = "task: far\ndataset_path: someone/something\noutput_type: multiple_choice\ntest_split: test\n"
TASKS = ("colours", "endings", "texts")
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp=2": {"dp": 2},
    "tp=2 pp=2": {"tp": 2, "pp": 2},
    "dp=2 pp=3 ep=2": {"dp": 2, "pp": 3, "ep": 2},
}

Answers = dict[str, list[Any]]


def needs_lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tasks whose data lie beside it."""
    root = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": "The sky is ", "choices": ["blue", "a colour that is green", "red"], "answer": 0},
        {"question": "Grass is", "choices": [" blue", " green"], "answer": 1},
        {"question": "Größe", "choices": ["x", " y"], "answer": 1},
        {"question": "", "choices": ["one", "two"], "answer": 0},
        *({"question": f"Is {n} even? ", "choices": ["yes", "no"], "answer": n % 2} for n in range(9)),
    ]
    (root / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = [{"text": "Once upon a time " * n, "end": "x"} for n in (1, 2, 5, 9)]
    (root / "endings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ends))
    folder = root / "yaml"
    folder.mkdir()
    for name, text in zip(TASKS, (CHOICE, GENERATION, ROLLING), strict=True):
        (folder / f"{name}.yaml").write_text(text.format(root=root))
    return folder


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a case to its run's folder and its HF folder, both in float64."""
    made: dict[str, tuple[Path, Path]] = {}

    def family(case: str) -> tuple[Path, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            name, fields = CASES[case]
            theirs = save_theirs(folder / "float32", name, fields | {"vocab_size": 260}).double()
            theirs.save_pretrained(folder / "hf")
            byte_tokenizer().save(folder / "hf")
            api.import_hf(folder / "hf", folder / "run")
            made[case] = folder / "run", folder / "hf"
        return made[case]

    return family


def record(answers: Answers, model: Any) -> Any:
    """The model, whose answers are noted by the kind of request."""
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        method = getattr(model, kind)

        def noted(requests: Any, method: Any = method, kind: str = kind, **options: Any) -> Any:
            answers.setdefault(kind, []).extend(method(requests, **options))
            return answers[kind][-len(requests) :]

        setattr(model, kind, noted)
    return model


def stops(mesh: Mesh, spec: RunSpec, run: Path) -> list[tuple[str, str, int]]:
    """Each continuation without a stop sequence, with one, and the tokens that the latter took."""
    from lm_eval.api.instance import Instance

    from meshwright.infer import harness

    model = ShardedDecoder(spec, mesh)
    model.load(run, load(run))
    lm = harness.DecoderLM(model, Tokenizer.open(run / "tokenizer.json"))
    taken: list[int] = []
    kept = harness.continue_requests

    def noted(decoder: Any, requests: Any, *rest: Any, **options: Any) -> None:
        kept(decoder, requests, *rest, **options)
        taken[:] = [len(request.new) for request in requests]

    harness.continue_requests = noted  # type: ignore[assignment]
    try:
        found = []
        for text in ("a", "bc", "Once"):

            def ask(until: list[str], text: str = text) -> str:
                settings = {"until": until, "max_gen_toks": 12}
                return lm.generate_until([Instance("generate_until", {}, (text, settings), 0)])[0]

            whole = ask([])
            found.append((whole, ask(["none", whole[3]]), taken[0]))
        return found
    finally:
        harness.continue_requests = kept


def answered(mesh: Mesh, spec: RunSpec, run: Path, tasks: Path) -> tuple[Answers, dict[str, Any]]:
    from meshwright.infer.harness import DecoderLM, Tasks

    model = ShardedDecoder(spec, mesh)
    model.load(run, load(run))
    answers: Answers = {}
    lm = record(answers, DecoderLM(model, Tokenizer.open(run / "tokenizer.json"), batch=3))
    return answers, Tasks(tasks).run(lm)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("llama", "tp=2 pp=2"),
        pytest.param("llama", "one", marks=pytest.mark.full),
        pytest.param("qwen3", "dp=2", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "dp=2 pp=3 ep=2", marks=pytest.mark.full),
    ],
)
def test_answers_are_those_of_lm_evals_own_model(
    ranks: Ranks, families: Any, tasks: Path, tmp_path: Path, case: str, layout: str
) -> None:
    needs_lm_eval()
    run, _ = families(case)
    api.export(run, tmp_path / "hf", dtype="float32")  # loses nothing: the weights were drawn in it
    theirs, results = their_answers(tmp_path / "hf", tasks)
    trained = load(run)
    keys = [(f"layout.{axis}", str(size)) for axis, size in LAYOUTS[layout].items()]
    spec = spec_to_evaluate(trained.model, trained.precision, keys, trained.data)
    rules = "nccl" if "pp" in LAYOUTS[layout] else "gloo"
    (_, found), *_ = every = ranks.run(spec.layout, answered, spec, run, tasks, rules=rules)
    for answers, _ in every:
        assert answers["generate_until"] == theirs["generate_until"]
        for mine, other in zip(answers["loglikelihood"], theirs["loglikelihood"], strict=True):
            assert abs(mine[0] / other[0] - 1) < 1e-7 and mine[1] == other[1]
        for mine, other in zip(
            answers["loglikelihood_rolling"], theirs["loglikelihood_rolling"], strict=True
        ):
            assert abs(mine / other - 1) < 1e-7
    assert len(set(theirs["generate_until"])) > 1 and set(found) == set(TASKS)
    for task, metric in (("colours", "acc"), ("colours", "acc_norm"), ("endings", "exact_match")):
        assert found[task][metric] == results[task][f"{metric},none"]
    assert abs(found["texts"]["bits_per_byte"] / results["texts"]["bits_per_byte,none"] - 1) < 1e-7
    assert found["colours"]["examples"] == 13 and "acc_stderr" in found["colours"]


def test_a_continuation_ends_at_its_stop_sequence(ranks: Ranks, families: Any) -> None:
    needs_lm_eval()
    run, _ = families("llama")
    trained = load(run)
    keys = [("layout.tp", "2"), ("layout.pp", "2")]
    spec = spec_to_evaluate(trained.model, trained.precision, keys, trained.data)
    for found in ranks.run(spec.layout, stops, spec, run, rules="nccl"):
        for whole, cut, tokens in found:
            assert cut == whole.split(whole[3])[0] != whole and tokens <= 4


def their_answers(exported: Path, tasks: Path) -> tuple[Answers, dict[str, Any]]:
    """Those of lm-eval's model of an exported folder, with one token before a whole text and not two."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    answers: Answers = {}
    lm = HFLM(
        pretrained=str(exported), dtype="float64", device="cpu", batch_size=1, softmax_dtype=torch.float64
    )
    assert lm.model.dtype == torch.float64
    lm.model.set_experts_implementation("eager")  # others take no float64
    rolling, encode = lm.loglikelihood_rolling, lm.tok_encode
    assert encode("a")[0] == lm.prefix_token_id

    def begun_once(requests: Any, **options: Any) -> Any:
        lm.tok_encode = partial(encode, add_special_tokens=False)
        try:
            return rolling(requests, **options)
        finally:
            lm.tok_encode = encode

    lm.loglikelihood_rolling = begun_once
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(record(answers, lm), tasks=[*TASKS], task_manager=manager)
    return answers, found["results"]


def test_tasks_of_a_run_by_the_command(
    families: Any, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A name within a folder, a file of one task, and an HF folder."""
    needs_lm_eval()
    run, hf = families("llama")
    out = tmp_path / "out.json"
    assert main(["evaluate", str(run), "--tasks", f"{tasks},colours", "--limit", "5", "--out", str(out)]) == 0
    printed = capfd.readouterr().out
    assert "colours" in printed and "acc_norm" in printed and "endings" not in printed
    (row,) = json.loads(out.read_text())["checkpoints"]
    assert row["domains"] == {} and row["tasks"]["colours"]["examples"] == 5
    layout = api.evaluate(run, tasks=tasks / "colours.yaml", limit=5, layout={"layout.tp": 2})
    assert layout["checkpoints"] == [row]
    exported = api.evaluate(hf, tasks=tasks / "colours.yaml", limit=5)
    assert exported["checkpoints"] == [row]


def test_a_mistake_in_tasks_is_one_sentence(families: Any, tasks: Path, tmp_path: Path) -> None:
    needs_lm_eval()
    run, _ = families("llama")
    (tmp_path / "hub.yaml").write_text(HUB)
    (tmp_path / "damaged.yaml").write_text("task: [x\n  - y: {")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "nameless.yaml").write_text("dataset_path: json\n")
    missing = tmp_path / "missing.yaml"
    missing.write_text(CHOICE.format(root="/no/such"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "colours.jsonl").write_text('{"question": "a"}\n{"question": \n')
    (tmp_path / "bad" / "task.yaml").write_text(CHOICE.format(root=tmp_path / "bad"))
    long = GENERATION.replace("max_gen_toks: 12", "max_gen_toks: 1000").format(root=tasks.parent)
    (tmp_path / "long.yaml").write_text(long)
    (tmp_path / "empty").mkdir()
    for words, parts in (
        ("/no/tasks", ["no file or folder /no/tasks"]),
        (f"{tasks},colors", ["no task 'colors'", "did you mean 'colours'", "endings"]),
        (str(tmp_path / "hub.yaml"), ["'far'", "someone/something", "local files only"]),
        (str(tmp_path / "damaged.yaml"), ["damaged.yaml", "cannot be read as a task"]),
        (str(tmp_path / "list.yaml"), ["list.yaml", "cannot be read as a task"]),
        (str(tmp_path / "nameless.yaml"), ["nameless.yaml", "no key 'task'"]),
        (str(tmp_path / "empty"), ["holds no task"]),
        (str(missing), ["'colours' cannot be opened", "/no/such"]),
        (str(tmp_path / "bad"), ["'colours' cannot be opened"]),
        (str(tmp_path / "long.yaml"), ["max_gen_toks 1000", "128"]),
    ):
        with pytest.raises(UserError) as caught:
            main(["evaluate", str(run), "--tasks", words])
        assert all(part in str(caught.value) for part in ("--tasks", *parts)), str(caught.value)
        assert "\n" not in str(caught.value)


def test_without_lm_eval_the_command_that_installs_it_is_told(
    families: Any, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = families("llama")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"needs lm-eval.*pip install 'meshwright\[eval\]'"):
        main(["evaluate", str(run), "--tasks", str(tasks)])
