"""Settings of the environment whose episodes are led by clients from outside. Loads without torch."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from actors.settings.agents import AgentTaskConfig, refuse_unusable_rewards


class ClientsConfig(AgentTaskConfig):
    """Environment of `launch gateway`: clients take tasks, ask the policy, and say when they are done.

    The reward is computed from the policy's last answer, or it is named `posted`: then each client posts its
    own."""

    type: Literal["clients"] = "clients"
    built_by: ClassVar[str] = "actors.environments.clients:ClientsEnvironment.from_config"
    takes_leases_on_demand: ClassVar[bool] = True
    claim_timeout_s: float = Field(300.0, gt=0)
    """Longest time that a rollout waits for a client. A group of which none was taken goes back to the run;
    in any other group the rollout fails by `timeout`."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """Longest time between two requests of a session; then its client counts as gone, and its episode fails
    by `timeout`."""
    episode_timeout_s: float = Field(7200.0, gt=0)
    """Longest time that an episode may take; then it fails by `timeout`."""
    drain_timeout_s: float | None = Field(None, gt=0)
    """Time that running episodes get when the process is told to stop; then their groups go back to the
    run. `None` is `actors.interruption.finish_within_s`."""

    @model_validator(mode="after")
    def _rewards_are_given(self) -> Self:
        refuse_unusable_rewards(self, "client")
        return self
