"""Creates a tiny random model of a family with transformers, in two or more files.

Usage: make_model.py FAMILY MODEL_DIR

The seed is fixed. Biases and norms, which transformers initializes to 0 and 1, are random too.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.8, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
    "partial_rotary_factor": 0.75,
}
# A family without the option.
ABSENT = object()
EQUAL_HEADS = {"head_dim": ABSENT, "num_key_value_heads": ABSENT}
WITHOUT_ROPE = {"rope_parameters": ABSENT, "intermediate_size": ABSENT, **EQUAL_HEADS}
# The number of layers is that of their list.
WITHOUT_POSITIONS = {"rope_parameters": ABSENT, "num_hidden_layers": ABSENT}
LATENT = {
    "head_dim": ABSENT,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    # Not that of the norms of latents.
    "rms_norm_eps": 1e-2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
# Every rotary embedding and every variant of the block. Sequences have 40 tokens, so
# windows and lengths are shorter.
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama_linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "llama_dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 16,
    },
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    # The config says tied, the file has a separate head.
    "llama_untied": {"model_type": "llama"},
    # Dense. Queries grow in the second layer, which does not rotate.
    "llama4": {
        "model_type": "llama4_text",
        "moe_layers": [],
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 12,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
        "attn_scale": 0.7,
    },
    "llama4_biases": {
        "model_type": "llama4_text",
        "moe_layers": [],
        "intermediate_size_mlp": 96,
        "rope_parameters": LLAMA3,
        "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
        "attention_chunk_size": 7,
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": False,
        "use_qk_norm": False,
        "attention_bias": True,
    },
    "llama_yarn": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    # Four value heads that share two key heads; half of each head of attention rotates.
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "layer_types": HYBRID,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    # Six value heads that share three key heads.
    "qwen3_next": {
        "model_type": "qwen3_next",
        "layer_types": HYBRID,
        "num_experts": 0,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 9,
        "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "qwen3_windows": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    # Windows in the first and the third layer, another base in each kind, and logits that are not divided by the
    # root of the head's size.
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 7,
        "query_pre_attn_scalar": 21,
        "layer_types": MIXED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
    },
    "gemma3_capped": {"model_type": "gemma3_text", "final_logit_softcapping": 3.0},
    # Two sizes of heads. The last layer has no window.
    "gemma4": {
        "model_type": "gemma4_text",
        "sliding_window": 7,
        "num_hidden_layers": 4,
        "layer_types": [*MIXED, "full_attention"],
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        },
    },
    "gemma4_own_values": {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "rope_parameters": ABSENT,
    },
    # Caps that all logits come near.
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 7,
        "query_pre_attn_scalar": 21,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "sliding_window": 7},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "gemma": {"model_type": "gemma"},
    "ministral": {"model_type": "ministral", "sliding_window": 7, "layer_types": MIXED},
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 7,
        "layer_types": MIXED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
    },
    "exaone4": {"model_type": "exaone4", "sliding_window": 7, "layer_types": MIXED},
    "exaone4_full": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "seed_oss": {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0},
    # Three quarters of each head rotate. 40 tokens are more than the original length, or fewer.
    "phi3_long": {
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "longrope", **LONG_FACTORS},
    },
    "phi3_short": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "longrope", **LONG_FACTORS},
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.7},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.7, "sliding_window": 7, "layer_types": MIXED},
    "glm": {"model_type": "glm"},
    "glm4": {"model_type": "glm4", "attention_bias": False},
    "glm4_linear": {"model_type": "glm4", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "ernie4_5": {"model_type": "ernie4_5"},
    "ernie4_5_biases": {"model_type": "ernie4_5", "use_bias": True},
    "gpt2": {"model_type": "gpt2", "n_inner": 96, **WITHOUT_ROPE},
    "gpt2_untied": {"model_type": "gpt2", "tie_word_embeddings": False, **WITHOUT_ROPE},
    "gpt_neox": {"model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": 0.5}, **EQUAL_HEADS},
    "gpt_neox_linear": {
        "model_type": "gpt_neox",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "attention_bias": False,
        **EQUAL_HEADS,
    },
    "gptj": {"model_type": "gptj", "n_inner": 96, "rotary_dim": 8, **WITHOUT_ROPE},
    "phi": {"model_type": "phi", "head_dim": ABSENT, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "phi_norms": {
        "model_type": "phi",
        "qk_layernorm": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25},
        "head_dim": ABSENT,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 7},
    "nemotron": {"model_type": "nemotron"},
    "nemotron_biases": {"model_type": "nemotron", "attention_bias": True, "mlp_bias": True},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "head_dim": ABSENT},
    # An MLP of int(1.5 · 64) = 96, rounded up to 112.
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 28,
        "block_ffn_dim_multiplier": 1.5,
    },
    "lfm2_biases": {
        "model_type": "lfm2",
        "full_attn_idxs": [1],
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    # Three groups of heads, and time steps of which some are clamped.
    "granite_hybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": HYBRID,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_expand": 3,
        "mamba_n_heads": 6,
        "mamba_n_groups": 3,
        "mamba_d_state": 12,
        "time_step_limit": (0.3, 1.2),
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "granite_hybrid_rope": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "position_embedding_type": "rope",
    },
    # Three groups of heads in an odd number of elements, and time steps of which some are clamped.
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "hidden_size": 56,
        "intermediate_size": 75,
        "mamba_num_heads": 6,
        "mamba_head_dim": 9,
        "n_groups": 3,
        "ssm_state_size": 9,
        "chunk_size": 16,
        "time_step_min": 0.4,
        **WITHOUT_POSITIONS,
    },
    "nemotron_h_biases": {
        "model_type": "nemotron_h",
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 5,
        "mamba_head_dim": 13,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
        "layer_norm_epsilon": 1e-3,
        **WITHOUT_POSITIONS,
    },
    # Dense. Their values are narrower than their queries.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16,
        },
        "first_k_dense_replace": 3,
        **LATENT,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", "first_k_dense_replace": 3, **LATENT, "q_lora_rank": None},
    "youtu": {"model_type": "youtu", "tie_word_embeddings": True, **LATENT},
    "minicpm3": {"model_type": "minicpm3", "rope_parameters": {"rope_type": "linear", "factor": 4.0}, **LATENT},
    # Dense, with linear attention by decays per channel.
    "kimi_linear": {
        "model_type": "kimi_linear",
        "mlp_layer_types": ["dense"] * 3,
        "layer_types": HYBRID,
        "linear_num_heads": 3,
        "linear_head_dim": 10,
        "bos_token_id": None,
        "eos_token_id": None,
        **{**LATENT, "q_lora_rank": None},
        "rope_parameters": ABSENT,
    },
    # Of these the language model is one part.
    "gemma3_vision": {"model_type": "gemma3", "mm_tokens_per_image": 4},
    "gemma4_vision": {"model_type": "gemma4", "image_token_id": 5, "video_token_id": 6, "audio_token_id": 7},
    "mistral3_vision": {"model_type": "mistral3", "image_token_index": 5},
    "ministral3_vision": {"model_type": "mistral3", "image_token_index": 5, "tie_word_embeddings": False},
    "qwen3_vision": {"model_type": "qwen3_vl", "image_token_id": 5, "video_token_id": 6, "tie_word_embeddings": True},
    "qwen3_5_vision": {"model_type": "qwen3_5", "image_token_id": 5, "video_token_id": 6},
}

PIXTRAL = {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
# Of "FAMILY_vision": what reads images, and the options of the language model.
VISION = {
    "gemma3_vision": (
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        FAMILIES["gemma3"],
    ),
    "gemma4_vision": (
        {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 14, "position_embedding_size": 16},
        # transformers puts it in the place of image tokens. No text of the tests has it.
        {**FAMILIES["gemma4"], "pad_token_id": 0},
    ),
    "mistral3_vision": (PIXTRAL, FAMILIES["mistral"]),
    "ministral3_vision": (PIXTRAL, FAMILIES["ministral3"]),
    "qwen3_vision": (
        {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        {"model_type": "qwen3_vl_text"},
    ),
    "qwen3_5_vision": ({"depth": 1, "num_heads": 2, "out_hidden_size": 64}, FAMILIES["qwen3_5"]),
}

family, model_dir = sys.argv[1:]
vision, text = VISION.get(family, (None, FAMILIES[family]))
options = {"max_position_embeddings": 512, "head_dim": 16, **text}
# Short wavelengths, so that most pairs rotate several times within 40 tokens.
rope = options.get("rope_parameters", {})
if rope is not ABSENT and "full_attention" not in rope:
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, **rope}
sizes = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Some families' own is beyond this vocabulary.
    "pad_token_id": None,
}
options = {key: value for key, value in {**sizes, **options}.items() if value is not ABSENT}
if vision is not None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {**FAMILIES[family], "text_config": options, "vision_config": {**sizes, **vision}}
config = AutoConfig.for_model(**options)
torch.manual_seed(17)
auto = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
model = auto.from_config(config, dtype=torch.float32)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.uniform_(0.6, 1.4)
        elif name.endswith(("bias", "A_log")):
            parameter.uniform_(-0.5, 0.5)
        else:
            parameter.normal_(std=1.25 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)
if family == "llama_untied":
    model.config.tie_word_embeddings = True
model.save_pretrained(model_dir, max_shard_size="100KB")
if family == "kimi_linear":
    # transformers writes dense MLPs by the name of those with experts. In the published model they have this one.
    others = ("block_sparse_moe", "mlp")
    for file in Path(model_dir).glob("*.safetensors"):
        save_file({name.replace(*others): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    index = Path(model_dir, "model.safetensors.index.json")
    index.write_text(index.read_text().replace(*others))
