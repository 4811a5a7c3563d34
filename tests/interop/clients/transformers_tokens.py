"""Greedy continuations by `transformers.pipeline`, as anyone calls it:
`python transformers_tokens.py ASKED.json FOLDER...`.

Prints for each folder a JSON object: its name and the texts, or the error. The version comes first.
"""

import json
import sys
from pathlib import Path


def conversation(generate, questions: list[str], count: int) -> list[str]:
    """Return the answers to one question after the other."""
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages = generate(messages, max_new_tokens=count, do_sample=False)[0]["generated_text"]
    return [message["content"] for message in messages if message["role"] == "assistant"]


def main() -> None:
    import transformers

    asked = json.loads(Path(sys.argv[1]).read_text())
    prompts, count = asked["prompts"], asked["count"]
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for folder in sys.argv[2:]:
        try:
            generate = transformers.pipeline("text-generation", folder)
            rows = [
                generate(prompt, max_new_tokens=count, do_sample=False, return_full_text=False)
                for prompt in prompts
            ]
            found = {"texts": [row[0]["generated_text"] for row in rows]}
            if (Path(folder) / "chat_template.jinja").is_file():
                found["chat"] = conversation(generate, asked["questions"], count)
        except Exception as error:  # whatever a client says of a folder is its row
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": folder, **found}), flush=True)


if __name__ == "__main__":
    main()
