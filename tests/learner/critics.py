"""A critic of transformers, and what it is to learn, written from the definitions."""

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from bus.trajectory import Trajectory
from learner.backends.contract.backend import CriticSource
from learner.config.critic import CriticConfig
from tests.learner.tiny import hf_state, tiny_model

CLASSES = {
    "deepseek_v3": "DeepseekV3ForTokenClassification", "gpt_oss": "GptOssForTokenClassification",
    "llama": "LlamaForTokenClassification", "qwen3": "Qwen3ForTokenClassification",
    "qwen3_next": "Qwen3NextForTokenClassification",
}  # fmt: skip


def tiny_critic(
    family: str = "qwen3", *, seed: int = 5, head: bool = True, **changes: object
) -> PreTrainedModel:
    """A transformers model with one output for each token; its head is 0 where it is not asked for."""
    body = tiny_model(family, seed=seed, **changes)
    body.config.num_labels = 1
    critic = getattr(transformers, CLASSES[family])(body.config).eval()
    critic.model.load_state_dict(body.model.state_dict())
    with torch.no_grad():
        for parameter in critic.score.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter) if head else torch.zeros_like(parameter))
    return critic


def source_of(critic: PreTrainedModel, config: CriticConfig) -> CriticSource:
    """What ours is made from."""
    return CriticSource(config=config, hf_config=critic.config, state=hf_state(critic))


def values_of(critic: PreTrainedModel, token_ids: np.ndarray) -> Tensor:
    """The value of the state before each token but the first, [L - 1], with gradient."""
    return critic(torch.from_numpy(token_ids).long()[None]).logits[0, :-1, 0]


def actions_of(t: Trajectory, level: str) -> list[list[int]]:
    """Tokens of each action."""
    if level == "token":
        return [[i] for i in range(1, len(t.token_ids)) if t.loss_mask[i]]
    turns = [[i for i in range(max(1, turn.start), turn.stop) if t.loss_mask[i]] for turn in t.turns]
    return [tokens for tokens in turns if tokens]


def credit_of(
    t: Trajectory, values: np.ndarray, log_ratios: np.ndarray, config: CriticConfig, trace_decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages [L] and targets [L], NaN where nothing is learned; sums over all later actions.

    `values` and `log_ratios` are by token, [L]."""
    actions, gamma = actions_of(t, config.level), config.discount
    value = [values[tokens[0]] for tokens in actions] + [0.0]
    reward = [0.0] * len(actions)
    for turn in t.turns:
        reward[max(n for n, tokens in enumerate(actions) if tokens[0] < turn.stop)] += turn.reward or 0.0
    reward[-1] += t.reward
    ratio = [np.exp(sum(log_ratios[i] for i in tokens)) for tokens in actions]
    if config.targets == "gae":
        ratio, rho_bar, c_bar = [1.0] * len(actions), 1.0, 1.0
    else:
        rho_bar, c_bar = config.rho_bar, config.c_bar
    advantages, targets = np.zeros(len(t.token_ids)), np.full(len(t.token_ids), np.nan)

    def change(first: int, decay: float) -> float:
        total, factor = 0.0, 1.0
        for n in range(first, len(actions)):
            surprise = reward[n] + gamma * value[n + 1] - value[n]
            total += factor * min(rho_bar, ratio[n]) * surprise
            factor *= gamma * decay * min(c_bar, ratio[n])
        return total

    for n, tokens in enumerate(actions):
        later = gamma * trace_decay * change(n + 1, trace_decay)
        advantages[tokens] = reward[n] + gamma * value[n + 1] - value[n] + later
        targets[tokens[0]] = value[n] + change(n, config.trace_decay)
    return advantages, targets
