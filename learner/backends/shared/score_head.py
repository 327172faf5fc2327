"""The scalar head of a reward model, which stands in place of the output layer."""

from transformers import PretrainedConfig

SCORE_HEAD = "score.weight"
"""Name of the head in model files, and in models of transformers."""


def is_reward_model(hf_config: PretrainedConfig) -> bool:
    """Tell whether the model has a scalar head in place of its output layer."""
    return any(name.endswith("ForSequenceClassification") for name in hf_config.architectures or ())
