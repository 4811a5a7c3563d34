"""GRPO (Shao et al. 2024, DeepSeekMath, section 4.1) on an engine: a reward by a rule, samples in process.

A tiny model, drawn at random, learns to count: after a prompt of three numbers in a row, the reward of a
completion is the share of its tokens that go on counting. Prints the first rank's mean reward by iteration.

    python examples/grpo.py --seed 0
    torchrun --nproc-per-node 2 examples/grpo.py --layout.dp 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright import Engine
from meshwright.infer.generate import generate
from meshwright.infer.sampling import Sampling
from meshwright.spec import load

NUMBERS, NEW, CLIP, UPDATES = 16, 8, 0.2, 2
MODEL = {
    "model.vocab_size": NUMBERS, "model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.ffn": 128,
    "train.lr": 3e-3, "train.schedule": "constant", "train.warmup_steps": 0, "train.weight_decay": 0,
    "data.seq_len": 16, "train.batch_tokens": 16 * 512,
}  # fmt: skip


def reward(tokens: Tensor) -> Tensor:
    """The share (n,) of new tokens in (n, 3 + NEW) that follow the token before them."""
    follows = tokens[:, 1:] == (tokens[:, :-1] + 1) % NUMBERS
    return follows[:, -NEW:].float().mean(1)


def samples(engine: Engine, prompts: int, group: int, seed: int) -> tuple[dict[str, Tensor], float]:
    """Draw a group of completions of each of this rank's prompts; return the batch and the mean reward."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(0, NUMBERS, (prompts, 1), generator=draw).repeat_interleave(group, 0)
    prompt = (first + torch.arange(3)) % NUMBERS
    new = generate(engine.decoder(), prompt, NEW, Sampling(temperature=1.0, seed=seed))
    tokens = torch.cat([prompt, new], 1)
    rewards = reward(tokens).view(prompts, group)
    spread = rewards.std(1, keepdim=True)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1)
    labels = tokens.clone()
    labels[:, : prompt.shape[1]] = -100
    batch = {"input_ids": tokens, "labels": labels, "advantages": advantages}
    return batch | {"old": engine.log_probs(batch)}, float(rewards.mean())


def grpo_loss(log_probs: Tensor, rows: dict[str, Tensor]) -> Tensor:
    """The sum over samples of the mean over tokens of the clipped objective (equation 3, without KL)."""
    ratio, advantages = (log_probs - rows["old"]).exp(), rows["advantages"].unsqueeze(1)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    trained = rows["labels"] != -100
    return -((gain * trained).sum(1) / trained.sum(1)).sum()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GRPO on a tiny model that learns to count")
    for name, default in (("seed", 0), ("iterations", 60), ("prompts", 16), ("group", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given, flags = parser.parse_known_args(arguments)
    keys = MODEL | {"train.seed": given.seed}
    keys |= {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    with Engine(load(None, [(name, str(value)) for name, value in keys.items()])) as engine:
        for iteration in range(given.iterations):
            seed = (given.seed * given.iterations + iteration) * engine.data_ranks + engine.data_rank
            batch, mean = samples(engine, given.prompts, given.group, seed)
            for _ in range(UPDATES):
                engine.forward_backward(batch, grpo_loss, count=len(batch["input_ids"]))
                engine.step()
            if engine.mesh.rank == 0:
                print(f"iteration {iteration + 1}: mean reward {mean:.3f}", flush=True)


if __name__ == "__main__":
    main()
