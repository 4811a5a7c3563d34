"""Recomputation that keeps attention alone: where it is tried, what it gains, and how a plan says it."""

from __future__ import annotations

from meshwright.cli.plan import brief
from meshwright.planner.fit.command import train_command
from meshwright.planner.layout_levels import ATTENTION_KEPT
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import load

AXES = {"cp": 8, "tp": 1, "pp": 1}


def request(length: int, stack: str = "meshwright", **flags: object) -> PlanRequest:
    """Llama 3 8B on 8 H100 with sequences of `length` tokens, one for all of them."""
    keys = {f"layout.{axis}": size for axis, size in AXES.items()} | {"model.max_seq_len": length, **flags}
    texts = tuple((key, str(value)) for key, value in keys.items())
    return PlanRequest("llama3-8b", "h100", 8, length, length, stack=stack, overrides=texts)


def problem(asked: PlanRequest) -> SearchProblem:
    (found,), _ = asked.problems()
    return found


def tried(found: SearchProblem) -> bool:
    """True if a layout that is searched keeps attention alone."""
    return any(inner.recompute == ATTENTION_KEPT for inner in found.space().inner())


def test_attention_alone_is_kept_where_repeating_it_would_take_long() -> None:
    assert tried(problem(request(262144))) and not tried(problem(request(8192)))
    assert not tried(problem(request(262144, "megatron-core")))
    assert not tried(problem(request(262144, **{"recompute.policy": "full"})))


def test_long_sequences_gain_by_it_and_the_plan_says_it() -> None:
    asked = request(262144)
    (best, *_) = problem(asked).search(1).best
    assert best.spec.recompute == ATTENTION_KEPT
    (repeated, *_) = problem(request(262144, **{"recompute.policy": "full"})).search(1).best
    assert best.seconds < 0.9 * repeated.seconds
    assert brief(best.spec).endswith("mb1 selective save=attention")
    words = train_command(best.spec, asked).split()
    pairs = [(key.removeprefix("--"), text) for key, text in zip(words[2::2], words[3::2], strict=True)]
    again = load(None, [*pairs, ("data.corpus", "synthetic")])
    assert again.recompute == ATTENTION_KEPT and again.layout == best.spec.layout


def test_what_is_to_be_saved_asks_for_selective_recomputation() -> None:
    asked = PlanRequest(
        "llama3-8b",
        "h100",
        8,
        2048,
        8 * 2048,
        overrides=(("recompute.save", "attention"), ("layout.pp", "1")),
    )
    (best, *_) = problem(asked).search(1).best
    assert best.spec.recompute == ATTENTION_KEPT
