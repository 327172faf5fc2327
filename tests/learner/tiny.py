"""Small random models and batches."""

import pickle
from copy import deepcopy
from functools import lru_cache

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.algorithms.losses.objective import Objective
from learner.config.correction import TokenTIS
from learner.config.loss import ReinforceLoss
from learner.data.packing import Sample

VOCAB = 58
TIS = Objective(ReinforceLoss(), TokenTIS())
DENSE = ("gemma3_text", "glm4", "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text")
SPARSE = (
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "minimax_m2", "mixtral", "qwen2_moe",
    "qwen3_moe", "qwen3_next",
    "qwen3_5_moe_text",
)  # fmt: skip
_OF_EACH_KIND = {"deepseek_v3", "gemma3_text", "qwen3", "qwen3_moe", "qwen3_next"}
FAMILIES = tuple(sorted(DENSE + SPARSE, key=lambda family: family not in _OF_EACH_KIND))
"""Those of each kind come first: `pytest.mark.first` leaves them in the default suite."""
_CLASSES = {
    "deepseek_v3": "DeepseekV3", "gemma3_text": "Gemma3Text", "glm4": "Glm4",
    "glm4_moe": "Glm4Moe", "glm4_moe_lite": "Glm4MoeLite", "gpt_oss": "GptOss",
    "llama": "Llama", "minimax_m2": "MiniMaxM2", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5Text", "qwen3_5_moe_text": "Qwen3_5MoeText",
}  # fmt: skip
_DELTA = {
    "rms_norm_eps": 1e-2,  # heads of first tokens are near 0, where norms would multiply rounding errors
    "head_dim": 24, "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
}  # fmt: skip
_SHARED_EXPERT = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 20,
}  # fmt: skip
_OWN = {
    "qwen3_next": {**_DELTA, **_SHARED_EXPERT},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED_EXPERT},
    "gemma3_text": {
        "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 8, "pad_token_id": None,
        "sliding_window_pattern": 2,
    },
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "qwen2_moe": _SHARED_EXPERT,
    "deepseek_v3": {
        **_LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0
    },
    "glm4": {"head_dim": 24, "pad_token_id": None},
    "glm4_moe": {
        "head_dim": 24, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
        "num_mtp_layers": 0,
    },
    "glm4_moe_lite": _LATENT,
    "gpt_oss": {
        "head_dim": 24, "intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 3,
        "sliding_window": 8, "swiglu_limit": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "minimax_m2": {
        "head_dim": 24, "intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
"""Hyperparameters of a tiny model of most families."""


ROPES = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}  # fmt: skip
"""Rotary embeddings scaled so that sequences of tens of tokens are turned by other angles."""


def tiny_config(
    family: str = "qwen3", *, tied: bool = False, rope: str | None = None, **changes: object
) -> PretrainedConfig:
    """A configuration of two layers; `rope` is one of `ROPES`."""
    values = {**SIZES, "tie_word_embeddings": tied, **_OWN.get(family, {})}
    if rope is not None:
        values["rope_parameters"] = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    return getattr(transformers, f"{_CLASSES[family]}Config")(**{**values, **changes})


def tiny_model(
    family: str = "qwen3", *, tied: bool = False, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """A random transformers model whose norms and biases are not trivial."""
    model, drawn = _built(pickle.dumps((family, tied, seed, changes)))
    torch.set_rng_state(drawn)
    return deepcopy(model)  # in a third of the time


@lru_cache(maxsize=16)
def _built(settings: bytes) -> tuple[PreTrainedModel, Tensor]:
    """Return a model that nobody changes, and the state of the generator behind it."""
    family, tied, seed, changes = pickle.loads(settings)
    torch.default_generator.manual_seed(seed)
    config = tiny_config(family, tied=tied, **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                # Linear attention would find little if its convolution were as small as other weights.
                parameter.mul_(30.0 if name.endswith("conv1d.weight") else 3.0)
        for name, values in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                values.add_(0.1 * torch.randn_like(values))
    return model, torch.get_rng_state()


def hf_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights under the names that they have in files: transformers keeps all experts of a layer in one."""
    return revert_weight_conversion(model, model.state_dict())


def hf_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gradients under the names that the weights have in files."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return revert_weight_conversion(model, gradients)


def random_samples(
    lengths: list[int],
    *,
    seed: int = 0,
    versions: tuple[int, ...] = (3,),
    temperatures: float | tuple[float, ...] = 1.0,
) -> list[Sample]:
    """Samples of these lengths, most of their tokens trained, behaviour log-probs near uniform.

    Each token has one of `temperatures`, if there are several.
    """
    rng, drawn = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    return [
        Sample(
            token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
            loss_mask=rng.random(length) < 0.7,
            streams={
                "behaviour_logprobs": (-np.log(VOCAB) + rng.normal(0, 0.5, length)).astype(np.float32),
                "policy_versions": rng.choice(versions, length).astype(np.int32),
                "advantages": float(rng.normal()),
                "temperatures": temperatures
                if isinstance(temperatures, float)
                else drawn.choice(temperatures, length).astype(np.float32),
            },
            name=f"sample {number}",
        )
        for number, length in enumerate(lengths)
    ]


def reference_logits(model: PreTrainedModel, samples: list[Sample]) -> Tensor:
    """Logits of transformers, one sequence after the other; each is a row, which what fills it up follows."""
    lengths = [len(sample.token_ids) for sample in samples]
    rows = pad_sequence([torch.from_numpy(s.token_ids).long() for s in samples], batch_first=True)
    return torch.cat([row[:length] for row, length in zip(model(rows).logits, lengths, strict=True)])
