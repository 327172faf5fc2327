"""Settings of supervised fine-tuning before reinforcement learning. Loads without torch."""

from pathlib import Path

from pydantic import Field

from bus.config import Config
from learner.config.loss import SFTLoss, SupervisedLoss
from learner.config.optimizer import OptimizerConfig


class WarmupOptimizerConfig(OptimizerConfig):
    """Optimizer of the supervised stage."""

    lr: float = Field(2e-3, gt=0)
    """Learning rate after its own warm-up."""
    warmup_steps: int = Field(20, ge=0)
    """Updates over which the learning rate rises linearly."""


class WarmupConfig(Config):
    """Supervised fine-tuning before reinforcement learning, on demonstrations."""

    demonstrations: Path | None = None
    """JSONL file of {"prompt": ..., "response": ...} or of chats, {"messages": [...]}, whose answers are all
    trained, but for those with "weight": 0. Without it the task's generator writes one. A loss over pairs has
    {"prompt": ..., "chosen": ..., "rejected": ...}."""
    loss: SupervisedLoss = SFTLoss()
    """What is learned of a demonstration: `sft` its answers, `dpo` which of two is preferred,
    `reward_model` to score them so."""
    heldout: Path | None = None
    """File of demonstrations that are not trained on: their mean loss is measured."""
    heldout_every: int = Field(20, gt=0)
    """Steps from one measurement of the held-out loss to the next; one more follows the last step."""
    steps: int = Field(0, ge=0)
    """Steps of the supervised stage; 0 leaves it out."""
    batch_size: int = Field(64, gt=0)
    """Demonstrations in a step."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of this stage, in which the actors are idle; `None` as in `learner.threads`."""
    optimizer: WarmupOptimizerConfig = WarmupOptimizerConfig()
    """Optimizer of this stage; reinforcement learning starts with a fresh one."""

    @property
    def makes_reward_model(self) -> bool:
        return self.steps > 0 and self.loss.facts.of_scores
