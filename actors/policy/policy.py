"""The policy as an environment sees it: chat or tokens in, completions out, everything recorded."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count

import numpy as np

from actors.engines.base import AnswersChats, Engine, Generation, GenerationRequest, Sampling
from actors.engines.continued_generation import joined, next_piece
from actors.episodes.agents import DEFAULT_AGENT, policy_of
from actors.episodes.episode import AgentTrajectory
from actors.episodes.errors import EpisodeError
from actors.episodes.task import ChatMessage
from actors.policy.answers import ParsedAnswer
from actors.policy.chat_format import ChatFormat, Context, Tokenizer
from actors.policy.context_tokens import ContextTokens
from actors.policy.messages import Completion, MessagesError, Tool, ToolCall
from actors.policy.other_engines import ALONE, OtherEngines
from actors.policy.rollout_turns import SampledTurn, TurnsByRollout, context_of, trained_turn
from actors.policy.stop_strings import first_end, generate_until
from actors.policy.strand import Call, Strand, forked_from
from actors.policy.version_masking import TRAIN_ALL, Masking
from bus.errors import ContextFullError, RequestRefusedError
from bus.images import PlacedImage
from bus.policy_names import DEFAULT_POLICY
from bus.trajectory import End
from storage.images.chat import ImageChat

Generate = Callable[[GenerationRequest], Awaitable[Generation]]


class Policy:
    """Access to an engine for the agents of one rollout, which it records; `fresh` gives the next one.

    A call whose messages repeat an earlier chat of the same agent, answer included, grows that trajectory:
    new tokens follow those that were sampled, whatever the chat template would leave out or write otherwise.
    Any other chat starts a new trajectory: of a second agent, of a rewritten history, or forked from an
    earlier one where it departs. Sampled tokens are never re-tokenised. Each call may have an `agent`, a
    `sampling` of its own (`dataclasses.replace(policy.sampling, temperature=0.5)`) and say that it is not
    `trainable`, as that of a frozen opponent or a judge. Greedy turns (temperature below 0.01) are recorded,
    but not trained: log-probs of a choice are not those of a distribution that was sampled. `masking` says
    which tokens of older versions are not trained on.
    `others` are the engines of other policies: a call for one that is frozen is not trained. With
    `routed_experts` the engine is asked where it sent the tokens, once for each token. `tool_calls` is how
    the model writes tool calls, "auto" what the chat template shows. `images` are those that the model reads,
    where it does: messages of users and tools may show some."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, sampling: Sampling, *,
        masking: Masking = TRAIN_ALL, routed_experts: bool = False, tool_calls: str = "auto",
        images: ImageChat | None = None, others: OtherEngines = ALONE,
    ) -> None:  # fmt: skip
        self.sampling = sampling
        self.contexts = ContextTokens()
        """Lengths of the contexts of all rollouts that share this."""
        self.turns = TurnsByRollout()
        """Turns of all rollouts that share this, as far as somebody records them."""
        self.begun: Policy | None = None
        """The newest policy that `fresh` gave."""
        self._masking = masking
        self._routed_experts = routed_experts
        self._engine = engine
        self._others = others
        self._format = ChatFormat(tokenizer, tool_calls, images)
        self._calls = count()
        self._rollout_id = "rollout"
        self._lease_version = 0
        self._completions = count()
        self._strands: list[Strand] = []
        self._turn_rewards: dict[int, float] = {}
        """Rewards of single turns, by the number of the completion."""
        self._untrained: set[int] = set()
        """Numbers of the completions that nobody saw."""

    @property
    def opponents(self) -> Set[str]:
        """Return the names of the other policies that may be asked, frozen ones and trained ones."""
        return self._others.names

    def refuse_unread_calls(self) -> None:
        """Raise `ConfigError` for a chat template whose tool calls no format reads."""
        self._format.calls.refuse_unread()

    def fresh(self, rollout_id: str, *, lease_version: int | None = None) -> "Policy":
        """Return a policy with nothing recorded, which shares the engine and the remembered prompts. Engines
        begin with requests of the lowest `lease_version`; without one it stays as it is."""
        policy = copy(self)
        if lease_version is not None:
            policy._lease_version = lease_version
        policy._rollout_id, policy._completions, policy._strands = rollout_id, count(), []
        policy._turn_rewards, policy._untrained = {}, set()
        policy.begun, self.begun = None, policy
        return policy

    async def chat(
        self, messages: Sequence[ChatMessage] | str, agent: str = DEFAULT_AGENT, *,
        tools: Sequence[Tool] | None = None, sampling: Sampling | None = None,
        trainable: bool = True, policy: str = DEFAULT_POLICY, prefix: str = "",
    ) -> Completion:  # fmt: skip
        """Answer a chat; a string is one user message. Raises EngineError, and MessagesError for no chat.

        `tools` are functions in the shape of OpenAI's; calls are looked for only where there are tools.
        `policy` is the name of the policy that answers: of one that is trained beside this one, or of an
        opponent. Raises EpisodeError for a name that none of them has. With a `prefix` the answer begins by
        this text, which is not trained; MessagesError where the template lets the model think first.
        """
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        call = self._call(agent, policy, sampling, trainable)
        engine = self._engine_of(call.policy)
        # isinstance of a Protocol takes a tenth of a turn's time
        if hasattr(engine, "chat") and isinstance(engine, AnswersChats):
            begun_by = [{"role": "assistant", "content": prefix}] if prefix else []
            return await self._answered_in_text(engine, [*messages, *begun_by], tools, call)
        known = [(s.number, s.conversation) for s in self._of(call) if s.conversation is not None]
        context = await self._format.context(messages, tools, known)
        if prefix and context.in_reasoning:
            raise MessagesError("the chat template has the model think first: its answer cannot be begun")
        begun, images = self._begun(context)
        given = await self._format.in_thread(self._format.encode, prefix) if prefix else []
        begun.frombytes(context.added.tobytes())
        begun.extend(given)
        strand, generation = await self._complete(begun, call, images)
        answer_end = len(strand.tokens)
        try:
            text, answer = await self._format.read(
                np.array([*given, *generation.token_ids], np.int32),
                in_reasoning=context.in_reasoning,
                tools=tools,
                number=call.number,
            )
        except asyncio.CancelledError:
            self.leave_untrained(call.number)
            raise
        completion = _completion(text, answer, generation, call, answer_end - len(generation.token_ids))
        answered = partial(
            context.conversation.answered,
            context.chat,
            completion.message,
            text,
            tokens=answer_end,
            closed_by=self._format.closed_by(generation.token_ids, call.sampling.stop_token_ids),
        )
        strand.go_on(context.conversation, answered)
        return completion

    def _begun(self, context: Context) -> tuple["array[int]", tuple[PlacedImage, ...]]:
        if context.strand is None:
            return array("i"), context.images
        strand, kept = self._strands[context.strand], context.kept
        before = (image for image in strand.images if image.start < kept)
        return strand.tokens[:kept], (*before, *(image.moved(kept) for image in context.images))

    async def _answered_in_text(
        self, engine: AnswersChats, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, call: Call
    ) -> Completion:
        """Ask a model that tells no tokens, and record its texts in those of the run's tokenizer: as a strand
        of their own, with log-probs of 0, which measures and is never trained on."""
        reply = await engine.chat(messages, tools, call.sampling)
        text = "".join(filter(None, [reply.reasoning, reply.content]))
        prompt, images = await self._format.in_thread(self._format.prompt, messages, tools)
        token_ids = np.array(await self._format.in_thread(self._format.encode, text), np.int32)
        unknown = np.zeros(len(token_ids), np.float32)
        generation = Generation(token_ids, unknown, unknown.astype(np.int32), reply.finish_reason)
        self._strands.append(strand := Strand(len(self._strands), call.agent, call.policy, None))
        strand.extend(array("i", prompt), generation, replace(call, trainable=False), images)
        calls = tuple(ToolCall(*parts) for parts in reply.tool_calls)
        answer = ParsedAnswer(reply.content, reply.reasoning, calls, ())
        return _completion(text, answer, generation, call, len(prompt))

    async def generate(
        self, token_ids: Sequence[int], agent: str = DEFAULT_AGENT, *,
        sampling: Sampling | None = None, trainable: bool = True, policy: str = DEFAULT_POLICY,
    ) -> Completion:  # fmt: skip
        """Continue tokens; images are those of the trajectory that they continue. Raises EngineError."""
        call = self._call(agent, policy, sampling, trainable)
        asked = array("i", token_ids)
        known = next((s for s in self._of(call) if asked[: len(s.tokens)] == s.tokens), None)
        return await self._read_plainly(asked, call, () if known is None else known.images)

    async def go_on(
        self, completion: Completion, text: str, *, sampling: Sampling | None = None, trainable: bool = True
    ) -> Completion:
        """Continue an answer within its own turn, after `text` that is not the policy's and is not trained.
        `completion` is the last one of its trajectory, or EpisodeError is raised. Raises EngineError."""
        ending = (s for s in self._strands if s.sampled[-1][1].number == completion.number)
        if (strand := next(ending, None)) is None:
            raise EpisodeError(f"completion {completion.number} is the last one of no trajectory")
        added = await self._format.in_thread(self._format.encode, text)
        call = self._call(strand.agent, strand.policy, sampling, trainable)
        return await self._read_plainly(strand.tokens + array("i", added), call, strand.images)

    async def count_tokens(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None) -> int:
        """Return the tokens of a chat up to where the policy would answer, recording nothing. Raises
        MessagesError for no chat."""
        return len(await self._format.in_thread(self._format.encode_chat, messages, tools))

    async def token_texts(self, token_ids: np.ndarray) -> list[str]:
        """Return the text of each token; one that is part of a character is U+FFFD."""

        def texts() -> list[str]:
            return [self._format.decode([token], skip_special_tokens=False) for token in token_ids.tolist()]

        return await self._format.in_thread(texts)

    def reward_turn(self, completion: Completion, reward: float) -> None:
        """Note the reward of this turn alone, beside that of the outcome."""
        self._turn_rewards[completion.number] = reward

    def leave_untrained(self, number: int) -> None:
        """Keep a completion out of the loss, by its number: whoever asked for it never saw it."""
        self._untrained.add(number)

    def trajectories(
        self, reward: float | Mapping[str, float], *,
        end: End | None = None, reward_components: Mapping[str, float] | None = None,
    ) -> tuple[AgentTrajectory, ...]:  # fmt: skip
        """Return all that was recorded, in order of first use.

        Args:
            reward: of the outcome, for all agents or by agent.
            end: why the episode has no more turns; by default each trajectory's last turn says it.
            reward_components: parts of the reward by name, for the record.
        """
        recorded = (
            strand.trajectory(
                reward[strand.agent] if isinstance(reward, Mapping) else reward,
                turn_rewards=self._turn_rewards,
                untrained=self._untrained,
                reward_components=reward_components or {},
                end=end,
            )
            for strand in self._strands
        )
        return tuple(map(self._masking.applied, recorded))

    def _call(self, agent: str, policy: str, sampling: Sampling | None, trainable: bool) -> Call:
        if policy == DEFAULT_POLICY:
            policy = policy_of(agent, self._others.agents)
        elif self._others.further and policy not in self.opponents:
            raise EpisodeError(
                f"agent {agent!r} is to be policy {policy!r}, and there are only "
                f"{', '.join(sorted(self.opponents))}: define it in policies or actors.opponents"
            )
        sampling = sampling or self.sampling
        # servers of opponents need not tell what they kept: nothing is trained
        if policy in self._others.opponents:
            trainable, sampling = False, replace(sampling, keep_masks=False)
        call = Call(next(self._completions), agent, policy, sampling, trainable)
        if call.is_trained and policy in self._others.unscaled and call.sampling.temperature != 1:
            raise EpisodeError(
                f"agent {agent!r} asks for temperature {call.sampling.temperature:g}, and the engines of "
                f"policy {policy!r} tell log-probs at temperature 1 only (model.numerics=sglang): have it "
                "ask for 1, or with trainable=False"
            )
        return call

    async def _read_plainly(
        self, token_ids: "array[int]", call: Call, images: tuple[PlacedImage, ...]
    ) -> Completion:
        """Continue tokens with text that is neither reasoning nor a call in the model's own way."""
        _, generation = await self._complete(token_ids, call, images)
        text = self._format.decode(generation.token_ids.tolist())
        return _completion(text, ParsedAnswer(text, None, (), ()), generation, call, len(token_ids))

    async def _complete(
        self, token_ids: "array[int]", call: Call, images: tuple[PlacedImage, ...]
    ) -> tuple[Strand, Generation]:
        """Sample what follows `token_ids`, and record both in the strand that they continue, or in a new one.
        Which one that is shows when the tokens are there: other calls may have grown it meanwhile."""
        request_id = f"{next(self._calls)}-{self._rollout_id}"  # none is another's prefix, as SGLang needs
        experts_from = self._experts_from(call, token_ids, images)
        request = GenerationRequest(
            request_id, token_ids, self._seeded(call), experts_from, images, self._lease_version
        )
        self.contexts.note(self._rollout_id, call.agent, len(token_ids), call.sampling.max_new_tokens)
        generation = await self._fitting(request, call)
        strand = self._continued(call, token_ids, images)
        if strand is None:
            fork = forked_from(token_ids, self._of(call), images)
            self._strands.append(strand := Strand(len(self._strands), call.agent, call.policy, fork))
        strand.extend(token_ids, generation, call, images)
        self.contexts.note(self._rollout_id, call.agent, len(strand.tokens))
        return strand, generation

    def _engine_of(self, policy: str) -> Engine:
        return self._others.opponents.get(policy) or self._others.further.get(policy) or self._engine

    async def _fitting(self, request: GenerationRequest, call: Call) -> Generation:
        """Return what is sampled for `request`, of as many tokens as its context has room for. Raises
        ContextFullError where there is none. Engines that start do not tell how much there is."""
        engine = self._engine_of(call.policy)
        fitted = _fitted(request, engine)
        try:
            return await self._sampled(fitted, call)
        except ContextFullError:
            raise
        except RequestRefusedError:
            again = _fitted(request, engine)
            if again.sampling == fitted.sampling:
                raise
            return await self._sampled(again, call)

    async def _sampled(self, request: GenerationRequest, call: Call) -> Generation:
        engine = self._engine_of(call.policy)
        turns = self.turns.of(self._rollout_id)
        if turns is None:
            return await self._generate(request, engine.generate)
        context = context_of(call, request)
        generation = turns.take(context, request)
        with turns.under_way():
            if generation is None or generation.finish_reason == "abort":
                generation = await self._generate(request, partial(turns.ask, engine), generation)
            turns.note(SampledTurn(call.number, context, generation, trained_turn(call)))
        await turns.wait_if_interrupted()
        return generation

    async def _generate(
        self, request: GenerationRequest, generate: Generate, begun: Generation | None = None
    ) -> Generation:
        """Continue `request`, after what was `begun` of it, until a token or a string ends it."""
        stops = request.sampling.stop
        if not stops and begun is None:
            return await generate(request)
        if not stops and begun is not None:
            left = request.sampling.max_new_tokens - len(begun.token_ids)
            return joined([begun, await generate(next_piece(request, begun, left))])

        async def end(token_ids: Sequence[int]) -> int | None:
            return await self._format.in_thread(first_end, token_ids, stops, self._format.decode)

        return await generate_until(generate, request, end, begun=begun)

    def _seeded(self, call: Call) -> Sampling:
        """Return the sampling of a call, whose seed is other than its siblings' and always the same."""
        name = f"{self._rollout_id}/{call.number}"
        digest = blake2b(name.encode(), digest_size=8).digest()
        return replace(call.sampling, seed=int.from_bytes(digest, "big") >> 1)

    def _experts_from(self, call: Call, token_ids: "array[int]", images: Sequence[PlacedImage]) -> int | None:
        """First of the tokens whose experts are not recorded yet; None when none are."""
        if not self._routed_experts or call.policy in self._others.opponents:
            return None
        strand = self._continued(call, token_ids, images)
        return 0 if strand is None else sum(map(len, strand.routed))

    def _continued(self, call: Call, token_ids: "array[int]", images: Sequence[PlacedImage]) -> Strand | None:
        return next((strand for strand in self._of(call) if strand.begins(token_ids, images)), None)

    def _of(self, call: Call) -> list[Strand]:
        whose = call.agent, call.policy
        return [strand for strand in reversed(self._strands) if (strand.agent, strand.policy) == whose]


def _fitted(request: GenerationRequest, engine: Engine) -> GenerationRequest:
    # isinstance of a Protocol takes long here, too
    longest: int | None = getattr(engine, "longest_context", None)
    if longest is None:
        return request
    room = longest - len(request.token_ids)
    if room < 1:
        raise ContextFullError(len(request.token_ids), longest)
    if request.sampling.max_new_tokens <= room:
        return request
    return replace(request, sampling=replace(request.sampling, max_new_tokens=room))


def _completion(
    text: str, answer: ParsedAnswer, generation: Generation, call: Call, prompt_tokens: int
) -> Completion:
    """Put an answer together; a stop string that ended it is in its text, but not in its content."""
    ends = (stop for stop in call.sampling.stop if stop and answer.content.endswith(stop))
    stop_text = max(ends, key=len, default="")
    return Completion(
        text,
        generation.token_ids,
        generation.finish_reason,
        call.number,
        content=answer.content.removesuffix(stop_text),
        reasoning=answer.reasoning,
        tool_calls=answer.tool_calls,
        malformed_calls=answer.malformed_calls,
        prompt_tokens=prompt_tokens,
        stop_text=stop_text or None,
        logprobs=generation.logprobs,
    )
