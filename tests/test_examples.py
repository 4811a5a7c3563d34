"""Each run file of `examples/` says what it does and how long it takes, fits its cluster, trains in small."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from command_lines import parsed
from meshwright import api
from meshwright.checkpoint.directory import published
from meshwright.cli.main import main
from meshwright.cli.plan import brief
from meshwright.comm.mesh import Mesh
from meshwright.hardware.find import cluster
from meshwright.infer.soft_target_source import soft_targets_of
from meshwright.planner.plan import Plan, estimate
from meshwright.rank.device_defaults import with_device_defaults
from meshwright.spec import RunSpec, load
from meshwright.spec.load import Overrides, read_tree
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.units import duration
from meshwright.verify.narrow import narrow
from ranks import Ranks

ROOT = Path(__file__).resolve().parent.parent
FILES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.toml"))}
CHATS = ROOT / "examples" / "data" / "chats.jsonl"
PAIRS = ROOT / "examples" / "data" / "pairs.jsonl"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""A chat template that a tokenizer of bytes can spell."""
STEPS = 3

_HEAD = re.compile(
    r"# (?P<what>[^\n]+)\n"
    r"# Predicted on (?P<devices>[\d,]+) x (?P<cluster>\S+): (?P<step>[\d.]+ m?s) a step, "
    r"(?P<whole>(?P<count>[\d.]+) (?P<unit>\w+)) in all\. (?P<expected>[^\n]+)\n"
    r"(?P<commands>(#   [^\n]+\n)+)\n"
)
_BEST = re.compile(r"\[layout\]  # best of: meshwright (plan .+)")
_SEARCHED_LONG = {"deepseek-v3", "experts-large", "two-sites", "zero-bubble"}
"""Examples whose search takes more than some seconds."""
_ONLY_LAID_OUT = {
    *("chaos", "code", "continue", "first", "laptop", "one-gpu-24gb", "pretrain-125m", "pretrain-1b"),
    *("pretrain-350m", "pretrain-8b", "recovery", "tour", "wsd"),
}
"""Examples whose steps in small are those of others: a dense model on data ranks or stages."""
_TRAINED_ELSEWHERE = {
    "batch-warmup": "tests/train/test_batch_warmup.py",
    "dpo": "tests/finetune/test_preference_runs.py",
    "ema": "tests/optim/test_ema.py",
    "fp8": "tests/train/test_run_resume.py",
    "lora": "tests/train/test_run_lora.py",
    "mup": "tests/train/test_coordinate_check.py",
    "muon": "tests/train/test_run_resume.py",
    "offload": "tests/optim/test_offload.py",
    "quantise": "tests/verify/test_verify_qat.py",
}
"""Examples whose switches runs of other tests have in `make test`, too."""
_COMPARED = {"experts-large", "rack"}
"""Examples of a bf16 model on tensor ranks and stages, which `make test` compares with one device in
tests/verify/test_verify_experts.py (experts on `dualpipe-v`) and test_verify_pipelines.py (`interleaved`)."""


@dataclass(frozen=True)
class Head:
    """The comment at the top of an example."""

    devices: int
    cluster: str
    step: str
    whole: str
    commands: list[list[str]]
    """The words of each command after `meshwright`."""

    @property
    def hardware(self) -> str:
        """The devices as the table of the examples' page has them."""
        name = f"[{Path(self.cluster).name}]({Path(self.cluster).name})"
        return f"{self.devices:,} x {name if self.cluster.endswith('.json') else self.cluster}"


def head_of(path: Path) -> Head:
    """Read the comment at the top of an example: two lines of prose, then commands, indented."""
    match = _HEAD.match(path.read_text(encoding="utf-8"))
    assert match, f"{path.name} does not begin with two lines of prose, as {_HEAD.pattern}"
    text = match["commands"].replace("#   ", "").replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    words = [line[line.index("meshwright") + 1 :] for line in lines]
    return Head(
        int(match["devices"].replace(",", "")), match["cluster"], match["step"], match["whole"], words
    )


def seconds_of(whole: str) -> float:
    """Seconds of a time such as 12 minutes or 3.2 days."""
    count, unit = whole.split()
    return duration(count + unit[0])


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of the examples are for the repository's root."""
    monkeypatch.chdir(ROOT)


def test_there_are_many_examples_and_no_other_files() -> None:
    assert len(FILES) >= 20
    others = {path.name for path in (ROOT / "examples").iterdir()} - {path.name for path in FILES.values()}
    assert others == {"README.md", "two-sites.json", "grpo.py", "data", "clusters"}


@pytest.mark.parametrize(("file", "kind"), [(CHATS, "chats"), (PAIRS, "pairs")], ids=["chats", "pairs"])
def test_the_rows_are_those_that_their_program_writes(file: Path, kind: str) -> None:
    made = runpy.run_path(str(file.parent / f"make_{kind}.py"))[kind]()
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows == made and len(rows) == 200


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("in_root")
def test_an_example_is_valid_and_says_how_to_start_it(name: str) -> None:
    path = FILES[name].relative_to(ROOT)
    assert main(["spec", "check", str(path)]) == 0
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120
    spec, head = load(path), head_of(path)
    verbs = [parsed(words) for words in head.commands]
    starts = [call for verb, call in verbs if verb.name in ("train", "chaos") and call.path() == path]
    assert starts, "no command starts it"
    hosts = [call for call in starts if call.flags.get("nodes")]
    for call in hosts:
        most = int(str(call.flags["nodes"]).rpartition(":")[2])
        assert most * int(call.flags["nproc"]) == spec.layout.world_size == head.devices
    assert hosts or head.devices <= 8 or "torchrun" in path.read_text(encoding="utf-8")
    for _, call in verbs:  # flags that a command adds go with the file
        if call.path() == path and call.overrides:
            load(path, call.overrides)


def run_of(path: Path, overrides: Overrides = ()) -> RunSpec:
    """The run of an example on the devices that it names, which decide what it leaves open."""
    kind = cluster(head_of(path).cluster).device.kind
    return load(path, with_device_defaults(read_tree(path), overrides, kind))


def predicted(path: Path) -> Plan:
    """The plan that the layout of an example is, without a teacher, on the cluster that it names."""
    spec = run_of(path, [("distil", "none")])
    return estimate(spec, cluster(head_of(path).cluster, spec.layout.world_size))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("in_root")
def test_an_example_fits_and_takes_as_long_as_it_says(name: str) -> None:
    head, plan = head_of(FILES[name]), predicted(FILES[name])
    tokens = plan.spec.train.total_steps * plan.spec.train.batch_tokens
    assert plan.cluster.count == head.devices
    assert plan.fits_probability >= 0.8
    assert duration(head.step) == pytest.approx(plan.step_seconds, rel=0.1), head.step
    assert seconds_of(head.whole) == pytest.approx(plan.training(tokens).days * 86400, rel=0.1), head.whole


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in _SEARCHED_LONG else ()) for name in FILES]
)
@pytest.mark.usefixtures("in_root")
def test_a_layout_is_the_planners_or_says_why_not(name: str) -> None:
    text = FILES[name].read_text(encoding="utf-8")
    found = _BEST.search(text)
    if found is None:
        assert "[layout]  # not planned: " in text or "# No [layout]: " in text
        return
    _, call = parsed(shlex.split(found[1]))
    head = head_of(FILES[name])
    assert (call.flags["cluster"], int(call.flags["gpus"])) == (head.cluster, head.devices)
    asked = {key: call.flags[key] for key in ("gpus", "islands")}
    plans = api.plan(call.words[0], call.flags["cluster"], top=1, overrides=call.overrides, **asked)
    spec = run_of(FILES[name], call.overrides)
    assert brief(plans.best.spec) == brief(spec)
    assert written(plans.best.spec) == written(spec)


def written(spec: RunSpec) -> tuple[Any, ...]:
    """The layout with its stages of a rank, and what islands exchange."""
    return spec.layout.model_copy(update={"virtual": spec.layout.chunks}), spec.outer, spec.recompute


def test_the_page_has_a_row_for_each_example() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| \[(\S+)\]\((\S+)\) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert sorted(file for _, file, *_ in rows) == sorted(path.name for path in FILES.values())
    for _, file, link, hardware, time in rows:
        head = head_of(ROOT / "examples" / file)
        assert (link, hardware, time) == (file, head.hardware, f"{head.step} a step, {head.whole}")


def smaller(spec: RunSpec) -> RunSpec:
    """The run with axes of 2 ranks, up to 4 in all: islands, stages, the sequence, tensors, and data."""
    tree = spec.to_json()
    layout = tree["layout"]
    ranks = 1
    for axis in ("replicate", "pp", "cp", "tp", "dp"):
        layout[axis] = 2 if layout[axis] > 1 and ranks < 4 else 1
        ranks *= layout[axis]
    layout["ep"] = 2 if layout["ep"] > 1 and ranks > layout["pp"] * layout["replicate"] else 1
    if layout["virtual"] is not None:
        layout["virtual"] = min(layout["virtual"], 2)
    return RunSpec.model_validate(tree)


def in_small(spec: RunSpec, corpus: Path, folder: Path) -> RunSpec:
    """A run of a few steps with the example's switches: a narrow model, few layers, bytes of `corpus`."""
    small, _ = narrow(smaller(spec), most_work=0)
    tree = small.to_json()
    tree["model"]["vocab_size"] = 320  # of which bytes are 257
    if spec.data.mixture:
        tree["data"]["mixture"] = {str(corpus / name): share for name, share in spec.data.mixture.items()}
    elif spec.preference is not None:
        tree["data"]["corpus"] = str(PAIRS)
    elif spec.data.has_chats:
        (folder / "template.jinja").write_text(TEMPLATE)
        tree["data"] |= {"corpus": str(CHATS), "chat_template": str(folder / "template.jinja")}
    else:
        tree["data"]["corpus"] = str(corpus)
    tree["data"] |= {"tokenizer": "byte", "val_fraction": 0.2}
    tree["data"]["cache"] = str(folder / "tokens")
    tree["train"] |= {"steps": STEPS, "tokens": None, "warmup_steps": 1, "eval_tokens": 256, "eval_every": 2}
    if spec.train.offload == "host":  # which is for GPUs: the same pieces, in a file
        tree["train"]["offload"] = "disk"
    for key, most in (("every", 2), ("fragments", 2), ("delay", 1)):
        tree["outer"][key] = min(most, tree["outer"][key])
    if spec.distil is not None:
        tree["distil"]["teacher"] = str(folder / "teacher")
    return RunSpec.model_validate(tree)


def train(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Any]:
    def targets(corpus: Any) -> Any:
        return soft_targets_of(spec, mesh, corpus, out)

    return open_run(spec, mesh, out, Observers([]), soft_targets=targets).execute(None)


@pytest.fixture(scope="module")
def corpora(corpus: Path) -> Path:
    """A folder of text that also has folders of it, by the names that mixtures have."""
    for name in load(FILES["mixture"]).data.mixture:
        (corpus / name).mkdir()
        for file in list(corpus.glob("*.txt"))[:20]:
            (corpus / name / file.name).write_text(f"{name}: {file.read_text()}", encoding="utf-8")
    return corpus


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.full if name in _ONLY_LAID_OUT | _COMPARED | {*_TRAINED_ELSEWHERE} else ()
        )
        for name in FILES
    ],
)
def test_an_example_trains_in_small(name: str, ranks: Ranks, corpora: Path, tmp_path: Path) -> None:
    spec = in_small(load(FILES[name]), corpora, tmp_path)
    if spec.distil is not None:  # the example's teacher is the run of another example
        teacher = in_small(load(FILES["pretrain-1b"]), corpora, tmp_path)
        ranks.run(teacher.layout, train, teacher, tmp_path / "teacher")
        (tmp_path / "teacher" / "run.json").write_text(json.dumps({"spec": teacher.to_json()}))
    result = ranks.run(spec.layout, train, spec, tmp_path / "run")[0]
    assert math.isfinite(result["final_loss"]) and math.isfinite(result["val_loss"])
    assert list(published(tmp_path / "run" / "checkpoints"))[-1] == STEPS


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_grpo_raises_its_reward(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It begins with a model drawn at random, whose tokens are right once in sixteen times."""
    runpy.run_path(str(ROOT / "examples" / "grpo.py"))["main"](
        ["--seed", str(seed), "--iterations", "16", "--prompts", "8", "--layout.micro_batch", "16"]
    )
    rewards = [float(row) for row in re.findall(r"mean reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 16
    assert rewards[0] < 0.15 and min(rewards[-3:]) > 0.3
