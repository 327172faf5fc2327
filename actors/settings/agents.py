"""Settings of the environment that runs somebody's program. Loads without torch."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from actors.settings.environment import EnvironmentSettings
from actors.settings.episode_sandboxes import EpisodeSandboxes, NamespaceSandboxes, ProgramSandboxes
from actors.settings.gateway import GatewayConfig
from actors.settings.rewards import Finite, RewardConfig
from bus.config import Config

OWN_PYTHON = "{python}"
"""The word of a command that stands for the Python that runs Sluice."""


class IsolationConfig(Config):
    """What a program may reach and use. Namespaces of Linux hold it where the host lets users make them;
    where it does not, the actor's log says what is not held."""

    required: bool = False
    """Whether the actor refuses to start where the host allows no namespaces."""
    network: Literal["gateway", "host"] = "gateway"
    """What a program reaches over the network: the gateway alone, or all that the host reaches. The second
    includes a bus on this host, which without credentials believes everybody."""
    user: str | None = None
    """User that programs run as, by name or number, where the actor runs as root; `None` is the actor's own
    user. The user must be able to read the program and its interpreter."""
    readable: tuple[Path, ...] = ()
    """Files and directories that a program may read although they lie below /tmp, or in a directory that is
    hidden. It sees a /tmp of its own otherwise."""
    writable: tuple[Path, ...] = ()
    """Files and directories that a program may write besides its own directory and /tmp."""
    hidden: tuple[Path, ...] = ()
    """Files and directories that a program does not see, besides runs, prompts, caches of data sets and the
    credentials that this actor knows of."""
    cpu_s: int = Field(3600, ge=1)
    """Processor time of each process of a program."""
    memory_mb: int = Field(8192, ge=64)
    """Memory of all processes of a program together, in MiB. It is also the most that one of them may ask for
    as data."""
    processes: int = Field(4096, ge=4)
    """Processes and threads of a program at a time."""
    file_mb: int = Field(4096, ge=1)
    """Largest file that a program may write, in MiB, and the size of its /tmp, which is kept in memory."""


def with_own_python(words: Sequence[str]) -> list[str]:
    return [sys.executable if word == OWN_PYTHON else word for word in words]


LOOPBACK = ("127.0.0.1", "::1", "localhost")
POSTED = "posted"
"""Name of the reward that a program posts."""
PROGRAMS_AT_ONCE = 32
"""Programs of one task each that run at the same time, if the settings say nothing."""


def refuse_unusable_rewards(config: RewardConfig, poster: str) -> None:
    """Raise ValueError for rewards of sessions that are never given: of reasoning, which is no part of an
    answer, or beside those that each `poster` posts."""
    config.refuse_reasoning_rewards()
    if config.reward == POSTED and (config.rewards or config.group_reward):
        raise ValueError(
            f"reward=posted takes what each {poster} posts: leave out rewards and group_reward, or name "
            "another reward"
        )


class AgentTaskConfig(EnvironmentSettings, RewardConfig):
    """Environments whose agents ask the policy by HTTP, and may show it what they read in their tasks."""

    finishes_after_stop: ClassVar[bool] = True
    shown_metadata: tuple[str, ...] = ()
    """Fields of a prompt's metadata that an agent which is not paid by itself finds in its task. It finds no
    other one: rewards and verifiers of your own may know the answer by any field."""
    failed_reward: Finite | None = None
    """Reward of an episode whose program or client fails or runs out of time after it has asked the policy.
    `None`: `unfinished_reward` where a program of one task failed and others ended well; else the episode is
    not trained."""
    gateway: GatewayConfig = GatewayConfig()
    """HTTP server by which the policy is asked."""

    @property
    def agents_gateway(self) -> GatewayConfig:
        """Return the settings of the server by which its agents ask the policy."""
        return self.gateway

    @property
    def opponents_named(self) -> tuple[str, ...]:
        """Return the policies that may answer its agents' requests, beside the run's own."""
        return self.gateway.policies_named


class AgentConfig(AgentTaskConfig):
    """Environment in which a program asks the policy as it would ask a provider's servers: one for
    each episode, or a long-lived one that takes many tasks.

    The reward is computed from the policy's last answer, or it is named `posted`: then a verifier posts it,
    or the program itself where that owns its reward, at most `reward_timeout_s` after it has ended. A
    long-lived program ends an episode by it."""

    type: Literal["agent"] = "agent"
    built_by: ClassVar[str] = "actors.environments.long_lived_agent:agent_environment"
    command: str
    """Command of the program, such as `python my_agent.py`. No shell reads it; a word `{python}` stands for
    the Python that runs Sluice."""
    verifier: str | None = None
    """Command of the program that posts the reward of an episode, once nothing of the agent's program is
    left. It reads one JSON object on its standard input: the task with its label, the last `answer`, the
    `directory` that the agent worked in, and the `reward_url`."""
    program_owns_reward: bool = False
    """Whether the agent's program posts its reward itself. It then reads one JSON object with the `label` and
    the `reward_url` on its standard input, which what it starts cannot read again. Leave it off where the
    policy runs code in that program's own process."""
    isolation: IsolationConfig = IsolationConfig()
    """What a program may reach and use."""
    sandbox: ProgramSandboxes | None = None
    """Sandboxes, such as containers, in which programs run in place of this host's namespaces. Files that the
    command names are copied there. `None` runs them on the host, as `isolation` says."""
    long_lived: bool = False
    """Whether a program takes tasks from SLUICE_TASKS_URL, many at once and one after the other, until it is
    ended. Without it a program is started for each task."""
    packages: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...] = ()
    """Packages that the program imports from the Python that runs Sluice: without them nothing starts."""
    program_timeout_s: float = Field(600.0, gt=0)
    """Longest time that an episode may take; then it fails, and its program is ended. A long-lived program
    goes on, unless it took no task for so long although it had none."""
    programs_at_once: int | None = Field(None, ge=1)
    """Most programs that run at the same time; further episodes wait. `None` means 32, or one that is
    long-lived."""
    heldout_programs_at_once: int | None = Field(None, ge=1)
    """Most programs of held-out tasks that run beside those, so that neither waits for the other. `None`
    means a quarter as many. A long-lived program gets held-out tasks as every fifth of its tasks, while it
    has others."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, besides those that it inherits of the actor and those by which
    it finds the policy. They are kept in the run's record."""
    inherited_variables: tuple[str, ...] = ()
    """Names of further environment variables of the actor that the program inherits, besides those of paths,
    languages and Python, such as the key of another service. What the policy controls can read them."""
    most_output_bytes: int = Field(16 << 20, ge=1024)
    """Output of a program after which it is ended, and its episode fails; the log shows the end of it. It
    does not bound that of a long-lived one."""

    @property
    def arguments(self) -> list[str]:
        return with_own_python(shlex.split(self.command))

    @property
    def verifier_arguments(self) -> list[str]:
        return with_own_python(shlex.split(self.verifier or ""))

    @property
    def sandboxes(self) -> EpisodeSandboxes | None:
        return self.sandbox

    @property
    def checks_sandbox(self) -> bool:
        """Tell whether something judges what the program leaves in a sandbox."""
        return self.sandbox is not None and self.sandbox.check is not None

    @property
    def has_image(self) -> bool:
        return self.sandbox is not None and not isinstance(self.sandbox.backend, NamespaceSandboxes)

    @property
    def programs(self) -> int:
        return self.programs_at_once or (1 if self.long_lived else PROGRAMS_AT_ONCE)

    @property
    def heldout_programs(self) -> int:
        """Return how many programs of held-out tasks may run beside those of others."""
        return self.heldout_programs_at_once or max(1, self.programs // 4)

    @field_validator("command", "verifier")
    @classmethod
    def _has_words(cls, command: str | None) -> str | None:
        if command is None:
            return None
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"no command that can be split into words: {error}") from error
        if not words:
            raise ValueError("an empty command: name the program, such as 'python my_agent.py'")
        return command

    @model_validator(mode="after")
    def _sandboxes_can_be_used(self) -> Self:
        if self.sandbox is not None and (self.long_lived or self.program_owns_reward):
            raise ValueError(
                "a program in a sandbox is one of an episode that does not pay itself: leave out long_lived "
                "and program_owns_reward, and name a reward or a verifier"
            )
        if (
            self.sandbox is not None and not self.sandbox.backend.uses_host
            and self.gateway.advertise is None and self.gateway.host in LOOPBACK
        ):  # fmt: skip
            raise ValueError(
                f"a sandbox of {self.sandbox.backend.type} does not reach this host's gateway.host="
                f"{self.gateway.host}: set gateway.host, as 0.0.0.0, and gateway.advertise, as http://HOST:PORT"
            )
        if self.has_image and OWN_PYTHON in shlex.split(self.command):
            raise ValueError(f"an image has no {OWN_PYTHON}: name a program of its own, such as python3")
        return self

    @model_validator(mode="after")
    def _rewards_are_given(self) -> Self:
        refuse_unusable_rewards(self, "program")
        if self.verifier is not None and (
            self.reward != POSTED or self.program_owns_reward or self.long_lived
        ):
            raise ValueError(
                "a verifier posts the rewards of programs of one task each: leave out long_lived and "
                "program_owns_reward, and set reward=posted"
            )
        return self
