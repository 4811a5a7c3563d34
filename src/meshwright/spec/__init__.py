"""The one immutable spec of a run. It imports neither torch nor torch.distributed.

The spec: `run` is the whole, of the `sections`: `model`, whose fields are in `architecture` and
`moe_mla`, `layout`, `train`, `precision`, `outer`, `distil`, `lora` and `preference`, all made of `base`.
`presets` are named models, `model_names` the names that people know them by, and `near_names` those that are
nearly one; `model_argument` is what may stand for a model on a command line.
Tables: `optimisers`, kinds of `layers`, `pipeline_schedules`.
Reading: `load` takes TOML and flags, with the sentences of `load_errors`, `toml` writes it, `schema` lists
the keys, `files` reads what users name, `foreign_run_files` recognises those of other trainers, two of which
are read by `axolotl_keys` and `llama_factory_keys`, made of `foreign_keys`; `compiled` says whose blocks are
compiled where that is left open; `records` are checked dataclasses, `differences` compares two specs, and
`errors` are mistakes in one sentence.
Rules: `rules` across sections, `model_rules`, `low_precision_rules`, `outer_rules`, `distil_rules`,
`lora_rules`, `preference_rules`, `checkpoint_rules` and `cuda_graph_rules`, with their `arithmetic`;
`verification` is what a comparison is asked for.
What follows from a spec: `parameters` by name with `parameter_groups` and `mup`, each a `sharded_tensor`;
`stages` of a pipeline; `batch_warmup`; `tiling` of large results; blocks of `eight_bit` numbers;
`quantisation` formats; sizes of `serving`; the `weights` that a run starts from, and adapters of a
`lora_source`, whose targets may have the names of transformers (`lora_targets`); its `other_models`, and the
`training_flops` of a token. The folder `hf` reads Hugging Face's files.
"""

from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.load import load
from meshwright.spec.model import ModelSpec
from meshwright.spec.moe_mla import MlaSpec, MoeSpec
from meshwright.spec.run import RunSpec

__all__ = ["Layout", "MlaSpec", "ModelSpec", "MoeSpec", "RunSpec", "UserError", "load"]
