"""Transformers in this process: a decode loop in a thread of its own behind the Engine protocol."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from actors.engines.base import Generation, GenerationRequest, InterruptedGenerationError, KvTokens
from actors.engines.embedded.decoder import BatchedDecoder, Finished
from actors.engines.embedded.prepared_weights import prepare_weights
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import ConfigError, EngineError, RequestRefusedError
from bus.images import PlacedImage
from bus.process.host_limits import cpu_threads
from bus.process.work_progress import long_work
from storage.exact_arithmetic.attention import attend
from storage.exact_arithmetic.functions import exactly
from storage.images.reader import ImageReader
from storage.model_files.finite_weights import refuse_not_finite
from storage.model_files.model_reading import AGAIN, read_config, refusing
from storage.model_files.text_model import OWN_NAMES, text_alone
from storage.model_files.weight_files import weight_files

EXACT = "sluice_exact"
"""Name of this attention in transformers."""


def exact_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend from [n, heads, length, d] to [n, length, heads, d]: causally, or from one token a row to what a
    mask [n, 1, 1, keys] leaves at 0. Raises `ConfigError` for what would be ignored."""
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} has sinks or capped scores, which model.numerics=exact does not have: "
            "set model.numerics=fast"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = None if attention_mask is None else attention_mask[:, 0, 0] == 0
    with exactly():
        return attend(query, key, value, scale=scale, seen=seen).transpose(1, 2), None


AttentionInterface.register(EXACT, exact_attention)


log = structlog.get_logger()
Command = Callable[[], None]
T = TypeVar("T")
_BUILDING = threading.Lock()
"""Transformers patches torch, and sets its default type, for the whole process while it builds a model."""


class EmbeddedEngine:
    """Serves one model; commands run in the engine thread between two decode steps. Results cross back to the
    event loop once per decode step. A failure in the thread reaches every waiter and every later call as
    EngineError; generations under way keep their tokens so far."""

    def __init__(
        self, model: PreTrainedModel, config: EmbeddedEngineConfig, *, policy_version: int = -1,
        exact: bool = False, images: ImageReader | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._decoder = BatchedDecoder(
            model.eval(), slots=config.slots, prefill_tokens=config.prefill_tokens, seed=config.seed,
            routed_experts=config.routed_experts, exact=exact, images=images,
        )  # fmt: skip
        self._decoder.policy_version = policy_version
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: list[GenerationRequest] = []
        self._generations: dict[str, tuple[GenerationRequest, asyncio.Future[Generation]]] = {}
        self._orders: set[Future[Any]] = set()
        """Swaps, scores and health checks that the thread has not come to yet."""
        self._failure: str | None = "the engine was not started"
        self._released = False
        """Read and written by the thread."""

    @classmethod
    def from_directory(
        cls, model_dir: Path, config: EmbeddedEngineConfig, *, policy_version: int = -1, exact: bool = False
    ) -> Self:
        """Build from `config.json`; weights come from safetensors files there, or from `load_weights`.

        Args:
            model_dir: a Hugging Face model directory.
            config: the engine's settings.
            policy_version: what the weights in the directory are; -1 waits for `load_weights`.
            exact: whether the model computes in exact arithmetic (model.numerics)."""
        try:
            has_weights = bool(weight_files(model_dir))
        except ConfigError:
            if policy_version >= 0:
                raise
            has_weights = False  # weights come by `load_weights`
        images = ImageReader.of(model_dir)
        kind = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
        options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
        attention = EXACT if exact else config.attention
        if attention != "sdpa":  # transformers takes sdpa by itself wherever a model has it
            options["attn_implementation"] = attention
        with _BUILDING, long_work("loading the model of the engine"):
            whole = read_config(model_dir)
            hf_config = text_alone(whole)
            if has_weights:
                names = {} if hf_config is whole else {"key_mapping": OWN_NAMES}
                with refusing(f"cannot load the model in {model_dir}", AGAIN):
                    model, found = kind.from_pretrained(
                        model_dir, config=hf_config, trust_remote_code=False, output_loading_info=True,
                        ignore_mismatched_sizes=True, **names, **options,
                    )  # fmt: skip
                _refuse_drawn_weights(model_dir, found)
                if getattr(whole, "quantization_config", None) is None:
                    _refuse_integers(model_dir, found["unexpected_keys"])
                refuse_not_finite(model.named_parameters(), model_dir)
            else:
                with refusing(f"cannot build the model of {model_dir}", AGAIN), no_init_weights():
                    model = kind.from_config(hf_config, **options)
                model.tie_weights()  # skipped along with the initialisation
        return cls(model, config, policy_version=policy_version, exact=exact, images=images)

    @property
    def policy_version(self) -> int:
        return self._decoder.policy_version

    @property
    def running(self) -> int:
        return self._decoder.running

    @property
    def waiting(self) -> int:
        return max(0, len(self._generations) - self._decoder.running)

    @property
    def longest_context(self) -> int:
        return self._decoder.context_length

    @property
    def kv_tokens(self) -> KvTokens | None:
        """Return how full the cache is, by the capacity that the settings name; None if they name none."""
        if self._config.kv_tokens is None:
            return None
        prompts = sum(len(request.token_ids) for request, _ in self._generations.values())
        return KvTokens(prompts + self._decoder.sampled_held, self._config.kv_tokens, shares_prefixes=False)

    @property
    def tokens_generated(self) -> int:
        return self._decoder.tokens_generated

    async def start(self) -> None:
        """Start the engine thread; all further calls belong to this event loop."""
        self._loop = asyncio.get_running_loop()
        self._failure = None
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue `request`; waits for the first weights. Cancelling the caller aborts the request."""
        loop = self._running_loop()
        self._decoder.check(request)
        if request.request_id in self._generations:
            raise RequestRefusedError(
                f"request {request.request_id} is already in flight: ids must be unique"
            )
        future: asyncio.Future[Generation] = loop.create_future()
        self._generations[request.request_id] = request, future
        if not self._unsent:
            loop.call_soon(self._send)  # together with what else this turn of the loop submits
        self._unsent.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise
        finally:
            self._generations.pop(request.request_id, None)

    async def load_weights(self, state: Mapping[str, Tensor], policy_version: int) -> float:
        """Swap weights between two decode steps; return the seconds decoding stood still.

        Tensors of another dtype or device are converted beforehand, beside the decoding; the others are used
        where they are, so nobody may write to them. After the first, complete load, `state` may hold only
        the tensors that changed."""
        self._running_loop()
        first = self.policy_version < 0
        prepared = await asyncio.to_thread(prepare_weights, self._decoder.model, state, complete=first)
        return await self._between_steps(partial(self._swap, prepared, policy_version))

    async def release(self) -> None:
        """Decode nothing until `resume`, and free the cache; raises EngineError while requests are decoded.
        The weights lie in the process's memory and stay there."""
        await self._between_steps(self._release)

    async def resume(self) -> None:
        await self._between_steps(partial(setattr, self, "_released", False))

    async def check_health(self) -> None:
        """Return when the thread has ended its decode step. Raises EngineError when it has ended itself."""
        await self._between_steps(lambda: None)

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]] = ()
    ) -> list[list[float]]:
        """Return for each sequence the nats of all its tokens but the first and those of `images`, between
        two decode steps. Raises EngineError for tokens that the vocabulary does not have, and for images that
        the model cannot be shown."""
        largest = max(map(max, sequences))
        if largest >= self._decoder.vocab_size:
            raise EngineError(
                f"token {largest} is not in the model's vocabulary of {self._decoder.vocab_size}"
            )
        if any(images) and not self._decoder.sees:
            raise EngineError("images are to be scored, and the model reads nothing but text")
        return await self._between_steps(partial(self._decoder.score, sequences, images))

    async def abort(self, request_id: str) -> None:
        """End one request now: its `generate` returns the tokens so far. Unknown ids are ignored."""
        self._send()
        self._commands.put(partial(self._abort, request_id))

    async def close(self) -> None:
        """End the thread after the decode step under way; raises EngineError if it does not end in time."""
        if not self._thread.is_alive():
            return
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, self._config.close_timeout_s)
        self._fail("it was closed")
        if self._thread.is_alive():
            raise EngineError(f"the embedded engine did not stop within {self._config.close_timeout_s} s")

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """Return what `work` does in the thread, between two decode steps. Raises its `EngineError`."""
        self._running_loop()
        done: Future[T] = Future()

        def obey() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except EngineError as error:
                    done.set_exception(error)

        self._orders.add(done)
        self._commands.put(obey)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._orders.discard(done)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._failure is not None or self._loop is None:
            raise EngineError(f"the embedded engine does not run: {self._failure}")
        return self._loop

    def _send(self) -> None:
        if self._unsent:
            self._commands.put(partial(self._decoder.submit, self._unsent))
            self._unsent = []

    def _deliver(self, finished: Finished) -> None:
        for request, generation in finished:
            expected, future = self._generations.get(request.request_id, (None, None))
            if future and expected is request and not future.done():  # else the caller was cancelled
                future.set_result(generation)

    def _fail(self, reason: str, interrupted: Sequence[tuple[GenerationRequest, Generation]] = ()) -> None:
        """Tell every waiter that the thread ended, and those in `interrupted` what they had by then."""
        self._failure = self._failure or reason
        message = f"the embedded engine stopped: {self._failure}"
        for request, generation in interrupted:
            expected, future = self._generations.get(request.request_id, (None, None))
            if future and expected is request and not future.done():
                future.set_exception(InterruptedGenerationError(message, generation))
        waiters: list[asyncio.Future[Any] | Future[Any]]
        waiters = [*(future for _, future in self._generations.values()), *self._orders]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(EngineError(message))

    # From here on everything runs in the engine thread.

    def _run(self) -> None:
        model_bytes = sum(weight.nbytes for weight in self._decoder.model.parameters())
        torch.set_num_threads(cpu_threads(self._config.threads, model_bytes))
        try:
            while self._run_commands():
                if finished := self._decoder.step():
                    self._to_loop(partial(self._deliver, finished))
            reason = "it was closed"
        # Whatever ends this thread must reach those who wait for its answers, or they would wait for ever:
        # `_fail` raises `EngineError` at each of them.
        except Exception as error:
            log.error("engine_failed", exc_info=error)
            reason = repr(error)
        self._to_loop(partial(self._fail, reason, self._decoder.interrupted()))

    def _run_commands(self) -> bool:
        """Run queued commands, sleeping while there is nothing to decode; False asks to stop."""
        while True:
            try:
                command = self._commands.get(block=self._released or not self._decoder.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _abort(self, request_id: str) -> None:
        if aborted := self._decoder.abort(request_id):
            self._to_loop(partial(self._deliver, aborted))

    def _release(self) -> None:
        self._decoder.free_cache()
        self._released = True

    def _swap(self, prepared: dict[str, Tensor], policy_version: int) -> float:
        start = time.perf_counter()
        self._decoder.swap_weights(prepared, policy_version)
        return time.perf_counter() - start

    def _to_loop(self, callback: Command) -> None:
        assert self._loop is not None, "start() sets the loop before the thread runs"
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._commands.put(None)  # nobody is left to hear: the loop ended without close()


def _refuse_integers(model_dir: Path, unused: Collection[str]) -> None:
    """Raise `ConfigError` for integers among the weights, but for `unused` ones: transformers takes codes of
    quantised weights, of which config.json says nothing, for the weights."""
    for file in map(model_dir.joinpath, weight_files(model_dir)):
        with safe_open(file, "pt") as opened:
            for name in {*opened.keys()}.difference(unused):
                if not (dtype := opened.get_slice(name).get_dtype()).startswith(("F", "BF")):
                    raise ConfigError(
                        f"{file}: {name} is {dtype}, and weights are floating-point numbers: take the model "
                        "that is not quantised, or try `launch convert dequantise`"
                    )


def _refuse_drawn_weights(model_dir: Path, found: Mapping[str, Collection[object]]) -> None:
    """Raise `ConfigError` for weights that the files lack or have in another shape: transformers draws those
    at random. `found` is what it tells of loading."""
    if lacking := sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]])):
        raise ConfigError(
            f"{model_dir}: its files lack {len(lacking)} weights of its config.json, or have them in another "
            f"shape, such as {lacking[0]}: {AGAIN}"
        )
