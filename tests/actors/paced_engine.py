"""An engine on the loop's clock that takes its time, crashes, hangs and swaps when a test says so."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from actors.engines.base import NOTHING, Generation, GenerationRequest, InterruptedGenerationError
from bus.errors import EngineError, RequestRefusedError

VOCAB = 97
END = 0


def chain(tokens, count):
    """The only right continuation of `tokens`: each token follows from all before it, as greedy ones do."""
    state, found = 0, []
    for token in tokens:
        state = (31 * state + token + 7) % 1_000_003
    for _ in range(count):
        found.append(1 + state % (VOCAB - 1))
        state = (31 * state + found[-1] + 7) % 1_000_003
    return found


def experts_of(tokens):
    """uint8 [len(tokens) - 1, 1, 2]: where this engine routes each token that it has read."""
    rows = [[[token % 251, place % 251]] for place, token in enumerate(tokens[:-1])]
    return np.array(rows, np.uint8).reshape(-1, 1, 2)


@dataclass
class Run:
    """One request at the engine."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False

    def generation(self, reason, *, routed=True):
        logprobs = -np.array(self.tokens, np.float32) / 100
        return Generation(
            np.array(self.tokens, np.int32),
            logprobs,
            np.array(self.versions, np.int32),
            reason,
            self.experts() if routed else None,
        )

    def experts(self):
        """Experts of the tokens that were asked for and read; the last token has none."""
        if self.request.experts_from is None:
            return None
        assert self.request.experts_from <= len(self.request.token_ids)
        return experts_of([*self.request.token_ids, *self.tokens])[self.request.experts_from :]


class PacedEngine:
    """Draws a token in every request each `token_s`; its weights are one tensor, the version itself.

    `working` is what it draws for now; an abort and a cancellation take `abort_s`."""

    def __init__(
        self,
        name="engine",
        *,
        token_s=1.0,
        update_s=0.0,
        abort_s=0.0,
        context=1 << 20,
        keeps=True,
        version=-1,
    ):
        self.name = name
        self.policy_version = version
        self.weights = {}
        self.tokens_generated = 0
        self.waiting = 0
        self.working: dict[str, Run] = {}
        self.most_at_once = 0
        self.requests: list[GenerationRequest] = []
        self.loads: list[tuple[int, int]] = []
        """Version and number of tensors of each load."""
        self.updating = False
        self.closed = False
        self.before = lambda engine, request: None
        """Called with each request that begins here."""
        self._token_s = token_s
        self._update_s = update_s
        self._abort_s = abort_s
        self._context = context
        self._keeps = keeps
        self._failure = ""
        self._hung = False
        self._changed = asyncio.Event()

    @property
    def running(self):
        return len(self.working)

    def crash(self, reason="crashed"):
        """Die: what is under way raises, with its tokens if the engine `keeps` them."""
        self._failure = self._failure or reason
        self._wake()

    def hang(self):
        """Answer nothing any more, until closed."""
        self._hung = not self.closed

    async def start(self):
        await self._answering()

    async def generate(self, request):
        if request.request_id in self.working:
            raise RequestRefusedError(f"{request.request_id} is in flight")
        if len(request.token_ids) + request.sampling.max_new_tokens > self._context:
            raise RequestRefusedError(f"{request.request_id} exceeds the context of {self._context}")
        assert not any(
            a.startswith(request.request_id) or request.request_id.startswith(a) for a in self.working
        ), "an abort by prefix would hit both"
        self.before(self, request)
        self.requests.append(request)
        run = self.working[request.request_id] = Run(request)
        self.most_at_once = max(self.most_at_once, len(self.working))
        try:
            return await self._run(run)
        except asyncio.CancelledError:
            await asyncio.sleep(self._abort_s)
            while self._hung:
                await self._changed.wait()
            raise
        finally:
            del self.working[request.request_id]

    async def load_weights(self, state, policy_version):
        await self._answering()
        self.updating = True
        try:
            await asyncio.sleep(self._update_s)
            await self._answering()
        finally:
            self.updating = False
        self.weights.update(state)
        self.policy_version = policy_version
        self.loads.append((policy_version, len(state)))
        self._wake()
        return self._update_s

    async def abort(self, request_id):
        await asyncio.sleep(self._abort_s)
        await self._answering()
        if request_id in self.working:
            self.working[request_id].aborted = True
            self._wake()

    async def check_health(self):
        await self._answering()

    async def close(self):
        self.closed = True
        self._hung = False
        self.crash("closed")

    async def _run(self, run):
        wanted = run.request.sampling.max_new_tokens
        while len(run.tokens) < wanted:
            await self._pause(run)
            if run.aborted:
                return run.generation("abort")
            run.tokens += chain([*run.request.token_ids, *run.tokens], 1)
            run.versions.append(self.policy_version)
            self.tokens_generated += 1
        return run.generation("length")

    async def _pause(self, run):
        """Until the next token is due, the request was aborted, or the engine died."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._token_s
        while loop.time() < due_s or self._hung or self.policy_version < 0 or (run.aborted and self.updating):
            if self._failure:
                raise InterruptedGenerationError(
                    self._failure, run.generation("abort", routed=False) if self._keeps else NOTHING
                )
            if run.aborted and not self._hung and not self.updating:
                return
            changed = self._changed
            frozen = self._hung or self.policy_version < 0 or self.updating
            try:
                async with asyncio.timeout_at(None if frozen else due_s):
                    await changed.wait()
            except TimeoutError:
                continue
        if self._failure:
            raise InterruptedGenerationError(
                self._failure, run.generation("abort", routed=False) if self._keeps else NOTHING
            )

    async def _answering(self):
        """Return unless it hangs or is dead."""
        while self._hung and not self._failure:
            await self._changed.wait()
        if self._failure:
            raise EngineError(self._failure)

    def _wake(self):
        self._changed.set()
        self._changed = asyncio.Event()
