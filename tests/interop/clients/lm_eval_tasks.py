"""Answers to tasks by lm-eval's model of HF folders, as anyone calls it:
`python lm_eval_tasks.py TASKS FOLDER...`.

Prints for each folder a JSON object: its name, the texts of the task `continuations` and the scores of
`capitals`, or the error. The version comes first.
"""

import json
import sys
from importlib.metadata import version


def main() -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=sys.argv[1], include_defaults=False)
    print(json.dumps({"version": version("lm_eval")}), flush=True)
    for folder in sys.argv[2:]:
        try:
            told = lm_eval.simple_evaluate(
                model="hf",
                model_args=f"pretrained={folder}",
                tasks=["continuations", "capitals"],
                task_manager=tasks,
                bootstrap_iters=0,
                device="cpu",  # by default lm-eval takes CUDA, also where there is none
            )
            samples = sorted(told["samples"]["continuations"], key=lambda each: each["doc_id"])
            scores = {
                f"{task} {name.split(',')[0]}": value
                for task, row in told["results"].items()
                for name, value in row.items()
                if task != "continuations" and name.endswith(",none") and "stderr" not in name
            }
            found = {"texts": [each["resps"][0][0] for each in samples], "scores": scores}
        except Exception as error:  # whatever a client says of a folder is its row
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": folder, **found}), flush=True)


if __name__ == "__main__":
    main()
