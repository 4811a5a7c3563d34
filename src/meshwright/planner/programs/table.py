"""Which layouts each program of `--stack` runs: its schedules, its rules, and where they are known from.

A layout that these refuse stops the program with an error, or has no name in it. Not listed is what all
programs and this one have in common (`spec/rules.py`), such as heads that tensor ranks divide, experts that
expert ranks divide, and two pieces of a sequence for each context rank. Published runs ran, so that no row
of the tables may break a rule (`tests/planner/test_program_rules.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from meshwright.hardware.cluster import Device, DeviceKind
from meshwright.planner.programs.kinds import (
    context_modes,
    enough_microbatches,
    listed,
    no_axis,
    no_experts,
    no_sharded_tokens,
    one_copy,
    orders,
    rounds_of_microbatches,
    schedules,
    sharded_tokens_with_experts,
    slices_of_experts,
    stages_as_cut,
    tokens_in_parts,
    whole_kv_heads,
    zero_stages,
)
from meshwright.planner.programs.rules import LayoutChoice, ProgramLayouts, Rule
from meshwright.planner.programs.stage_cuts import as_even_as_can_be, by_threshold, equal, lighter_ends
from meshwright.spec import RunSpec, UserError

_OUTER_PIPELINE = orders(["pp-replicate-dp-tp"], "the stages of a pipeline outermost")
_NO_PIPELINE, _NO_TENSOR = no_axis("pp", "pipelines"), no_axis("tp", "tensor parallelism")
_NO_CONTEXT = no_axis("cp", "context parallelism")
_STAGES_OF_DEEPSPEED = {stage: f"zero_optimization.stage = {stage}" for stage in range(4)}


def _megatron(names: tuple[str, ...], *rules: Rule, instead: str = "") -> tuple[Rule, ...]:
    """Rules of every release of Megatron, with its schedules, and those of one release."""
    optimiser = zero_stages(
        lambda at: (0, 1), "which shards the optimiser's states alone (--use-distributed-optimizer)", instead
    )
    return (schedules(names), whole_kv_heads(), optimiser, rounds_of_microbatches(["interleaved"]), *rules)


_THREE_RANKS = Rule(
    "schedule",
    "pp",
    lambda at: at.pp == 2 and at.schedule == "interleaved",
    "which interleaves stages on more than two pipeline ranks",
    "give layout.pp = 4, or layout.schedule = 1f1b",
)
_DISTRIBUTED = {0: "plain DDP, without --use-distributed-optimizer", 1: "--use-distributed-optimizer"}
_INSTANCES = {1: "--use-distributed-optimizer --num-distributed-optimizer-instances {replicate}"}
_OLD_SCHEDULES = ("1f1b", "interleaved")

_MEGATRON_2021 = ProgramLayouts(
    source="""Megatron-LM of 2021 and 2022: megatron/arguments.py (layers divide by pipeline
ranks and by layers of a virtual stage; the distributed optimiser of August 2022) and
megatron/mpu/initialize.py ('pipeline-model-parallel size should be greater than 2 with interleaved
schedule'); megatron/schedules.py (microbatches in multiples)""",
    schedules=_OLD_SCHEDULES,
    cut=equal,
    rules=_megatron(
        _OLD_SCHEDULES,
        *stages_as_cut(equal, "have equal numbers of layers"),
        *(_NO_CONTEXT, no_experts(), _THREE_RANKS, one_copy(), _OUTER_PIPELINE),
    ),
    sharding=_DISTRIBUTED,
)

_ZB_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
_ZERO_BUBBLE = replace(
    _MEGATRON_2021,
    source="""Zero Bubble's fork of Megatron-LM (sail-sg/zero-bubble-pipeline-parallelism), by
Qi et al. 2023 (arXiv 2401.10241: a layer less at both ends) and Qi et al. 2024 (arXiv 2405.15362:
V-Half, V-Min)""",
    release="2023 and 2024",
    schedules=_ZB_SCHEDULES,
    cut=lighter_ends,
    rules=_megatron(
        _ZB_SCHEDULES,
        *stages_as_cut(lighter_ends, "have equal numbers of layers, or one less at both ends"),
        *(_NO_CONTEXT, no_experts(), one_copy(), _OUTER_PIPELINE),
    ),
)

_MEGATRON_2023 = replace(
    _MEGATRON_2021,
    source="""Megatron-LM of 2023: megatron/arguments.py and megatron/core/parallel_state.py
('pipeline-model-parallel size should be greater than 2 with interleaved schedule'),
transformer_config.py (query groups are a multiple of tensor ranks); without context ranks and with no
ranks for experts""",
    release="2023",
)

_CORE_RULES = (
    sharded_tokens_with_experts(),
    Rule(
        "mesh",
        "order",
        lambda at: at.pp > 1 and at.order == "replicate-dp-pp-tp" and at.cp > 1,
        "which numbers stages inside of data ranks (--use-tp-pp-dp-mapping) but outside of context ranks",
        "give layout.order = pp-replicate-dp-tp",
    ),
    orders(
        ["pp-replicate-dp-tp", "replicate-dp-pp-tp"],
        "stages outermost, or inside of data ranks with --use-tp-pp-dp-mapping",
    ),
)
_CORE_SOURCE = """Megatron-Core of 2025: transformer_config.py (num_query_groups is a multiple of
tensor ranks; pipeline_model_parallel_layout deals layers in any way), pipeline_parallel/schedules.py
(groups of microbatches are of pipeline ranks by default), training/arguments.py (sequence parallelism
with experts and tensor ranks; interleaving on two ranks with overlapped messages;
num_distributed_optimizer_instances), enums.py (Fp8Recipe, Fp4Recipe), cp_comm_type of p2p, all_gather,
a2a and a2a+p2p"""
_CORE = ProgramLayouts(
    source=_CORE_SOURCE,
    release="2025",
    schedules=_OLD_SCHEDULES,
    block_formats=("nvfp4", "mxfp8"),
    rules=_megatron(_OLD_SCHEDULES, *_CORE_RULES, instead=", or --stack megatron-fsdp"),
    sharding=_DISTRIBUTED,
    hybrid=_INSTANCES,
)
_FSDP_STRATEGIES = dict(enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params")))
_CORE_FSDP = ProgramLayouts(
    source=f"""{_CORE_SOURCE}; distributed/fsdp/src/megatron_fsdp/fully_shard.py
(ShardingStrategy), and Megatron-Bridge's config validation ('use_tp_pp_dp_mapping is not supported with
Megatron FSDP')""",
    release="2025",
    schedules=_OLD_SCHEDULES,
    block_formats=("nvfp4", "mxfp8"),
    rules=(
        schedules(_OLD_SCHEDULES),
        whole_kv_heads(),
        rounds_of_microbatches(["interleaved"]),
        sharded_tokens_with_experts(),
        _OUTER_PIPELINE,
    ),
    sharding={stage: f"--data-parallel-sharding-strategy {name}" for stage, name in _FSDP_STRATEGIES.items()},
    hybrid={
        stage: f"--data-parallel-sharding-strategy {name} --num-distributed-optimizer-instances {{replicate}}"
        for stage, name in _FSDP_STRATEGIES.items()
    },
    labels=_FSDP_STRATEGIES,
)

_DEEPSPEED_PIPELINE = ProgramLayouts(
    source="""Megatron-DeepSpeed and DeepSpeed of 2021 and 2022: runtime/pipe/engine.py
('ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism'), pipe/module.py (stages partitioned by
type or uniformly), pipe/topology.py (pipe outermost), pipe/schedule.py (TrainSchedule is 1F1B); the
fork has no sequence parallelism""",
    release="2021 and 2022",
    schedules=("1f1b",),
    cut=as_even_as_can_be,
    rules=(
        schedules(("1f1b",)),
        *stages_as_cut(as_even_as_can_be, "differ by a layer at most"),
        *(_NO_CONTEXT, no_experts(), no_sharded_tokens("it came with Megatron-LM 3.0"), _OUTER_PIPELINE),
        zero_stages(
            lambda at: (0, 1) if at.pp > 1 else range(4),
            "whose pipelines take ZeRO-1 alone (DeepSpeed refuses ZeRO-2 and 3 with them)",
            ", or layout.pp = 1",
        ),
        one_copy(),
    ),
    sharding=_STAGES_OF_DEEPSPEED,
)
_DEEPSPEED_ZERO3 = ProgramLayouts(
    source="""DeepSpeed of 2021: runtime/zero/stage3.py, with Megatron's tensor ranks
(Rajbhandari et al. 2021, ZeRO-Infinity); runtime/pipe/engine.py refuses it with a pipeline""",
    release="2021",
    schedules=(),
    rules=(
        *(_NO_PIPELINE, _NO_CONTEXT, no_experts(), no_sharded_tokens("it came with Megatron-LM 3.0")),
        zero_stages(lambda at: (3,), "which is DeepSpeed's ZeRO-3", ", or --stack megatron-deepspeed"),
        one_copy(),
    ),
    sharding={3: _STAGES_OF_DEEPSPEED[3]},
)

_TORCH_SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs")
_SPLIT = ("zb-v", "dualpipe-v")


def _torchtitan_zero(at: LayoutChoice) -> tuple[int, ...]:
    """Stages of ZeRO that FSDP2 has, and DDP where there is no other axis."""
    return (0, 2, 3) if at.tp * at.cp * at.pp * at.ep == 1 else (2, 3)


_INTERLEAVED_ROUNDS = Rule(
    "microbatches",
    "schedule",
    lambda at: (
        at.pp > 1 and at.schedule == "interleaved" and at.microbatches % max(1, at.microbatches // at.pp) > 0
    ),
    "which takes its microbatches in rounds of one number, and a rank has {microbatches} for {pp} stages",
    "give a layout.micro_batch by which they are a multiple of layout.pp = {pp}",
)
_NO_EMPTY_STAGE = Rule(
    "stages",
    "stages",
    lambda at: 0 in at.stages[1:-1],
    "whose stages hold a block, the embedding or the head",
    "give layout.virtual or layout.pp fewer",
)


def _torchtitan(names: tuple[str, ...]) -> ProgramLayouts:
    """torchtitan with some of the schedules of torch."""
    return ProgramLayouts(
        source="""torchtitan of 2025: distributed/pipeline_parallel.py (module_fqns_per_model_part
deals layers in any way), distributed/parallel_dims.py (seq_len_divisor; 'Currently we only support
ETP=TP or ETP=1'; meshes pp, dp_replicate, dp_shard, cp, tp), config (fsdp_reshard_after_forward,
context_parallel_rotate_method allgather or alltoall), models/llama3/infra/parallelize.py ('DDP has not
supported > 1D parallelism'); torch 2.9, distributed/pipelining/schedules.py (microbatches of each
schedule; zero bubble refuses compiled blocks: pull requests 143599 and 162511); components/quantization
(mxfp8)""",
        release="2025",
        schedules=names,
        block_formats=("mxfp8",),
        rules=(
            schedules(names),
            *(whole_kv_heads(), tokens_in_parts(), _NO_EMPTY_STAGE, _OUTER_PIPELINE),
            context_modes(("ring", "gather"), "ring attention by alltoall or allgather"),
            slices_of_experts(
                lambda at: (at.tp,) if at.ep == 1 else (1, at.tp),
                "for all tensor ranks, or with ep > 1 for one",
            ),
            zero_stages(
                _torchtitan_zero,
                "whose FSDP shards gradients and states (stage 2), or also parameters (3), by "
                "reshard_after_forward, and whose DDP (0) goes with no other axis",
            ),
            enough_microbatches(("1f1b", "gpipe"), lambda at: at.pp, "as many microbatches as stages"),
            enough_microbatches(("dualpipe-v",), lambda at: 2 * at.pp, "as many microbatches as stages"),
            _INTERLEAVED_ROUNDS,
        ),
        sharding={
            0: "DDP: data_parallel_replicate_degree = {dp}, data_parallel_shard_degree = 1",
            2: "fsdp_reshard_after_forward = never (ZeRO-2)",
            3: "fsdp_reshard_after_forward = always (ZeRO-3)",
        },
        hybrid={
            2: "data_parallel_replicate_degree = {replicate}, fsdp_reshard_after_forward = never (ZeRO-2)",
            3: "data_parallel_replicate_degree = {replicate}, fsdp_reshard_after_forward = always (ZeRO-3)",
        },
        labels={0: "ddp", 2: "reshard=never", 3: "reshard=always"},
    )


_COMPOSER = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_LLM_FOUNDRY = ProgramLayouts(
    source="""llm-foundry and Composer of 2023: trainer/mosaic_fsdp_utils.py
(sharding_strategy of NO_SHARD, SHARD_GRAD_OP, FULL_SHARD and their hybrids); there is no other axis""",
    release="2023",
    schedules=(),
    rules=(
        *(_NO_PIPELINE, _NO_TENSOR, _NO_CONTEXT, no_experts()),
        zero_stages(lambda at: (0, 2, 3), "whose sharding_strategy is NO_SHARD, SHARD_GRAD_OP or FULL_SHARD"),
    ),
    sharding={stage: f"fsdp_config.sharding_strategy = {name}" for stage, name in _COMPOSER.items()},
    hybrid={
        2: "fsdp_config.sharding_strategy = _HYBRID_SHARD_ZERO2",
        3: "fsdp_config.sharding_strategy = HYBRID_SHARD",
    },
    labels=_COMPOSER,
)
_NANOTRON = ProgramLayouts(
    source="""nanotron of 2024: parallel/pipeline_parallel/engine.py (1f1b takes pp - 1
microbatches at least; afab), models/base.py (build_model deals blocks by their share), models/llama.py
(key-value heads divide by tensor ranks, no experts), helpers.py (any zero_stage above 0 is
ZeroDistributedOptimizer: ZeRO-1), parallel/context.py (ranks are pp, dp, tp)""",
    release="2024",
    schedules=("gpipe", "1f1b"),
    cut=by_threshold,
    rules=(
        schedules(("gpipe", "1f1b")),
        *stages_as_cut(
            by_threshold,
            "end with the module that exceeds their share",
            "the last of {pp} has none then, as {model.layers} blocks, norm, head, cast and loss are too few",
        ),
        *(whole_kv_heads(), _NO_CONTEXT, no_experts(), one_copy(), _OUTER_PIPELINE),
        zero_stages(lambda at: (0, 1), "whose optimizer.zero_stage above 0 is ZeRO-1"),
        enough_microbatches(("1f1b",), lambda at: at.pp - 1, "one microbatch less than pipeline ranks"),
    ),
    sharding={0: "optimizer.zero_stage = 0", 1: "optimizer.zero_stage = 1"},
)


def _maxtext_zero(at: LayoutChoice) -> tuple[int, ...]:
    """Data ranks, ZeRO-1 over them, FSDP, and FSDP that gathers once before a pipeline's loop."""
    return (0, 1, 2, 3) if at.pp > 1 else (0, 1, 3)


_EXPERTS_OF_DATA = Rule(
    "sharding",
    "ep",
    lambda at: at.ep > 1 and at.dp % at.ep > 0,
    "whose expert axis shares out the batch, and layout.dp is {dp}",
    "give a layout.ep that divides layout.dp",
)
_MAXTEXT = ProgramLayouts(
    source="""MaxText of 2025: layers/pipeline.py (a loop over microbatches that is
differentiated as a whole, circular with num_pipeline_repeats: GPipe and looped breadth-first),
configs/types.py (stages x repeats x layers of a stage are the layers; microbatches divide by stages;
context_parallel_strategy all_gather or ring; shard_optimizer_over_data; pipeline_fsdp_ag_once),
configs/base.yml (the batch is sharded over data, fsdp and expert, channels of experts over tensor)""",
    release="2025",
    devices=("tpu", "cuda", "rocm"),
    schedules=("gpipe", "bfs"),
    cut=equal,
    rules=(
        schedules(("gpipe", "bfs")),
        *stages_as_cut(equal, "have equal numbers of layers"),
        whole_kv_heads(),
        context_modes(("ring", "gather"), "all_gather or ring"),
        slices_of_experts(lambda at: (at.tp,), "for all tensor ranks"),
        _EXPERTS_OF_DATA,
        orders(
            ["pp-replicate-dp-tp", "replicate-pp-dp-tp"],
            "stages beside the data axis, outside of fsdp",
        ),
        zero_stages(_maxtext_zero, "which shards gradients beside whole parameters in pipelines alone"),
        rounds_of_microbatches(("gpipe", "bfs")),
    ),
    sharding={
        0: "ici_data_parallelism = {dp}",
        1: "ici_data_parallelism = {dp}, shard_optimizer_over_data = true (ZeRO-1)",
        2: "ici_fsdp_parallelism = {dp}, pipeline_fsdp_ag_once = true (ZeRO-2)",
        3: "ici_fsdp_parallelism = {dp} (ZeRO-3)",
    },
    labels={0: "data", 2: "fsdp-ag-once", 3: "fsdp"},
)

_HAI_SCHEDULES = ("1f1b", "zb-h1", "dualpipe-v")
_HAI_LLM = ProgramLayouts(
    source="""DeepSeek-AI 2024: DeepSeek LLM (1F1B, ZeRO-1, tensor and sequence parallelism),
DeepSeek-V2, 3.1.3 (zero bubble, expert parallelism, ZeRO-1) and DeepSeek-V3, 3.2 (DualPipe);
deepseek-ai/DualPipe, dualpipev.py (num_chunks >= num_ranks * 2); the program itself is not public""",
    release="2024",
    schedules=_HAI_SCHEDULES,
    rules=(
        schedules(_HAI_SCHEDULES),
        *(_NO_CONTEXT, one_copy()),
        slices_of_experts(lambda at: (1,), "for one rank"),
        zero_stages(lambda at: (0, 1), "which shards the optimiser's states alone (ZeRO-1)"),
        enough_microbatches(("dualpipe-v",), lambda at: 2 * at.pp, "two microbatches a pipeline rank"),
    ),
)

OWN = ProgramLayouts(
    source="this program: its rules are spec/rules.py",
    devices=get_args(DeviceKind),  # planned for TPUs and Trainium, too, which the first line says
    block_formats=("nvfp4", "mxfp8"),
)
PROGRAMS: Mapping[str, ProgramLayouts] = {
    "meshwright": OWN,
    "meshwright-cpu": OWN,
    "megatron-2021": _MEGATRON_2021,
    "megatron-zero-bubble": _ZERO_BUBBLE,
    "megatron-deepspeed": _DEEPSPEED_PIPELINE,
    "deepspeed-zero3": _DEEPSPEED_ZERO3,
    "megatron-lm": _MEGATRON_2023,
    "megatron-core": _CORE,
    "nemo": _CORE,
    "nemo-graphs": _CORE,
    "megatron-fsdp": _CORE_FSDP,
    "hai-llm": _HAI_LLM,
    "fsdp": _torchtitan((*_TORCH_SCHEDULES, *_SPLIT)),
    "fsdp-compiled": _torchtitan(_TORCH_SCHEDULES),
    "fsdp-compiled-loss": _torchtitan(_TORCH_SCHEDULES),
    "llm-foundry": _LLM_FOUNDRY,
    "nanotron": _NANOTRON,
    "maxtext": _MAXTEXT,
}
"""Names of `--stack` -> the layouts that each runs."""


_KINDS = {"cuda": "CUDA", "rocm": "ROCm", "tpu": "TPUs", "neuron": "Trainium", "cpu": "CPUs"}
"""Kinds of devices in words."""


def refuse_mxfp4(name: str) -> None:
    """Raise `UserError` for a plan of a program in mxfp4."""
    formats = PROGRAMS[name].block_formats
    instead = f"give {listed(formats)} on devices that have it" if formats else "give bf16"
    of = "this program" if PROGRAMS[name] is OWN else name
    raise UserError(
        f"precision.compute: 'mxfp4' is a format of weights and of measured runs (`validate`), and {of} does "
        f"not multiply in it as it trains; {instead}"
    )


def check_devices(name: str, device: Device) -> None:
    """Raise `UserError` for a device that a program does not run on."""
    runs = PROGRAMS[name].devices
    if device.kind not in runs:
        others = [other for other, known in PROGRAMS.items() if device.kind in known.devices]
        others = [other for other in others if PROGRAMS[other] is not OWN] or others
        raise UserError(
            f"--stack: {name} does not run on {device.name}, but on "
            f"{listed([_KINDS[kind] for kind in runs], 'and')}; give --stack {listed(others)}, or another "
            f"cluster"
        )


def check_program(name: str, spec: RunSpec) -> None:
    """Raise `UserError` for a layout that a program does not run."""
    if (rule := PROGRAMS[name].broken(spec)) is not None:
        raise UserError(rule.sentence(name, PROGRAMS[name].release, spec))
