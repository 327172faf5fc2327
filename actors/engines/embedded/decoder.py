"""Continuous batching over a transformers model whose layers see all tokens or a window of them: admit,
decode one token each, repeat."""

import bisect
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from actors.engines.base import NOTHING, Generation, GenerationRequest
from actors.engines.embedded.kv_cache import FULL_ATTENTION, Rows, SlotCache
from actors.engines.embedded.sampling import sample
from actors.engines.expert_routing import Routing
from bus.errors import EngineError, RequestRefusedError
from bus.images import PlacedImage, shown_tokens
from bus.trajectory import FinishReason
from storage.exact_arithmetic.exact_model import ExactFunctions, make_exact
from storage.exact_arithmetic.softmax import log_softmax
from storage.images.positions import rope_positions
from storage.images.reader import ImageReader
from storage.model_files.families import families_with, family_named
from storage.model_files.finite_weights import not_finite
from storage.settings.exact_arithmetic import MOST_TOKENS

_LAYER = re.compile(r"layers\.(\d+)\.")


class ExpertRecorder:
    """Listens to the routers of one model. What a pass chose has to be taken before the next one."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise `ConfigError` for a model without experts, and `EngineError` for one whose routers are
        unknown."""
        self._routing = Routing.of_config(model.config.to_dict())
        self._chosen: dict[int, Tensor] = {}
        routers = [
            (int(place[1]), module)
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("topkrouter") and (place := _LAYER.search(name))
        ]
        if not routers:
            raise EngineError(
                f"actors.engine.routed_experts: no router of {type(model).__name__} tells what it chooses: "
                "leave the setting out, or serve the model by sglang"
            )
        for layer, router in routers:
            router.register_forward_hook(partial(self._note, layer))

    def _note(self, layer: int, router: torch.nn.Module, _inputs: Any, outputs: object) -> None:
        """Keep the experts, [tokens, experts per token], the last that a router of transformers returns."""
        chosen = outputs[-1] if isinstance(outputs, tuple) else None
        if chosen is None or chosen.is_floating_point() or chosen.shape[-1] != self._routing.per_token:
            raise EngineError(
                f"actors.engine.routed_experts: {type(router).__name__} of this version of transformers does "
                "not return what it chooses: install a newer one, or leave the setting out"
            )
        self._chosen[layer] = chosen

    def taken(self, rows: int) -> np.ndarray:
        """Return where the pass sent its tokens, [rows, tokens, layers, experts per token]; zeros in layers
        that have no experts."""
        routing, chosen = self._routing, self._chosen
        first = next(iter(chosen.values()))
        none = torch.zeros_like(first)
        layers = [chosen.get(layer, none) for layer in range(routing.layers)]
        self._chosen = {}
        found = torch.stack(layers, dim=1).cpu().numpy().astype(routing.dtype)
        return found.reshape(rows, -1, routing.layers, routing.per_token)


class VisionPrefill:
    """Fills a cache with prompts that show images, by the vision tower of a Qwen3-VL or Qwen2.5-VL. The
    places of patches come with the request, not from the ids of tokens: a policy may sample the token that
    stands for a patch, and means no image by it."""

    def __init__(self, model: PreTrainedModel, reader: ImageReader) -> None:
        self._model = model
        self._reader = reader

    def logits(
        self,
        tokens: Tensor,
        images: Sequence[Sequence[PlacedImage]],
        needed: Tensor,
        cache: Mapping[str, Cache],
    ) -> Tensor:
        """Return the logits behind the `needed` tokens of each row, [m, needed, V].

        Args:
            tokens: int64 [m, longest], padded on the right.
            images: those of each row.
            needed: int64, numbers of tokens.
            cache: what the forward pass fills, by the name that the model has for it.
        """
        embedded = self._model.get_input_embeddings()(tokens)
        places = torch.from_numpy(np.stack([shown_tokens(tokens.shape[1], shown) for shown in images]))
        places = places.to(tokens.device)
        features, *deepstack = self._features([image for shown in images for image in shown], tokens.device)
        embedded[places] = features.to(embedded.dtype)
        positions = np.stack([rope_positions(tokens.shape[1], shown) for shown in images], axis=1)
        hidden = self._model.get_decoder()(
            inputs_embeds=embedded,
            position_ids=torch.from_numpy(positions).to(tokens.device),
            use_cache=True,
            **({"visual_pos_masks": places, "deepstack_visual_embeds": deepstack} if deepstack else {}),
            **cache,
        ).last_hidden_state
        logits: Tensor = self._model.get_output_embeddings()(hidden[:, needed])
        return logits

    def _features(self, images: Sequence[PlacedImage], device: torch.device) -> list[Tensor]:
        """Return what stands at the tokens of the images, one after the other, and what is added to each of
        the first layers there; the tower sees each image once."""
        distinct = list({image.digest: image for image in images}.values())
        patches = np.concatenate([self._reader.patches(image) for image in distinct])
        grids = torch.tensor([self._reader.grid(image) for image in distinct])
        found = self._model.get_image_features(torch.from_numpy(patches).to(device), grids.to(device))
        number = {image.digest: n for n, image in enumerate(distinct)}
        return [
            torch.cat([of_images[number[image.digest]] for image in images])
            for of_images in (found.pooler_output, *getattr(found, "deepstack_features", ()))
        ]


Finished = list[tuple[GenerationRequest, Generation]]
Prompt = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]
"""Tokens, and the digests and places of the images among them."""
SLIDING = "sliding_attention"


class BatchedDecoder:
    """A running batch over one model. Single-threaded: whoever owns it calls `step` until `busy` is False."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, prefill_tokens: int, seed: int | None,
        routed_experts: bool = False, exact: bool = False, images: ImageReader | None = None,
    ) -> None:  # fmt: skip
        """With `routed_experts`, requests may ask to which experts their tokens go; with `images`, those of
        the model, they may show some.

        With `exact`, log-probs do not depend on the rest of the batch: they are the learner's to the bit. The
        model's attention has to be `EXACT` then. Raises `ConfigError` for models that cannot."""
        text = model.config.get_text_config()
        self._cache_argument = cache_argument(model)
        self._kinds = _layer_kinds(text, self._cache_argument)
        self._masks = DecodeMasks(text)
        if exact and self._masks.have_windows:
            raise EngineError(
                f"model.numerics=exact: this model, a {text.model_type}, has sliding windows, which exact "
                "arithmetic does not have: set model.numerics=fast"
            )
        self.context_length: int = text.max_position_embeddings
        if exact:
            self.context_length = min(self.context_length, MOST_TOKENS)
        self.vocab_size: int = text.vocab_size
        self.policy_version = -1
        self.tokens_generated = 0
        self.model = model
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._waiting: list[GenerationRequest] = []
        self._rows = Rows()
        self.free_cache()
        self._vision = None if images is None else VisionPrefill(model, images)
        self._experts = ExpertRecorder(model) if routed_experts else None
        self._generator = torch.Generator(model.device)
        self._exact: ExactFunctions | None = None
        if exact:
            self._exact = make_exact(model, self._pass_of_one_token, keeps_weights=True)
        self._generator.seed() if seed is None else self._generator.manual_seed(seed)

    @property
    def busy(self) -> bool:
        return self.policy_version >= 0 and bool(self._waiting or len(self._rows))

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def sees(self) -> bool:
        return self._vision is not None

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestRefusedError for a request that can never be served."""
        prompt, new = len(request.token_ids), request.sampling.max_new_tokens
        if prompt < 1 or new < 1:
            raise RequestRefusedError(
                f"{request.request_id}: {prompt} prompt tokens and {new} new ones: each must be >= 1"
            )
        if prompt + new > self.context_length:
            whose = "model's" if self._exact is None else "model's and model.numerics=exact's"
            raise RequestRefusedError(
                f"{request.request_id}: {prompt} prompt tokens + {new} new ones exceed the {whose} context "
                f"of {self.context_length}: shorten the prompt or lower max_new_tokens"
            )
        if request.images and self._vision is None:
            raise RequestRefusedError(f"{request.request_id}: it shows images, and the model reads none")
        low, high = min(request.token_ids), max(request.token_ids)
        if low < 0 or high >= self.vocab_size:
            raise RequestRefusedError(
                f"{request.request_id}: token ids {low} to {high} do not fit the model's vocabulary of "
                f"{self.vocab_size}: tokenizer and model differ"
            )

    @property
    def sampled_held(self) -> int:
        return self._rows.sampled

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue checked requests: those of the oldest leases first, and of one version as they come."""
        for request in requests:
            bisect.insort(self._waiting, request, key=lambda waiting: waiting.lease_version)

    @torch.inference_mode()
    def abort(self, request_id: str) -> Finished:
        """Drop a request and return it with its tokens so far; nothing if it is not here."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return [(request, NOTHING)]
        for row, request in enumerate(self._rows.requests):
            if request.request_id == request_id:
                partial = self._generation(row, "abort")
                self._remove(np.array([row]))
                return [(request, partial)]
        return []

    def interrupted(self) -> Finished:
        rows = [(request, self._generation(row, "abort")) for row, request in enumerate(self._rows.requests)]
        return [*rows, *((request, NOTHING) for request in self._waiting)]

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]] = ()
    ) -> list[list[float]]:
        """Return for each sequence the nats of all its tokens but the first, at temperature 1. The tokens
        that stand for `images`, those of each sequence or of none, have no nats."""
        found = []
        for sequence, shown in itertools.zip_longest(sequences, images, fillvalue=()):
            tokens = self._tensor(np.array([sequence]))
            logits = self._logits_of(tokens, shown)[:-1].float()
            logprobs = logits.log_softmax(-1) if self._exact is None else log_softmax(logits)
            nats = logprobs.gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy()
            found.append(nats[~shown_tokens(len(sequence), shown)[1:]].tolist())
        return found

    def _logits_of(self, tokens: Tensor, images: Sequence[PlacedImage]) -> Tensor:
        """Return the logits behind each token of one sequence, [L, V]."""
        if self._vision is not None and images:
            cache = {self._cache_argument: DynamicCache()}
            return self._vision.logits(
                tokens, [images], torch.arange(tokens.shape[1], device=tokens.device), cache
            )[0]
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits

    def free_cache(self) -> None:
        """Let go of the keys and values; raises EngineError while there are requests that need them."""
        if self.running:
            raise EngineError(f"{self.running} requests are being decoded: their cache cannot be freed")
        self._cache = SlotCache(self._kinds, self._slots, self.context_length)

    def swap_weights(self, prepared: Mapping[str, Tensor], policy_version: int) -> None:
        """Point the model at prepared tensors. The KV of rows in flight stays as the old weights made it; in
        exact arithmetic it is computed again, so that what follows is of one version."""
        held = self.model.state_dict(keep_vars=True)
        for name, tensor in prepared.items():
            held[name].data = tensor
        self.policy_version = policy_version
        if self._exact is not None:
            self._exact.forget_weights()
            self._refill_cache()

    @torch.inference_mode()
    def _refill_cache(self) -> None:
        """Compute the keys and values of all rows again, as many rows at a time as prompts in a pass."""
        cached, first = self._rows.lengths - 1, 0
        while first < len(cached):
            end = first + 1
            while (
                end < len(cached)
                and (end + 1 - first) * cached[first : end + 1].max() <= self._prefill_tokens
            ):
                end += 1
            filled = DynamicCache()
            tokens = self._tensor(self._rows.tokens(first, end, int(cached[first:end].max())))
            self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self._cache_argument: filled})
            self._cache.fill(first, filled, torch.arange(end - first, device=tokens.device))
            first = end

    def _pass_of_one_token(self) -> None:
        self.model(input_ids=self._tensor(np.zeros((1, 1), np.int64)), use_cache=False)

    @torch.inference_mode()
    def step(self) -> Finished:
        """Admit what fits, then sample one token in every row; return what ended."""
        finished: Finished = []
        for together in self._passes(self._next_admission()):
            first = len(self._rows)
            logits, routed = self._prefill(together)
            self._rows.add(together, self.policy_version)
            self._rows.record_experts(first, routed)
            finished += self._sample(logits, first)
        if len(self._rows):
            finished += self._sample(self._decode(), 0)
        return finished

    def _next_admission(self) -> list[GenerationRequest]:
        """Take waiting requests while slots and prefill tokens last; equal prompts count once."""
        admitted: list[GenerationRequest] = []
        prompts: set[Prompt] = set()
        longest = 0
        while self._waiting and len(self._rows) + len(admitted) < self._slots:
            prompt = _prompt(self._waiting[0])
            longest = max(longest, len(prompt[0]))
            if admitted and len(prompts | {prompt}) * longest > self._prefill_tokens:
                break
            prompts.add(prompt)
            admitted.append(self._waiting.pop(0))
        return admitted

    def _passes(self, admitted: list[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
        """Yield requests whose prompts one pass may take: a state at the end of a prompt is not to have seen
        the padding behind it, so that models with states take those of one length."""
        if not self._has_states:
            if admitted:
                yield admitted
            return
        by_length = sorted(admitted, key=_prompt_length)  # which keeps the order of equal ones
        yield from (list(together) for _, together in itertools.groupby(by_length, _prompt_length))

    @property
    def _has_states(self) -> bool:
        return any(kind != FULL_ATTENTION for kind in self._kinds)

    def _prefill(self, requests: Sequence[GenerationRequest]) -> tuple[Tensor, list[np.ndarray]]:
        """Fill the next slots' KV, computing equal prompts once; return the next token's logits, [m, V], and
        where the tokens went that requests ask about. Prompts are padded on the right, where causal attention
        cannot see."""
        order: dict[Prompt, int] = {}
        sources = [order.setdefault(_prompt(request), len(order)) for request in requests]
        ends = np.array([len(prompt) - 1 for prompt, _ in order])
        padded = np.zeros((len(order), ends.max() + 1), np.int64)
        for row, (prompt, _) in enumerate(order):
            padded[row, : len(prompt)] = prompt
        needed, column = np.unique(ends, return_inverse=True)
        prefilled = DynamicCache(config=self.model.config) if self._has_states else DynamicCache()
        images = [requests[sources.index(row)].images for row in range(len(order))]
        logits = self._prompt_logits(self._tensor(padded), images, self._tensor(needed), prefilled)[
            self._tensor(np.arange(len(order))), self._tensor(column)
        ]
        rows = self._tensor(np.array(sources))
        self._cache.fill(len(self._rows), prefilled, rows)
        return logits[rows], self._of_prompts(requests, sources)

    def _prompt_logits(
        self, tokens: Tensor, images: Sequence[Sequence[PlacedImage]], needed: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Return the logits behind the `needed` tokens of each row, [m, needed, V], and fill the cache."""
        filled = {self._cache_argument: cache}
        if self._vision is not None and any(images):
            return self._vision.logits(tokens, images, needed, filled)
        logits: Tensor = self.model(input_ids=tokens, use_cache=True, logits_to_keep=needed, **filled).logits
        return logits

    def _of_prompts(self, requests: Sequence[GenerationRequest], sources: Sequence[int]) -> list[np.ndarray]:
        """Return where the pass sent the tokens that each request asks about; request i is row
        `sources[i]` of the pass."""
        if self._experts is None:
            return []
        routed = self._experts.taken(1 + max(sources))
        return [
            routed[row, request.experts_from or 0 : len(request.token_ids)]
            for row, request in zip(sources, requests, strict=True)
        ]

    def _decode(self) -> Tensor:
        """Run the newest token of every row; return the next token's logits, [n, V]."""
        positions = self._tensor(self._rows.lengths - 1)
        width = int(self._rows.lengths.max())
        self._cache.aim(positions, width)
        logits: Tensor = self.model(
            input_ids=self._tensor(self._rows.last_tokens())[:, None],
            position_ids=self._tensor(self._rows.positions)[:, None],
            attention_mask=self._masks.of(positions, width, self.model.dtype),
            use_cache=True,
            **{self._cache_argument: self._cache},
        ).logits
        if self._experts is not None:
            self._rows.record_experts(0, list(self._experts.taken(len(self._rows))))
        return logits[:, -1]

    def _sample(self, logits: Tensor, first: int) -> Finished:
        """Append a token to the rows from `first` on; return and remove the rows that ended."""
        controls = self._rows.controls(first)
        tokens, logprobs, kept = sample(logits, controls, self._generator, exact=self._exact is not None)
        values = logprobs.cpu().numpy()
        if not np.isfinite(values).all():
            broken = not_finite(self.model.named_parameters())
            why = (
                f"{len(broken)} of its weights hold NaN or infinity, such as {broken[0]}"
                if broken
                else f"its weights are finite, and what they give is too large for {self.model.dtype}"
            )
            raise EngineError(f"logits of policy version {self.policy_version} are not finite: {why}")
        self._rows.record(first, tokens.cpu().numpy(), values, self.policy_version, kept)
        self.tokens_generated += len(values)
        rows, stopped = self._rows.finished()
        finished = [
            (self._rows.requests[row], self._generation(row, "stop" if stop else "length"))
            for row, stop in zip(rows, stopped, strict=True)
        ]
        if finished:
            self._remove(rows)
        return finished

    def _generation(self, row: int, reason: FinishReason) -> Generation:
        """Return what was sampled in a row so far; in exact arithmetic an update computes its keys again."""
        return self._rows.generation(row, reason, keeps_kv=self._exact is None)

    def _remove(self, rows: np.ndarray) -> None:
        targets, sources = self._rows.remove(rows)
        if len(targets):
            self._cache.move(targets, sources, int(self._rows.lengths.max()))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)


def _prompt(request: GenerationRequest) -> Prompt:
    return tuple(request.token_ids), tuple((image.digest, image.start) for image in request.images)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name by which the model's `forward` takes keys and values: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _prompt_length(request: GenerationRequest) -> int:
    return len(request.token_ids)


def _layer_kinds(config: PretrainedConfig, cache_argument: str) -> list[str]:
    """Return what the cache keeps of each layer; a window is a matter of masks alone. Raises `EngineError`
    for what is not served."""
    kinds = list(getattr(config, "layer_types", None) or [FULL_ATTENTION] * config.num_hidden_layers)
    recurrent = family_named(config.model_type).recurrent
    states = recurrent.kind if recurrent is not None else FULL_ATTENTION
    if not {FULL_ATTENTION, SLIDING, states}.issuperset(kinds):
        found = ", ".join(sorted(set(kinds)))
        raise EngineError(
            "the embedded engine serves full attention, sliding windows, and linear attention of "
            f"{', '.join(families_with(lambda family: family.recurrent))}; this model has {found}: use sglang"
        )
    if states in set(kinds) - {FULL_ATTENTION} and cache_argument != "cache":
        raise EngineError(
            f"the embedded engine serves {states} by transformers 5.24 and later: upgrade it, or use sglang"
        )
    return [FULL_ATTENTION if kind == SLIDING else kind for kind in kinds]


class DecodeMasks:
    """Makes masks as the layers of a model want them."""

    def __init__(self, config: Any) -> None:
        kinds = getattr(config, "layer_types", None)
        self._by_kind = kinds is not None and SLIDING in kinds
        """Says that transformers takes one mask for each kind of layers."""
        window = getattr(config, "sliding_window", None)
        self._window: int | None = window if kinds is None or self._by_kind else None

    @property
    def have_windows(self) -> bool:
        return self._window is not None

    def of(self, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Return what is added to scores, [n, 1, 1, width], by the kind of layers if the model has several.

        Args:
            positions: int64 [n], position of each row's token.
            width: number of positions in the cache.
            dtype: the model's."""
        back = positions[:, None] - torch.arange(width, device=positions.device)
        if not self._by_kind:
            return _added(_seen(back, self._window), dtype)
        return {
            FULL_ATTENTION: _added(_seen(back, None), dtype),
            SLIDING: _added(_seen(back, self._window), dtype),
        }


def _seen(back: Tensor, window: int | None) -> Tensor:
    """Tell which keys are seen that lie so many positions back, bool [n, width]."""
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None, None]
