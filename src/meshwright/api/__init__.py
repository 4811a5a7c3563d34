"""The Python interface: the functions that the command line calls.

from meshwright import api
from meshwright.spec import load

result = api.train(load(Path("run.toml")), nproc=2, out=Path("runs/first"))
print(api.generate(Path("runs/first"), "def "))

Training: `runs` starts the ranks of any verb and trains, `islands` trains islands that are worlds of their
own, `initial_weights` says what a run starts from, `folders` names its folder, `chaos_runs` trains under
faults.
Checks: `verify_runs` compares one layout with one device, `sweeps` many.
Trained models: `generation`, `evaluation`, `quantisation`, `distillation` of a teacher's answers,
`weights` for means and merges, and `models` for checkpoints, exports and imports.
Predictions: `planning`.
"""

from __future__ import annotations

from meshwright.api.chaos_runs import chaos as chaos
from meshwright.api.distillation import distil as distil
from meshwright.api.distillation import distil_worker as distil_worker
from meshwright.api.evaluation import Evaluation as Evaluation
from meshwright.api.evaluation import evaluate as evaluate
from meshwright.api.evaluation import evaluate_run as evaluate_run
from meshwright.api.folders import folder_of as folder_of
from meshwright.api.generation import Generation as Generation
from meshwright.api.generation import check_out as check_out
from meshwright.api.generation import generate as generate
from meshwright.api.generation import generate_worker as generate_worker
from meshwright.api.generation import generation_ranks as generation_ranks
from meshwright.api.generation import read_prompts as read_prompts
from meshwright.api.generation import start_generation as start_generation
from meshwright.api.generation import write_rows as write_rows
from meshwright.api.generation import write_text as write_text
from meshwright.api.initial_weights import initial_weights_told as initial_weights_told
from meshwright.api.models import checkpoint_list as checkpoint_list
from meshwright.api.models import checkpoint_verify as checkpoint_verify
from meshwright.api.models import checkpoints_of as checkpoints_of
from meshwright.api.models import data_verify as data_verify
from meshwright.api.models import export as export
from meshwright.api.models import import_hf as import_hf
from meshwright.api.models import load_hf as load_hf
from meshwright.api.models import load_run as load_run
from meshwright.api.models import tokenize as tokenize
from meshwright.api.planning import dryrun as dryrun
from meshwright.api.planning import explain as explain
from meshwright.api.planning import goodput as goodput
from meshwright.api.planning import plan as plan
from meshwright.api.planning import profile as profile
from meshwright.api.planning import profile_worker as profile_worker
from meshwright.api.planning import simulate as simulate
from meshwright.api.planning import validate as validate
from meshwright.api.quantisation import compare_quantisation as compare_quantisation
from meshwright.api.quantisation import quantise as quantise
from meshwright.api.runs import check_start as check_start
from meshwright.api.runs import train as train
from meshwright.api.runs import train_worker as train_worker
from meshwright.api.sweeps import sweep as sweep
from meshwright.api.sweeps import sweep_worker as sweep_worker
from meshwright.api.verify_runs import verify as verify
from meshwright.api.verify_runs import verify_worker as verify_worker
from meshwright.api.weights import average as average
from meshwright.api.weights import merge as merge
from meshwright.planner.plan import Plan as Plan
from meshwright.planner.plan import Plans as Plans
from meshwright.planner.plan import estimate as estimate
from meshwright.spec.quantisation import RECIPES as RECIPES
