"""Inputs of losses, and losses that are worked out by hand."""

from math import log

import torch

from learner.algorithms.losses.objective import Objective, token_losses
from learner.algorithms.tokens import LossTokens
from learner.config.loss import ReinforceLoss
from learner.data.streams import STREAMS


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def tokens_of(
    logprobs: torch.Tensor, *, sequence: tuple[int, ...] = (), **streams: float | list[float]
) -> LossTokens:
    """Tokens whose streams have these values, in one sequence unless `sequence` says more."""
    of_each = torch.tensor(sequence or (0,) * len(logprobs))
    filled = {
        name: torch.as_tensor(streams.get(name, stream.fill), dtype=stream.dtype).expand(len(logprobs))
        for name, stream in STREAMS.items()
    }
    return LossTokens(
        logprobs=logprobs,
        entropy=torch.zeros(len(logprobs), requires_grad=True),
        labels=torch.zeros(len(logprobs), dtype=torch.int64),
        sequence=of_each,
        sequences=int(of_each.max()) + 1,
        positions=torch.arange(len(logprobs)),
        streams=filled,
    )


def worked_out(objective: Objective, tokens: LossTokens) -> tuple[list[float], list[float], dict[str, float]]:
    """The losses, the gradient of their sum in the log-probs, and the sums to log."""
    losses, sums = token_losses(objective, tokens)
    [gradient] = torch.autograd.grad(losses.sum(), tokens.logprobs)
    by_sign = ("_positive", "_negative")
    in_all = {name: value.item() for name, value in sums.items() if not name.endswith(by_sign)}
    return losses.tolist(), gradient.tolist(), in_all


SEQUENCE = (0, 0, 1, 1)


def kept(rejection, now, then, *, advantages, sequence=SEQUENCE) -> list[bool]:
    """Which tokens are trained on that had the probabilities `then` and have `now`."""
    tokens = tokens_of(
        leaf(*map(log, now)),
        sequence=sequence,
        behaviour_logprobs=[log(p) for p in then],
        advantages=advantages,
    )
    _, gradient, sums = worked_out(Objective(ReinforceLoss(), rejections=(rejection,)), tokens)
    found = [value != 0 for value in gradient]
    assert sums["rejected_tokens"] == found.count(False)
    return found
