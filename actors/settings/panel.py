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
        roles = {"solver": self.solvers, "rewriter": self.rewriters}
        numbered = (f"{role}-{n + 1}" for role, count in roles.items() for n in range(count))
        return (*numbered, "selector")

    @property
    def trajectories_per_rollout(self) -> int:
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


VOTE, SELF = "vote", "self"
"""Judges that are no opponents: the rule, and the policy itself."""


class DebateConfig(SeveralAgentsConfig):
    """Environment in which several agents of one policy answer a task, see each other's answers and answer
    again, round after round, until a judge decides (arXiv:2305.14325)."""

    type: Literal["debate"] = "debate"
    built_by: ClassVar[str] = "actors.environments.debate:Debate.from_config"
    debaters: int = Field(3, ge=2, le=26)
    """Number of agents that debate."""
    rounds: int = Field(2, ge=1)
    """Answers of each debater; from the second on it has seen those of the others."""
    reply_prompt: str = "others {answers}"
    """What a debater is told before its next answer. `{answers}` are those of the other debaters after their
    letters, as `b 12 c 21`."""
    decided_by: str = VOTE
    """Who decides. `vote`: the answer that most debaters end with, of equal ones the earliest debater's;
    answers are compared as texts, letter by letter. `self`: an agent of the policy, which is trained to
    choose. Any other name is one of `actors.opponents`, which is not trained, or of `policies`."""
    judge_prompt: str = "{prompt} judge {answers}"
    """What a judge that is an agent is asked. `{prompt}` is the task's last message, `{answers}` are the
    debaters' last answers after their letters. It is to answer with a letter; with any other text, and
    where the answers do not fit into its context, the debate has no winner and the outcome is 0."""
    decision_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the reward of the answer that was decided on in the rewards of all debaters, beside that of
    their own last answer."""
    win_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """What a debater gets besides if it ended with the answer that was decided on, right or wrong."""
    opponent_setting: ClassVar[str] = "decided_by"

    @property
    def agent_names(self) -> tuple[str, ...]:
        return (*(f"debater-{n + 1}" for n in range(self.debaters)), "judge")

    @property
    def opponents_named(self) -> tuple[str, ...]:
        return () if self.decided_by in (VOTE, SELF) else (self.decided_by,)

    @model_validator(mode="after")
    def _prompts_name_what_there_is(self) -> Self:
        refuse_template("reply_prompt", self.reply_prompt, allowed=frozenset({"answers"}))
        refuse_template("judge_prompt", self.judge_prompt, allowed=frozenset({"answers", "prompt"}))
        return self
