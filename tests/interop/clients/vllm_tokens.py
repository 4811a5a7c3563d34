"""Greedy continuations and likelihoods by vLLM, as anyone calls it:
`python vllm_tokens.py ASKED.json FOLDER...`.

Prints for each folder a JSON object: its name, the texts and bits per byte, or the error. The version is
first.
"""

import json
import math
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


def main() -> None:
    import vllm

    asked = json.loads(Path(sys.argv[1]).read_text())
    prompts, count = asked["prompts"], asked["count"]
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for folder in sys.argv[2:]:
        try:
            model = vllm.LLM(folder)
            sampling = vllm.SamplingParams(temperature=0, max_tokens=count)
            texts = [each.outputs[0].text for each in model.generate(prompts, sampling)]
            scores = {"sentences bits_per_byte": bits_per_byte(model, asked["texts"])}
            found = {"texts": texts, "scores": scores}
            del model
        except Exception as error:  # whatever a client says of a folder is its row
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": folder, **found}), flush=True)


if __name__ == "__main__":
    main()
