"""Configs of published models with experts: fields of their config.json, and their parameters."""

from __future__ import annotations

from published_configs import QWEN3, Config, config_of

MIXTRAL = {
    "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_CODER = QWEN3_MOE | {
    "max_position_embeddings": 262144, "max_window_layers": 62, "num_experts": 160, "qkv_bias": False,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096, "norm_topk_prob": False,
    "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "initial_context_length": 4096, "initializer_range": 0.02,
    "max_position_embeddings": 131072, "num_experts_per_tok": 4, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
TWO_LAYERS = ["sliding_attention", "full_attention"]
GLM45 = {
    "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072, "n_group": 1,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
    "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 1000000, "tie_word_embeddings": False, "topk_group": 1, "vocab_size": 151552,
}  # fmt: skip
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# The published file has another init and balance loss than the training of the paper's 4.2.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840, "initializer_range": 0.006,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "aux_loss_alpha": 0.0001, "num_nextn_predict_layers": 1,
}  # fmt: skip
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "initializer_range": 0.02,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_experts_per_tok": 6, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
MOONSHOT = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 512, "moe_layer_freq": 1, "n_group": 1,
    "norm_topk_prob": True, "num_nextn_predict_layers": 0, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rope_theta": 50000.0, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
FURTHER = {"glm4.5": 5_539_976_512, "glm4.5-air": 3_616_579_328}
"""Parameters in GLM's files of the layer for further tokens, which has an embedding and a head of its own,
and of the biases of all routers, which have no gradient and are buffers here."""

PUBLISHED_EXPERTS: dict[str, tuple[str, int, Config]] = {
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        30_532_122_624,
        config_of(QWEN3_MOE, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        235_093_634_560,
        config_of(QWEN3_MOE, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    ),
    "qwen3-coder-480b-a35b": (
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        480_154_875_392,
        config_of(QWEN3_CODER, 6144, 8192, 62, 96, 8, moe_intermediate_size=2560),
    ),
    "olmoe-1b-7b": ("allenai/OLMoE-1B-7B-0924", 6_919_161_856, config_of(OLMOE, 2048, 1024, 16, 16, 16)),
    "gpt-oss-20b": (
        "openai/gpt-oss-20b",
        20_914_757_184,
        config_of(GPT_OSS, 2880, 2880, 24, 64, 8, num_local_experts=32, layer_types=12 * TWO_LAYERS),
    ),
    "gpt-oss-120b": (
        "openai/gpt-oss-120b",
        116_829_156_672,
        config_of(GPT_OSS, 2880, 2880, 36, 64, 8, num_local_experts=128, layer_types=18 * TWO_LAYERS),
    ),
    "glm4.5": (
        "zai-org/GLM-4.5",
        358_337_791_296 - FURTHER["glm4.5"],
        config_of(
            GLM45,
            5120,
            12288,
            92,
            96,
            8,
            first_k_dense_replace=3,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
        ),
    ),
    "glm4.5-air": (
        "zai-org/GLM-4.5-Air",
        110_468_824_832 - FURTHER["glm4.5-air"],
        config_of(
            GLM45,
            4096,
            10944,
            46,
            96,
            8,
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            use_qk_norm=False,
        ),
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        config_of(MIXTRAL, 4096, 14336, 32, 32, 8, max_position_embeddings=32768, router_aux_loss_coef=0.02),
    ),
    "mixtral-8x22b": (
        "mistralai/Mixtral-8x22B-v0.1",
        140_620_634_112,
        config_of(
            MIXTRAL,
            6144,
            16384,
            56,
            48,
            8,
            max_position_embeddings=65536,
            router_aux_loss_coef=0.001,
            router_jitter_noise=0.0,
        ),
    ),
    # Biases of 58 routers are counted in the file; they have no gradient, and are buffers here.
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3-Base",
        671_026_419_200 - 58 * 256,
        config_of(DEEPSEEK_V3, 7168, 18432, 61, 128, 128),
    ),
    "deepseek-v2-lite": (
        "deepseek-ai/DeepSeek-V2-Lite",
        15_706_484_224,
        config_of(
            DEEPSEEK_V2,
            2048,
            10944,
            27,
            16,
            16,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=64,
            q_lora_rank=None,
            rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            routed_scaling_factor=1.0,
            topk_group=1,
            topk_method="greedy",
        ),
    ),
    "deepseek-v2": (
        "deepseek-ai/DeepSeek-V2",
        235_741_434_880,
        config_of(
            DEEPSEEK_V2,
            5120,
            12288,
            60,
            128,
            128,
            moe_intermediate_size=1536,
            n_group=8,
            n_routed_experts=160,
            q_lora_rank=1536,
            rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            routed_scaling_factor=16.0,
            topk_group=3,
            topk_method="group_limited_greedy",
        ),
    ),
    "moonlight-16b-a3b": (
        "moonshotai/Moonlight-16B-A3B",
        15_960_108_544,
        config_of(
            MOONSHOT,
            2048,
            11264,
            27,
            16,
            16,
            model_type="deepseek_v3",
            max_position_embeddings=8192,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            q_lora_rank=None,
            rms_norm_eps=1e-5,
            routed_scaling_factor=2.446,
        ),
    ),
    "kimi-k2": (
        "moonshotai/Kimi-K2-Base",
        1_026_408_232_448 - 60 * 384,
        config_of(
            MOONSHOT,
            7168,
            18432,
            61,
            64,
            64,
            model_type="kimi_k2",
            max_position_embeddings=131072,
            moe_intermediate_size=2048,
            n_routed_experts=384,
            n_shared_experts=1,
            num_experts_per_tok=8,
            q_lora_rank=1536,
            rms_norm_eps=1e-6,
            rope_scaling=YARN
            | {
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            routed_scaling_factor=2.827,
        ),
    ),
}
"""Preset -> the model's id, its number of parameters, and fields of its config.json as published."""
