"""Tasks of lm-eval (Gao et al. 2024, the Language Model Evaluation Harness) on a decoder of any layout.

Every rank runs lm-eval on the same requests and computes its part of the answers; the first gets the results.
This module imports lm_eval, which is not always installed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import lm_eval
import lm_eval.utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from meshwright.data.tokenizer import Tokenizer
from meshwright.infer.batching import Request
from meshwright.infer.generate import check_request, continue_requests
from meshwright.infer.sampling import Sampling
from meshwright.infer.scores import ScoredText, scores
from meshwright.infer.sharded import ShardedDecoder
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean

LOCAL = ("json", "csv", "parquet", "arrow", "text", "pandas", "xml")
"""Readers of `datasets` for local files: values of a task's `dataset_path`."""
STOP_TOKENS = 8
"""Tokens in which a stop sequence is looked for, besides one for each of its bytes."""


class DecoderLM(TemplateLM):
    """A decoder on a layout as lm-eval's model.

    Texts have around them what the tokenizer puts there, unless they spell their first token themselves, as
    in lm-eval's own model. Contexts are cut at their beginning to fit the model's `max_seq_len`. At most
    `batch` texts are continued at a time on a data rank.
    """

    def __init__(self, model: ShardedDecoder, tokenizer: Tokenizer, batch: int = 16) -> None:
        super().__init__()
        self._model, self._text, self._most_rows = model, tokenizer, batch
        self.max_length = model.spec.model.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._text.end_id

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without a context is predicted from."""
        first, end = self._text.tokens.named
        return end if first is None else first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: Any) -> list[int]:
        """Return the tokens of a text, with what is put around a text unless that is refused.

        Raises `UserError` for a token without a row in the model's embedding.
        """
        ids = self._text.encode(string)
        if ids and max(ids) >= (rows := self._model.spec.model.vocab_size):
            raise UserError(
                f"--tasks: {string[:40]!r} has the token {max(ids)}, which is outside of the model's "
                f"vocabulary of {rows}; change the task"
            )
        begun = self._text.reads_special and string.startswith(self._text.decode([self.prefix_token_id]))
        bare = begun if add_special_tokens is None else not add_special_tokens
        return ids if bare else self._text.around(ids)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood in nats of each continuation, and whether it is the greedy one."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_options: Any
    ) -> list[tuple[float, bool]]:
        for (_, text), _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"--tasks: the continuation {text[:40]!r} has {len(continuation)} tokens, and the model "
                    f"predicts 1 to {self.max_length}; change the task"
                )
        rows = [
            ScoredText([*context, *continuation][-(self.max_length + 1) :], len(continuation))
            for _, context, continuation in requests
        ]
        self._agree([list(row) for row in rows])
        return [(score.nats, bool(score.greedy)) for score in scores(self._model, rows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood in nats of whole texts, in windows that do not overlap."""
        windows = [
            [
                lm_eval.utils.make_disjoint_window(window)
                for window in lm_eval.utils.get_rolling_token_windows(
                    token_list=self._text.encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        rows = [ScoredText([*context, *new], len(new)) for each in windows for context, new in each]
        self._agree([list(row) for row in rows])
        found = iter(scores(self._model, rows))
        return [sum(next(found).nats for _ in each) for each in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the continuation of each context up to the first of its stop sequences."""
        given = [(request.args[0], json.dumps(request.args[1], sort_keys=True)) for request in requests]
        self._agree(given)
        texts: dict[int, str] = {}
        for settings in dict.fromkeys(settings for _, settings in given):
            numbers = [number for number, (_, other) in enumerate(given) if other == settings]
            texts |= self._continued({number: given[number][0] for number in numbers}, json.loads(settings))
        return [texts[number] for number in range(len(requests))]

    def _continued(self, contexts: Mapping[int, str], settings: dict[str, Any]) -> dict[int, str]:
        """Return the continuations of contexts that share the settings of a generation, by number."""
        how: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        until = [stop for stop in handle_stop_sequences(how["until"], eos=None) if stop]
        most, model, mesh = how["max_gen_toks"], self._model, self._model.mesh
        if most >= self.max_length:
            raise UserError(
                f"--tasks: max_gen_toks {most} leaves no token for the context, of the model's "
                f"{self.max_length}; lower it in the task's generation_kwargs"
            )
        sampling = Sampling()
        if how["do_sample"]:
            sampling = Sampling(float(how.get("temperature", 1.0)), how.get("top_k"), how.get("top_p"))
        every = []
        for number, text in contexts.items():
            prompt = self.tok_encode(text)[-(self.max_length - most) :] or [self.eot_token_id]
            every.append(Request(number, prompt, most, self._text.tokens.stop_ids))
            check_request(model.spec.model, every[-1], "a context of --tasks")
        own = every[mesh.data_rank :: model.spec.layout.data_ranks]
        tail = max((len(stop.encode()) for stop in until), default=0) + STOP_TOKENS

        def end(request: Request) -> None:
            text = self._text.decode(request.text[-tail:])
            if any(stop in text for stop in until):
                request.most = len(request.new)

        continue_requests(
            model.decoder, own, sampling, self._text.vocab_size, self._most_rows, show=end, part=model.part
        )
        first = mesh.tensor.rank == mesh.pipeline.rank == 0
        parts = mesh.control.gather([(request.number, request.text) for request in own] if first else [])
        new = dict(mesh.control.broadcast([pair for part in parts for pair in part]))
        return {
            number: postprocess_generated_text(self._text.decode(ids), until, None)
            for number, ids in new.items()
        }

    def _agree(self, requests: Sequence[Any]) -> None:
        """Raise `UserError` where ranks have other requests: another task, or other data."""
        digest = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
        self._model.mesh.control.agree(
            {"the digest of the requests of --tasks": digest}, "give all hosts the same tasks and data"
        )


class Tasks:
    """Tasks of lm-eval from local files: of the folder or the file `path`, by default all that it has.

    Raises `UserError` for a damaged file, an unknown name, data that is missing or damaged, and a task whose
    data are on a hub.
    """

    def __init__(self, path: Path, names: Sequence[str] = ()) -> None:
        if not path.exists():
            raise UserError(f"--tasks: there is no file or folder {path}; give a task of lm-eval (YAML)")
        self.path = path
        files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
        configs = {name: config for file in files for name, config in _tasks_of(file, path.is_dir())}
        if not configs:
            raise UserError(f"--tasks: {path} holds no task; give YAML files with a key 'task'")
        for name in names:
            if name not in configs:
                raise UserError(
                    f"--tasks: {path} has no task '{name}'{did_you_mean(name, list(configs))}; it has "
                    f"{', '.join(configs)}"
                )
        self.names = list(names) or list(configs)
        for name in self.names:
            _check_local(name, configs[name])
        with _offline():
            folder = path if path.is_dir() else path.parent
            self._manager = TaskManager(include_path=str(folder), include_defaults=False)
            # Another file of the folder may have a task of the same name.
            self._asked = self.names if path.is_dir() else [str(path)]
            for name, asked in zip(self.names, self._asked, strict=True):
                try:
                    self._manager.load([asked])
                except Exception as error:  # of lm-eval, datasets, pyarrow, or a function of the task
                    raise UserError(f"--tasks: '{name}' cannot be opened ({_reason(error)})") from error

    def run(self, model: DecoderLM, limit: int | None = None) -> dict[str, dict[str, Any]]:
        """Return the metrics of each task on the first rank, and nothing on the others.

        All ranks call this. `limit` is the number of examples of each task, by default all.
        """
        with _offline():
            loaded = self._manager.load(list(self._asked))
            for task in loaded["tasks"].values():  # as lm_eval.simple_evaluate does
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            found = lm_eval.evaluate(model, loaded, limit=limit, log_samples=False)
        if found is None or model._model.mesh.rank:
            return {}
        counts = found.get("n-samples", {})
        return {
            task: {
                **({"examples": counts[task]["effective"]} if task in counts else {}),
                **dict(_metrics(row)),
            }
            for task, row in found["results"].items()
        }


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a row of lm-eval's results, whose keys are "metric,filter"."""
    for key, value in row.items():
        metric, comma, filtered = key.partition(",")
        if comma and isinstance(value, int | float):
            yield metric if filtered == "none" else f"{metric} ({filtered})", value


def _tasks_of(file: Path, listed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the task or group of a YAML file; one of a folder may be a part that others include."""
    try:
        config = load_yaml(file, resolve_func=False, recursive=True)
    except Exception as error:  # of yaml, of a missing include, or of the text
        raise UserError(f"--tasks: {file} cannot be read as a task ({_reason(error)})") from error
    name = config.get("task", config.get("group")) if isinstance(config, dict) else None
    name = config["group"] if isinstance(config, dict) and "group" in config else name
    if isinstance(name, str):
        yield name, config
    elif not listed:
        raise UserError(f"--tasks: {file} has no key 'task' with a name; give a task of lm-eval")


def _check_local(name: str, config: Mapping[str, Any]) -> None:
    path = config.get("dataset_path")
    own = "custom_dataset" in config or "class" in config or "group" in config
    if own or (isinstance(path, str) and (path in LOCAL or Path(path).exists())):
        return
    raise UserError(
        f"--tasks: '{name}' has the dataset_path {path!r}, and tasks read local files only; give "
        "dataset_path: json with dataset_kwargs: data_files, or a folder"
    )


def _reason(error: BaseException) -> str:
    """Return what began an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines) or type(error).__name__


@contextmanager
def _offline() -> Iterator[None]:
    """Context in which nothing is fetched, and the libraries tell errors only."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    before = os.environ.get("HF_HUB_OFFLINE"), datasets.config.HF_HUB_OFFLINE
    constant, shown = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.is_progress_bar_enabled()
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop("HF_HUB_OFFLINE") if before[0] is None else os.environ.update(HF_HUB_OFFLINE=before[0])
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before[1], constant
        if shown:
            datasets.enable_progress_bars()
