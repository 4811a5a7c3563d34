"""transformers' Llama under transformers 5.23.0's Trainer.

    python hf_trainer.py JOB.json

Its defaults but for the optimiser's numbers, a constant learning rate and a loss that is logged at every
step, from which the steps' seconds are taken: a step ends when its loss is logged. bf16 is its mixed
precision (autocast, fp32 weights). Nothing is replaced; the sampler takes the sequences in order.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from peer import BETAS, CLIP, LR, WEIGHT_DECAY, Job, held, job, run, settings, world
from transformers_loop import llama


class Sequences(Dataset[dict[str, Tensor]]):
    """The job's sequences, one an item, with their next tokens."""

    def __init__(self, given: Job) -> None:
        self.tokens = torch.from_numpy(numpy.load(given.tokens)).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        inputs, targets = self.tokens[place, :-1], self.tokens[place, 1:]
        return {"input_ids": inputs, "labels": inputs, "shift_labels": targets}


def trainer_of(given: Job) -> Any:
    """A Trainer whose rank 0 writes a row when a step's loss is logged."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    data = Sequences(given)

    class Rows(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            logs = rest["logs"]
            if "loss" not in logs:
                return
            now = time.perf_counter()
            if state.is_world_process_zero:
                print(json.dumps({"seconds": now - self.start, "loss": logs["loss"]}), flush=True)
            self.start = now

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(data)

    arguments = TrainingArguments(
        output_dir="trainer", use_cpu=True, bf16=given.precision == "bf16", max_steps=given.steps,
        per_device_train_batch_size=len(data) // given.steps // world()[1], lr_scheduler_type="constant",
        learning_rate=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = InOrder(model=llama(given), args=arguments, train_dataset=data, callbacks=[Rows()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def main() -> None:
    given = job()
    settings(given)
    trainer = trainer_of(given)
    trainer.train()

    def nothing(tokens: Tensor) -> float:
        raise AssertionError("the Trainer has trained all steps")

    done = dataclasses.replace(given, steps=0)
    run(done, nothing, lambda: held(trainer.model, trainer.optimizer))


if __name__ == "__main__":
    main()
