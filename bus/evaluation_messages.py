"""Messages by which held-out prompts are answered and measured; see also `messages.py`."""

from dataclasses import dataclass, field

from bus.codec import Message
from bus.decoded_size import MemoryLimit
from bus.errors import SchemaError
from bus.messages import BlobRef, PolicyManifest, Prompt
from bus.trajectory import TrajectoryBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTask(Message, tag="evaluation_task"):
    """Asks for held-out reward of one policy version on one data set."""

    policy: PolicyManifest
    prompts: BlobRef
    """A `PromptSet`."""
    data_set: str = ""
    """Name of the data set; empty for the run's held-out prompts."""
    samples: int = 1
    """Sampled answers to each prompt; one greedy answer is taken besides."""
    pass_at: tuple[int, ...] = ()
    """Numbers k of which pass@k and pass^k are wanted."""
    solved_at: float = 1.0
    """Reward from which an answer is right."""
    temperature: float | None = None
    """Sampling of the data set's own; None leaves it as the rollouts have it. So do those that follow."""
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    answered_by: str = ""
    """Opponent that answers instead of `policy`; its result stands beside that of each version."""
    kept_answers: int = 0
    """Most answers that storage keeps of it, for people: all of the first prompts, and of one at least."""

    @property
    def kept_prompts(self) -> int:
        """Return of how many prompts the answers are kept: each has one for each sample, and a greedy one."""
        return max(1, self.kept_answers // (self.samples + 1)) if self.kept_answers else 0

    def check(self) -> None:
        if self.samples < 1 or not all(1 <= k <= self.samples for k in self.pass_at):
            raise SchemaError(f"{self.samples} samples of a prompt cannot estimate pass@{list(self.pass_at)}")
        tokens, temperature = self.max_new_tokens, self.temperature
        if (tokens is not None and tokens < 1) or (temperature is not None and not temperature > 0):
            raise SchemaError(f"max_new_tokens={tokens}, temperature={temperature}: nothing can be sampled")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet(Message, tag="prompt_set", memory=MemoryLimit(expansion=32, most_bytes=1 << 36)):
    """Prompts that travel together: the held-out set, or the data of a run."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutAnswers(Message, tag="held_out_answers"):
    """All answers to one held-out prompt by one policy version, for people to see."""

    policy_version: int
    prompt: int
    """Place of the prompt in its data set, from 0."""
    batch: TrajectoryBatch
    """The answers: samples in their order, and the greedy one last."""
    data_set: str = ""
    label: str | None = None
    """Label of the prompt."""

    def check(self) -> None:
        if not self.batch.trajectories:
            raise SchemaError(f"there are no answers to held-out prompt {self.prompt}")
        if trainable := [
            t.trajectory_id for t in self.batch.trajectories if t.trainable or t.loss_mask.any()
        ]:
            raise SchemaError(f"{trainable[0]} answers a held-out prompt and must not be trainable")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult(Message, tag="evaluation_result"):
    """Mean reward on the held-out prompts, by the policy version asked for or by later ones (`drawn_by`)."""

    policy_version: int
    incarnation: str
    sampled: float
    """Mean reward of the samples at the sampling temperature."""
    greedy: float
    prompts: int
    seconds: float
    oldest_version: int
    """Oldest version that sampled a token of the answers."""
    newest_version: int
    """Newest version that sampled a token of the answers."""
    failed: int = 0
    """Number of failed rollouts, of all samples and the greedy answer of each prompt; no mean counts them."""
    data_set: str = ""
    """Name of the data set; empty for the run's held-out prompts."""
    samples: int = 1
    """Sampled answers to each prompt."""
    scores: dict[str, float] = field(default_factory=dict)
    """Further scores by name, such as pass@4: means over the prompts."""

    @property
    def drawn_by(self) -> tuple[int, int]:
        """Oldest and newest version that sampled a token of the answers."""
        return self.oldest_version, self.newest_version

    def check(self) -> None:
        """Raise `SchemaError` for versions out of order, for one older than was asked for, and for more
        failed rollouts than there were rollouts."""
        oldest, newest = self.drawn_by
        if not self.policy_version <= oldest <= newest:
            raise SchemaError(
                f"versions {oldest} to {newest} cannot have answered for version {self.policy_version}"
            )
        if not 0 <= self.failed <= (self.samples + 1) * self.prompts:
            raise SchemaError(f"{self.failed} rollouts cannot have failed with {self.prompts} prompts")
