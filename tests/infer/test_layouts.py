"""Generation under every layout: the tokens of one device, and of transformers, for every family."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import CASES, save_theirs
from meshwright import api
from meshwright.api.generation import model_ranks
from meshwright.comm.mesh import Mesh
from meshwright.infer.batching import Request
from meshwright.infer.generate import continue_requests
from meshwright.infer.sampling import Sampling
from meshwright.infer.sharded import load_sharded, spec_to_generate
from meshwright.spec import RunSpec, load
from ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

NEW = 9
PROMPTS = [[5, 17, 3, 96, 41, 5, 0, 71], [44], [7, 7, 30], [9, 9, 80, 2, 13], [61, 2, 90]]
LAYOUTS: dict[str, dict[str, int]] = {
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2},
    "dp=2": {"dp": 2},
    "tp=2 pp=2": {"tp": 2, "pp": 2},
    "tp=4": {"tp": 4},
    "dp=2 ep=2": {"dp": 2, "ep": 2},
    "dp=2 tp=2 ep=2": {"dp": 2, "tp": 2, "ep": 2},
    "tp=2 etp=2": {"tp": 2, "etp": 2},
    "dp=2 pp=3 ep=2": {"dp": 2, "pp": 3, "ep": 2},
}
QUICK = {
    ("llama", "dp=2"), ("gpt2", "tp=4"), ("mistral window", "tp=2 pp=2"), ("qwen3_moe", "dp=2 ep=2"),
    ("deepseek_v3", "tp=2 etp=2"),
}  # fmt: skip
Continued = list[list[int]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a case to its run's folder, imported from float64, and the tokens of transformers."""
    made: dict[str, tuple[Path, Continued]] = {}

    def family(case: str) -> tuple[Path, Continued]:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            theirs = save_theirs(folder / "float32", *CASES[case]).double()
            theirs.save_pretrained(folder / "hf")
            theirs.set_experts_implementation("eager")  # others take no float64
            api.import_hf(folder / "hf", folder / "run")
            made[case] = folder / "run", [their_tokens(theirs, prompt) for prompt in PROMPTS]
        return made[case]

    return family


def their_tokens(theirs: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of a model of transformers, one full forward for each."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NEW):
            tokens = torch.cat([tokens, theirs(tokens).logits[:, -1:].argmax(-1)], 1)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def continued(
    mesh: Mesh, spec: RunSpec, run: Path, sampling: Sampling, lookup: int = 0
) -> dict[int, list[int]]:
    """The new tokens of this data rank's prompts, at most three of them at a time."""
    decoder, part = load_sharded(run, load(run), spec, mesh)
    requests = [Request(number, prompt, NEW) for number, prompt in enumerate(PROMPTS)]
    own = requests[mesh.data_rank :: spec.layout.data_ranks]
    continue_requests(decoder, own, sampling, None, 3, lookup=lookup, part=part)
    return {request.number: request.new for request in own}


def spec_of(run: Path, axes: dict[str, int]) -> RunSpec:
    trained = load(run)
    keys = [(f"layout.{axis}", str(size)) for axis, size in axes.items()]
    return spec_to_generate(trained.model, trained.precision, keys)


def on_layout(ranks: Ranks, run: Path, axes: dict[str, int], *how: Any) -> Continued:
    """The continuation of each prompt; stages send their messages under NCCL's rules."""
    spec, rules = spec_of(run, axes), "nccl" if "pp" in axes else "gloo"
    new: dict[int, list[int]] = {}
    for part in ranks.run(spec.layout, continued, spec, run, *how, rules=rules):
        for number, tokens in part.items():
            assert new.setdefault(number, tokens) == tokens, "ranks of one layout chose other tokens"
    return [new[number] for number in range(len(PROMPTS))]


def fits(case: str, layout: str) -> bool:
    name = CASES[case][0]
    has_experts = "Moe" in name or name in ("Mixtral", "DeepseekV2", "DeepseekV3", "Olmoe", "GptOss")
    return has_experts or not {"ep", "etp"} & LAYOUTS[layout].keys()


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[] if (case, layout) in QUICK else pytest.mark.full)
        for case in CASES
        for layout in LAYOUTS
        if fits(case, layout)
    ],
)
def test_greedy_tokens_are_those_of_transformers(ranks: Ranks, families: Any, case: str, layout: str) -> None:
    run, theirs = families(case)
    assert len({token for tokens in theirs for token in tokens}) > 4, "constant tokens would prove little"
    assert on_layout(ranks, run, LAYOUTS[layout], Sampling()) == theirs


@pytest.mark.parametrize("layout", ["tp=2 pp=2", pytest.param("dp=2", marks=pytest.mark.full)])
def test_draws_do_not_depend_on_the_layout(ranks: Ranks, families: Any, layout: str) -> None:
    run, greedy = families("llama")
    sampling = Sampling(temperature=1.3, top_k=40, top_p=0.95, seed=3)
    alone = on_layout(ranks, run, {}, sampling)
    assert alone != greedy
    assert on_layout(ranks, run, LAYOUTS[layout], sampling) == alone


@pytest.mark.parametrize(("case", "layout"), [("llama", "tp=2 pp=2"), ("deepseek_v3", "dp=2 pp=3 ep=2")])
def test_guesses_change_no_token_on_a_layout(ranks: Ranks, families: Any, case: str, layout: str) -> None:
    run, theirs = families(case)
    assert on_layout(ranks, run, LAYOUTS[layout], Sampling(), 3) == theirs


def test_a_folder_whose_positions_are_few_takes_a_layout(families: Any) -> None:
    """Fewer learned positions than a run has in a sample by default."""
    run, _ = families("gpt2")
    folder = run.parent / "hf"
    assert model_ranks(folder, [("layout.tp", "2"), ("layout.pp", "2")], "trained") == 4


def a_slow_data_rank(mesh: Mesh, spec: RunSpec, run: Path) -> int:
    """The rank that ends last, where the other data rank has ended long before a rank is given up."""
    control = copy(mesh.control)
    control.timeout = timedelta(seconds=1)
    mesh = replace(mesh, control=control)
    decoder, part = load_sharded(run, load(run), spec, mesh)
    request = Request(mesh.rank, [1], 4)

    def slow(_: Request) -> None:
        time.sleep(0.8 * mesh.rank)

    continue_requests(decoder, [request], Sampling(), None, 1, show=slow, part=part)
    return len(mesh.control.gather(request.new))


def test_data_ranks_wait_for_each_other_as_long_as_they_live(ranks: Ranks, families: Any) -> None:
    run, _ = families("llama")
    spec = spec_of(run, {"dp": 2})
    assert ranks.run(spec.layout, a_slow_data_rank, spec, run) == [2, 0]
