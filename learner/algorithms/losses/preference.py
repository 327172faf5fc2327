"""Losses over pairs of answers, of which one is preferred.

Sequences 2 i and 2 i + 1 of a micro-batch are a pair, the preferred one first."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.algorithms.tokens import LossTokens
from learner.config.loss import PreferenceForm


def dpo_loss(
    tokens: LossTokens, *, form: PreferenceForm, beta: float, label_smoothing: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation (arXiv:2305.18290, eq. 7).

    The reward of an answer is beta times the sum of its log ratios to the reference policy. The loss of a
    pair is -log sigmoid(m) of the difference m of its rewards; with a label smoothing of e it is that of m
    with weight 1 - e and that of -m with weight e, as if so many labels were wrong. `hinge` is max(0, 1 - m)
    (arXiv:2305.10425). `ipo` is (d - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17), where d is the difference of
    the mean log ratios of a token, as its authors compute it.

    Returns the loss of each token, [N], which adds up to that of its pair, and sums over pairs to log."""
    log_ratios = tokens.logprobs - tokens.streams["reference_logprobs"]
    chosen, rejected = _sides(tokens, beta * log_ratios)
    margins = chosen - rejected
    if form == "ipo":
        of_chosen, of_rejected = _sides(tokens, log_ratios, mean=True)
        losses = (of_chosen - of_rejected - 1 / (2 * beta)).square()
    elif form == "hinge":
        losses = (1 - margins).clamp(min=0)
    else:
        losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    return _over_tokens(tokens, losses), _rewards(tokens, chosen, rejected)


def bradley_terry_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(r_chosen - r_rejected) of the scores of two answers (arXiv:1706.03741, eq. 1).

    `tokens.logprobs` are scores, of one token a sequence.

    Returns the loss of each token, [N], which adds up to that of its pair, and sums over pairs to log."""
    chosen, rejected = _sides(tokens, tokens.logprobs)
    return _over_tokens(tokens, -logsigmoid(chosen - rejected)), _rewards(tokens, chosen, rejected)


def _sides(tokens: LossTokens, values: Tensor, *, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Add up values [N] by sequence, or average them: float64 of the preferred answers and of the others, [P]
    each."""
    of_sequences = tokens.sequence_mean(values) if mean else tokens.sequence_sum(values)
    chosen, rejected = of_sequences[: tokens.sequences // 2 * 2].view(-1, 2).unbind(1)
    return chosen, rejected


def _over_tokens(tokens: LossTokens, values: Tensor) -> Tensor:
    """Divide values of pairs, [P], among all tokens of each, [N]: ranks may share these."""
    lengths = sum(_sides(tokens, torch.ones_like(tokens.logprobs, requires_grad=False)))
    return (values / lengths)[tokens.sequence // 2]


def _rewards(tokens: LossTokens, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the sums of rewards over pairs, whose names are those of TRL."""
    found = {
        "chosen": chosen, "rejected": rejected, "accuracies": chosen > rejected, "margins": chosen - rejected
    }  # fmt: skip
    return {f"rewards/{name}": _over_tokens(tokens, values).sum() for name, values in found.items()}
