"""A small model of transformers with a chat template, and chats for it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import peft
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from trl.data_utils import extract_prompt

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "red",
    "green",
    "blue",
    "sun",
    "moon",
    "star",
]


def tokenizer_in(folder: Path, template: str = "qwen2_5_training") -> None:
    """Write a byte-level BPE of some 320 entries with a chat template into a folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "system user assistant You are Qwen"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())


def model_in(folder: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """Write a Qwen2 of 2 layers with random weights in float64 and a tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_in(folder)
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).double()
    model.save_pretrained(folder)
    return model


def chats(number: int, count: int) -> list[dict[str, Any]]:
    """Rows with chats of one to three turns of random words, some with a system message."""
    draw = random.Random(number)

    def said() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 7)))

    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": said()}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 3)):
            messages += [{"role": "user", "content": said()}, {"role": "assistant", "content": said()}]
        rows.append({"messages": messages})
    return rows


def pair_rows(number: int, count: int) -> list[dict[str, Any]]:
    """Rows with chats that end in two answers, whose prompts are in both."""
    draw = random.Random(number)
    rows = []
    for row in [row for row in chats(number, 9 * count) if len(row["messages"]) < 4][:count]:
        *prompt, answer = row["messages"]
        other = answer | {"content": " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 7)))}
        rows.append({"chosen": [*prompt, answer], "rejected": [*prompt, other]})
    return rows


def with_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their prompts apart."""
    return [extract_prompt(row) for row in rows]


def written(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Let transformers and TRL keep float64 where they compute norms, angles and losses in float32."""
    to, plain = torch.Tensor.to, torch.Tensor.float

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lower = torch.float32 in args or kwargs.get("dtype") == torch.float32
        return tensor if lower and tensor.dtype == torch.float64 else to(tensor, *args, **kwargs)

    def kept_float(tensor: torch.Tensor) -> torch.Tensor:
        return plain(tensor) if tensor.dtype == torch.float32 else tensor.double()

    with patch.object(torch.Tensor, "to", kept), patch.object(torch.Tensor, "float", kept_float):
        yield


def opened(folder: Path) -> transformers.PreTrainedModel:
    """The model of a folder in float64, its rotary angles too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rotary = model.model.rotary_emb
    dims, base = 2 * len(rotary.inv_freq), model.config.rope_parameters["rope_theta"]
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    rotary.inv_freq = rotary.original_inv_freq = base**-exponents
    return model


class Loss:
    """The loss of transformers, as TRL's own kernel sums in float32, and its values, which Trainer rounds."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        loss = ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)
        self.found.append(float(loss))
        return loss


def adapter_in(folder: Path, base: Path, **config: Any) -> peft.PeftModel:
    """Write an adapter of PEFT whose B is not zero, in float64, into a folder."""
    torch.manual_seed(1)
    made = peft.get_peft_model(
        opened(base), peft.LoraConfig(**{"r": 3, "lora_alpha": 12, "task_type": "CAUSAL_LM"} | config)
    )
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.double().save_pretrained(folder)
    return made


def trained_by_trl(
    model: Any,
    folder: Path,
    rows: list[dict[str, Any]],
    out: Path,
    samples: int,
    callbacks: Any = (),
    **how: Any,
) -> list[float]:
    """Train a model of a folder by TRL on all samples in each step; returns the losses."""
    arguments = trl.SFTConfig(
        output_dir=str(out), per_device_train_batch_size=1, learning_rate=0.01,
        gradient_accumulation_steps=samples, weight_decay=0.0, lr_scheduler_type="constant", bf16=False,
        max_grad_norm=1.0, adam_beta2=0.95, assistant_only_loss=True, report_to=[], logging_steps=1,
        use_cpu=True, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, **how,
    )  # fmt: skip
    loss = Loss()
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), callbacks=[*callbacks],
        processing_class=transformers.AutoTokenizer.from_pretrained(folder), compute_loss_func=loss,
    )  # fmt: skip
    with float64_throughout():
        trainer.train()
    return [math.fsum(loss.found[first : first + samples]) for first in range(0, len(loss.found), samples)]
