"""Settings of the log-probs that are recorded for people to look at. Loads without torch."""

from pydantic import Field

from bus.config import Config


class RecordedLogprobsConfig(Config):
    """A few trajectories whose log-probs under the learner's weights are recorded in the run's directory.
    `launch dashboard` colours their tokens by importance ratio."""

    every_steps: int = Field(10, ge=0)
    """Steps from one record to the next, beginning with the first step; 0 records nothing."""

    trajectories: int = Field(4, ge=1)
    """Trajectories of a record. They take a pass without gradient before the step."""

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 1, has a record."""
        return self.every_steps > 0 and (step - 1) % self.every_steps == 0
