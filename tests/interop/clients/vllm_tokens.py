"""Greedy continuations and likelihoods by vLLM, as anyone calls it:
`python vllm_tokens.py ASKED.json FOLDER...`.

Prints for each folder a JSON object: its name, the texts and bits per byte, or the error. The version is
first. Each folder is opened in a process of its own, since vLLM's process groups are global.
"""

import json
import math
import multiprocessing
import sys
from pathlib import Path


def bits_per_byte(model, texts: list[str]) -> float:
    """Return -log2 of the likelihood of texts over their bytes; the token that begins each is not counted."""
    import vllm

    told = model.generate(texts, vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    nats = [
        each[token].logprob
        for answer in told
        for token, each in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
    ]
    return -sum(nats) / math.log(2) / sum(len(text.encode()) for text in texts)


def conversation(model, questions: list[str], sampling) -> list[str]:
    """Return the answers to one question after the other."""
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        told = model.chat(messages, sampling, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": told})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def answer(folder: str, asked: dict) -> None:
    import vllm

    try:
        model = vllm.LLM(folder)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=asked["count"])
        texts = [each.outputs[0].text for each in model.generate(asked["prompts"], sampling)]
        scores = {"sentences bits_per_byte": bits_per_byte(model, asked["texts"])}
        found = {"texts": texts, "scores": scores}
        if (Path(folder) / "chat_template.jinja").is_file():
            found["chat"] = conversation(model, asked["questions"], sampling)
    except Exception as error:  # whatever a client says of a folder is its row
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"folder": folder, **found}), flush=True)


def main() -> None:
    import vllm

    assert vllm.LLM  # is imported once, before the processes begin
    print(json.dumps({"version": vllm.__version__}), flush=True)
    asked = json.loads(Path(sys.argv[1]).read_text())
    for folder in sys.argv[2:]:
        process = multiprocessing.get_context("fork").Process(target=answer, args=(folder, asked))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
