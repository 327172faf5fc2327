"""Sets how trajectories become micro-batches. Loads without torch."""

from typing import Literal

from pydantic import Field

from bus.config import Config

DEFAULT_TOKENS = 16384
"""Tokens of a micro-batch where neither settings nor memory say otherwise."""


class BatchConfig(Config):
    """Sets how trajectories become micro-batches."""

    tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Token budget of one packed micro-batch. `None` is 16,384; for a model of a directory on a CPU it is at
    most what has activations in a thirty-second part of the memory of the host or container
    (learner/initial/micro_batch.py), and the learner says how much that is."""
    logprob_tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Token budget of a micro-batch in passes that only compute log-probs (proximal, reference, teacher).
    They keep no activations, so several times as much fits. `None` means `tokens_per_micro_batch`."""
    updates: int = Field(1, ge=1)
    """Updates that share a batch, each on as many trajectories of every group: at most as many as
    `admission.samples_per_prompt`."""
    oversized: Literal["alone", "refuse"] = "alone"
    """Sets what happens to a trajectory longer than the budget. `alone`: it is a micro-batch by itself.
    `refuse`: it ends the run with an error that names it."""
    share_prefixes: bool = False
    """Compute once what trajectories of one prompt have in common from their first token on: the prompt of
    siblings, the earlier turns of strands. Token budgets then count what is computed."""
    skip_zero_advantages: bool = True
    """Leave trajectories whose advantages are all 0 out of the passes of an update, where the objective has
    no other term that gives them a gradient. The weights are those of an update on all of them; figures of
    the policy are of the tokens that are computed."""
    balance: Literal["tokens", "flops"] = "tokens"
    """Measure by which data-parallel ranks get equal shares: tokens that are computed, or work, for which
    attention counts by the square of the length."""

    @property
    def token_budget(self) -> int:
        return self.tokens_per_micro_batch or DEFAULT_TOKENS

    @property
    def logprob_token_budget(self) -> int:
        """Return the token budget of a micro-batch in passes that only compute log-probs."""
        return self.logprob_tokens_per_micro_batch or self.token_budget
