"""Settings of the environment of solvers, rewriters and a selector. Loads without torch."""

from string import Formatter
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from actors.settings.environment import EnvironmentSettings
from actors.settings.rewards import RewardConfig

DRAFTS = "{prompt} drafts {answers}"
CHOICES = "{prompt} which {answers}"


class SeveralAgentsConfig(EnvironmentSettings, RewardConfig):
    """Environments whose agents answer a task together, and have rewards of their own."""

    shows_tools: ClassVar[bool] = False

    @model_validator(mode="after")
    def _rewards_are_of_single_answers(self) -> Self:
        if self.group_reward is not None:
            raise ValueError(
                f"group_reward is not for type={self.type}, whose agents have rewards of their own: leave it "
                "out"
            )
        return self


class PanelConfig(SeveralAgentsConfig):
    """Environment in which several agents of one policy answer a task together: solvers each draft an answer,
    rewriters see all drafts and each write a better one, and a selector chooses among those."""

    type: Literal["panel"] = "panel"
    built_by: ClassVar[str] = "actors.environments.panel:Panel.from_config"

    solvers: int = Field(3, ge=1, le=26)
    """Number of drafts."""

    rewriters: int = Field(3, ge=1, le=26)
    """Number of answers that the selector chooses from."""

    rewriter_prompt: str = DRAFTS
    """What a rewriter is asked. `{prompt}` is the task's last message, `{answers}` the drafts after their
    letters, as `a 12 b 21`."""

    selector_prompt: str = CHOICES
    """What the selector is asked; `{answers}` are the rewritten ones. It is to answer with a letter."""

    outcome_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen answer's reward in the rewards of solvers and rewriters, beside that of their own
    answer."""

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Return the names of the agents, each of which has one trajectory an episode."""
        roles = {"solver": self.solvers, "rewriter": self.rewriters}
        numbered = (f"{role}-{n + 1}" for role, count in roles.items() for n in range(count))
        return (*numbered, "selector")

    @property
    def trajectories_per_rollout(self) -> int:
        """Return how many agents there are."""
        return len(self.agent_names)

    @model_validator(mode="after")
    def _prompts_name_what_there_is(self) -> Self:
        for name in ("rewriter_prompt", "selector_prompt"):
            refuse_template(name, getattr(self, name), allowed=frozenset({"answers", "prompt"}))
        return self


def refuse_template(name: str, template: str, *, allowed: frozenset[str]) -> None:
    """Raise ValueError for a template that cannot be filled in, lacks `{answers}` or has other fields."""
    try:
        found = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(f"{name}={template!r} cannot be filled in: {error}") from error
    if "answers" not in found or found - allowed:
        others = "".join(f", and may contain {{{field}}}" for field in sorted(allowed - {"answers"}))
        raise ValueError(
            f"{name}={template!r} must contain {{answers}}{others}; other braces are written twice"
        )
