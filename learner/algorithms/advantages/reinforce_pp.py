"""Returns without a model of the value, normalised over the whole step."""

from itertools import accumulate

import numpy as np

from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.gae import Penalties
from learner.algorithms.advantages.group_baselines import rewards_relative_to_peers
from learner.algorithms.advantages.whitening import trained_tokens, whitened
from learner.distributed.exact_sums import SumsOverRanks


def reinforce_pp_advantages(
    groups: Groups, *, discount_per_token: float, sums: SumsOverRanks, token_penalties: Penalties
) -> list[list[float | np.ndarray]]:
    """Return the reward less the KL penalties still to come, whitened over the trained tokens of the step.

    REINFORCE++ (arXiv:2501.03262, eq. 8 to 10). The reward is that of the last trained token; a discount
    below 1 gives less of it to earlier ones, as slime does. Groups of one are as good as any.

    Args:
        groups: trajectories of one prompt each; those that are not trained get 0.
        discount_per_token: factor of what comes a token later.
        sums: adds up over ranks.
        token_penalties: taken from the rewards of the tokens."""
    factor = discount_per_token
    returns = [
        [_returns(t, lost, factor) if t.is_trained else 0.0 for t, lost in zip(*pair, strict=True)]
        for pair in zip(groups, token_penalties, strict=True)
    ]
    return whitened(groups, returns, sums, over="tokens")


def reinforce_pp_baseline_advantages(
    groups: Groups, *, sums: SumsOverRanks, token_penalties: Penalties
) -> list[list[float | np.ndarray]]:
    """Subtract the mean reward of the group, agent by agent, and whiten over the trained tokens of the step.

    REINFORCE++ with baseline (arXiv:2501.03262). The paper puts the KL penalty into the loss, estimated by
    k2; penalties in the reward are taken from each token's advantage, as slime does.

    Args:
        groups: trajectories of one prompt each; those that are not trained are in no baseline and get 0.
        sums: adds up over ranks.
        token_penalties: taken from the advantages of the tokens."""
    relative = [
        rewards_relative_to_peers(group, lambda rewards: rewards - rewards.mean()) for group in groups
    ]
    penalised = [
        [advantage - penalty for advantage, penalty in zip(*pair, strict=True)]
        for pair in zip(relative, token_penalties, strict=True)
    ]
    return whitened(groups, penalised, sums, over="tokens")


def _returns(trajectory: Trajectory, penalty: float | np.ndarray, discount: float) -> float | np.ndarray:
    """Return the discounted sum of the rewards of a token and those after it, [L]; 0 outside of the mask."""
    if discount == 1 and not np.any(penalty):
        return trajectory.reward
    mask = trained_tokens(trajectory)
    rewards = -np.broadcast_to(np.asarray(penalty, np.float64), len(mask))[mask]
    rewards[-1:] += trajectory.reward
    returns = np.zeros(len(mask))
    returns[mask] = [*accumulate(rewards[::-1].tolist(), lambda later, now: now + discount * later)][::-1]
    return returns
