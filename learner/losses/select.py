"""From a loss's configuration to the loss."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from learner.config import PPOClipLoss, SFTLoss, TISLoss
from learner.losses.ppo_clip import ppo_clip_loss
from learner.losses.sft import sft_loss
from learner.losses.tis import tis_loss
from learner.packing import MicroBatch, TrainedTokens

Loss = tuple[Tensor, dict[str, Tensor]]
Tokens = MicroBatch | TrainedTokens


def _tis(config: TISLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    return tis_loss(
        logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.loss_mask,
        truncation_cap=config.truncation_cap,
    )


def _ppo_clip(config: PPOClipLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    return ppo_clip_loss(
        logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.loss_mask,
        clip_eps=config.clip_eps,
        clip_eps_high=config.clip_eps if config.clip_eps_high is None else config.clip_eps_high,
        truncation_cap=config.truncation_cap,
    )


def _sft(config: SFTLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    return sft_loss(logprobs, batch.loss_mask)


LOSSES: dict[str, Callable[[Any, Tensor, Tokens], Loss]] = {
    "ppo_clip": _ppo_clip,
    "sft": _sft,
    "tis": _tis,
}
"""By the `type` of the configuration: (config, log-probabilities [T], batch) to (sum, sums to log)."""


def compute_loss(config: TISLoss | PPOClipLoss | SFTLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    """Compute the loss that `config` names: its sum over the mask, and detached sums to log."""
    return LOSSES[config.type](config, logprobs, batch)
