"""Protocol of inference engines, in process or over HTTP."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from actors.settings.actors import SamplingConfig
from bus.errors import EngineError
from bus.images import PlacedImage
from bus.kept_sets import KeptSets
from bus.trajectory import FinishReason

if TYPE_CHECKING:
    import torch

    from actors.engines.announced_version import Published


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings by which one request's tokens are sampled."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token (evaluation) and reports log-probs at 1."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps the whole vocabulary."""
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation; the one sampled is its last token."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation with the token that completes one. Engines know tokens only: the policy
    looks for them (`Policy.chat`, `Policy.generate`)."""
    seed: int | None = None
    """Seed of the tokens at a deterministic engine; other engines ignore it."""
    min_p: float = 0.0
    """Least probability of a token to keep, as a fraction of the likeliest one's; 0 keeps all."""
    keep_masks: bool = False
    """Record what was kept where tokens are cut off, at most `MOST_KEPT` of them, and report log-probs of
    that set; an engine that cannot do so is never asked to."""

    @property
    def records_kept(self) -> bool:
        """Tell whether what is kept is cut off from other tokens and to be recorded."""
        cuts_off = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return self.keep_masks and cuts_off and self.temperature > 0

    @classmethod
    def from_config(cls, config: SamplingConfig, stop_token_ids: Iterable[int]) -> Self:
        """Sample as configured; `replace(sampling, temperature=0)` is its greedy twin."""
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            keep_masks=config.keep_masks,
            max_new_tokens=config.max_new_tokens,
            stop_token_ids=tuple(stop_token_ids),
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue."""

    request_id: str
    """Name, unique among the requests in progress."""
    token_ids: Sequence[int]
    sampling: Sampling
    experts_from: int | None = None
    """First token whose routed experts are wanted, among `token_ids`; None for no experts."""
    images: tuple[PlacedImage, ...] = ()
    """Images among `token_ids`, in order, with their bytes."""
    lease_version: int = 0
    """Version that was the newest when the lease was issued which this is for. Engines begin with the lowest:
    such a request has the least slack before the learner trains on nothing so old."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The N tokens sampled for a request, with log-prob and version of each."""

    token_ids: np.ndarray
    """int32 [N]"""
    logprobs: np.ndarray
    """float32 [N], nats, of the whole temperature-scaled distribution, log_softmax(logits / T); of the tokens
    in its kept set alone where a token has one."""
    policy_versions: np.ndarray
    """int32 [N], version of the weights that sampled each token."""
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [R, layers, experts per token]: where the tokens from `experts_from` to the last but
    one went, each in the pass that computed its keys and values; no pass has read the last one. None when the
    engine cannot tell: who goes on with these tokens asks from the same one on."""
    kept: KeptSets | None = None
    """Kept sets of the N tokens; None where nothing was cut off, or they were not asked for."""
    kv_versions: np.ndarray | None = None
    """int32 [N], the oldest version whose weights may have computed keys or values behind each token; None
    where each token's own version computed all of them (`bus/older_kv.py`)."""

    def over_kv_of(self, version: int) -> "Generation":
        """Return the generation of an engine that kept keys and values which `version` began to compute."""
        if (self.policy_versions == version).all():
            return self
        return replace(self, kv_versions=np.full(len(self.token_ids), version, np.int32))


NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
"""A generation that was interrupted before its first token."""


class InterruptedGenerationError(EngineError):
    """The engine failed during a request; `partial` has the tokens it had sampled, as far as known. It is
    defined here and not in bus/errors.py, since it carries a Generation."""

    def __init__(self, reason: str, partial: Generation = NOTHING) -> None:
        super().__init__(reason)
        self.partial = partial


class Engine(Protocol):
    """A model that continues token sequences and takes new weights meanwhile."""

    @property
    def policy_version(self) -> int:
        """Return the version of the weights in use, -1 before the first."""

    @property
    def running(self) -> int:
        """Return the number of requests being decoded."""

    @property
    def waiting(self) -> int:
        """Return the number of requests accepted but not yet decoded."""

    @property
    def tokens_generated(self) -> int:
        """Return the number of tokens sampled since the start."""

    async def start(self) -> None:
        """Prepare the engine. It is called once, in the event loop that makes all further calls."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue `request`; waits for the first weights. Cancelling the caller aborts the request.

        Raises RequestRefusedError when this engine can never serve the request, EngineError when the engine
        failed, and InterruptedGenerationError where the tokens so far are known then. However it ends, the
        engine works on the request no more."""

    async def load_weights(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> float:
        """Pause, take the tensors (HF names; the first time all of them), go on with what is in flight.

        Nobody writes to the tensors afterwards: engines that come later may still take them, and the next
        ones are compared with them.
        New requests carry `policy_version`, and so do tokens drawn afterwards of those in flight, unless
        their later ones keep the version that they began with. Returns the seconds generation stood still.
        Raises WeightsKeptError for a version that it cannot have, and goes on with the one before."""

    async def abort(self, request_id: str) -> None:
        """End one request now: its `generate` returns the tokens so far. Unknown ids are ignored."""

    async def close(self) -> None:
        """Stop and free everything; requests in progress raise EngineError."""


class ChatReply(NamedTuple):
    """An answer to a chat, from a model of which only texts are known."""

    content: str
    reasoning: str | None
    tool_calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments of each, as JSON text."""
    finish_reason: FinishReason


@runtime_checkable
class AnswersChats(Protocol):
    """An engine that takes messages instead of tokens, for what needs texts alone."""

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
        sampling: Sampling,
    ) -> ChatReply:  # fmt: skip
        """Return the answer to a chat. Raises EngineError."""


class KvTokens(NamedTuple):
    """How full the cache of keys and values is."""

    used: int
    """Tokens of the engine's requests, the prompts of waiting ones included."""
    capacity: int
    shares_prefixes: bool
    """Whether requests that begin alike hold their beginning once."""
    reading: int = 0
    """Number of the reading, of an engine that is read now and then: requests since then are not in it."""


@runtime_checkable
class TellsKvTokens(Protocol):
    """An engine that knows how full its cache is."""

    @property
    def kv_tokens(self) -> KvTokens | None:
        """Return how full the cache is; None while that is not known."""


class WorkCounts(NamedTuple):
    """Tokens of the requests that an engine has answered since its start, as far as it says of them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the engine had already."""
    drafted_tokens: int = 0
    """Tokens of answers that were sampled with drafts (speculative decoding)."""
    draft_passes: int = 0
    """Passes of the model that verified the drafts of these answers."""

    def plus(self, other: "WorkCounts") -> "WorkCounts":
        """Return the sums of both."""
        return WorkCounts(*map(sum, zip(self, other, strict=True)))

    def since(self, before: "WorkCounts") -> "WorkCounts":
        """Return what came after `before`."""
        return WorkCounts(*(now - then for now, then in zip(self, before, strict=True)))


@runtime_checkable
class CountsWork(Protocol):
    """An engine that knows what it found in its cache, and what became of drafts."""

    @property
    def work_counts(self) -> WorkCounts:
        """Return the sums since its start."""


@runtime_checkable
class TellsStart(Protocol):
    """An engine that takes long to start, and knows what it does meanwhile."""

    @property
    def starting(self) -> str:
        """Return that in words; empty once it has started."""


@runtime_checkable
class TellsContext(Protocol):
    """An engine that knows how long its contexts may be."""

    @property
    def longest_context(self) -> int | None:
        """Return the most tokens of a prompt and its answer together; None while that is not known."""


@runtime_checkable
class TakesPublished(Protocol):
    """An engine to which the learner itself can send the weights that it announced."""

    async def load_published(self, published: "Published") -> float:
        """Load what was announced: have the learner send it, or else have it fetched.

        Returns as `load_weights` does.

        A later version of the same learner is as good. Raises WeightsKeptError when there was no way."""


@runtime_checkable
class HealthChecked(Protocol):
    """An engine that can report its health independently of its generations."""

    async def check_health(self) -> None:
        """Return when the engine works; the caller bounds the wait. Raises EngineError when it does not."""


@runtime_checkable
class Scores(Protocol):
    """An engine that can tell the log-probs of tokens that it is given."""

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]] = ()
    ) -> list[list[float]]:
        """Return for each sequence the nats of all its tokens but the first, at temperature 1.

        `images` are those among the tokens of each sequence, or of none; the tokens that stand for them have
        no nats.

        The weights may change meanwhile: compare `policy_version` before and after. Raises EngineError."""


@runtime_checkable
class SharesServer(Protocol):
    """An engine whose server may have requests for others too, which may be what it fails of."""

    @property
    def requests_of_others(self) -> int:
        """Return the number of such requests, as it was when the server failed."""


@runtime_checkable
class SharesDevice(Protocol):
    """An engine that can leave its device to others for a while."""

    async def release(self) -> None:
        """Free what the engine holds of the device, weights too; nothing may be in flight, and what comes
        waits. Weights may be loaded meanwhile."""

    async def resume(self) -> None:
        """Take the device back, with the weights loaded last, and go on."""
