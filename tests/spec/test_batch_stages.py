"""Stages of the batch's warm-up: sizes, sums and steps as functions of the step's number."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import from_tree
from meshwright.spec.toml import to_toml
from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.batches import batch_sizes


def train_of(*stages: list[int], batch_tokens: int = 8192, **keys: Any) -> TrainSpec:
    return TrainSpec.model_validate({"batch_warmup": stages, "batch_tokens": batch_tokens, **keys})


def test_stages_end_with_the_step_that_reaches_their_tokens() -> None:
    train = train_of([2048, 5000], [4096, 20_000], tokens=100_000)
    sizes = [2048] * 3 + [4096] * 4 + [8192] * 10
    assert [train.batch_of_step(step) for step in range(1, 18)] == sizes
    assert [train.tokens_after(steps) for steps in range(18)] == [*accumulate(sizes, initial=0)]
    assert train.total_steps == 17 and train.tokens_after(16) < 100_000 <= train.tokens_after(17)


@given(st.data())
def test_closed_forms_equal_a_count_step_by_step(data: st.DataObject) -> None:
    sizes = sorted(data.draw(st.sets(st.integers(1, 50), min_size=1, max_size=4)))
    stages, end = [], 0
    for size in sizes[:-1]:
        end += size * data.draw(st.integers(1, 5)) + data.draw(st.integers(0, 3))
        stages.append([size, end])
    try:
        train = train_of(*stages, batch_tokens=sizes[-1])
    except UserError:  # a stage that the one before overruns
        return
    found = batch_sizes(train)
    counted = [next(found) for _ in range(60)]
    assert [train.batch_of_step(step) for step in range(1, 61)] == counted
    assert [train.tokens_after(steps) for steps in range(61)] == [*accumulate(counted, initial=0)]
    for tokens in range(1, sum(counted), 7):
        steps = train.steps_for(tokens)
        assert train.tokens_after(steps - 1) < tokens <= train.tokens_after(steps)


def test_a_flag_and_a_file_say_the_same() -> None:
    flag = from_tree({}, [("train.batch_warmup", "2048:5000,4096:2e4")])
    file = from_tree({"train": {"batch_warmup": [[2048, 5e3], [4096, 20_000]]}})
    assert flag == file == RunSpec.model_validate(flag.to_json())
    assert flag.train.batch_warmup == ((2048, 5000), (4096, 20_000))
    assert "batch_warmup = [[2048, 5000], [4096, 20000]]" in to_toml(flag)
    assert from_tree(flag.to_json(), [("train.batch_warmup", "[]")]).train.batch_warmup == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"train.batch_warmup": "fast"}, "a list of stages, each the tokens of a batch and the tokens seen"),
        ({"train.batch_warmup": "2048:0"}, "a list of stages"),
        ({"train.batch_warmup": "2048:9000:2"}, "a list of stages"),
        ({"train.batch_warmup": "2048:true"}, "a list of stages"),
        ({"train.batch_warmup": "2048:NaN"}, "a list of stages"),
        ({"train.batch_warmup": "2048:1e300"}, "a list of stages"),
        ({"train.batch_warmup": "[[2048, 5000.5]]"}, "a list of stages"),
        ({"train.batch_warmup": "8192:9000"}, "train.batch_tokens = 8192, which is not larger"),
        ({"train.batch_warmup": "4096:5000,2048:9000"}, "followed by batches of 2048, which is not larger"),
        ({"train.batch_warmup": "2048:2048,4096:2000"}, "no step has batches of 4096 tokens until 2000"),
        ({"train.batch_warmup": "1000:2000"}, "1000 tokens are not a multiple of data.seq_len 512 x 1"),
        ({"train.batch_warmup": "2048:9000", "layout.dp": "8"}, "try 4096"),
        ({"train.batch_warmup": "2048:9000", "layout.micro_batch": "8"}, "layout.micro_batch: 8 does not"),
    ],
)
def test_mistakes_are_one_sentence(flags: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        from_tree({}, list(flags.items()))
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith("--")


def test_microbatches_have_one_size_and_grow_in_number() -> None:
    flags = [("train.batch_warmup", "3072:9000"), ("train.batch_tokens", "12288"), ("layout.dp", "2")]
    spec = from_tree({}, flags)
    assert spec.micro_batch == 3 and spec.shared_sequences == 6
    assert [spec.at_step(step).microbatches for step in (1, 3, 4)] == [1, 1, 4]
    assert {spec.at_step(step).micro_batch for step in (1, 4)} == {3}
