"""What an SGLang server says of itself when it is up."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from actors.settings.engines import MASK_TOKENS, SglangEngineConfig, tells_kept
from bus.config import MOST_KEPT
from bus.errors import ConfigError
from storage.model_files.families import family_named

log = structlog.get_logger()
SEES_BYTES = (0, 5, 23)
"""Version from which it knows images by the bytes that it was sent, not by the patches it makes of them, and
takes the tokens of a prompt with images as they are: earlier ones decode and encode them again."""
STORES_BY_SALT = (0, 5, 20)
"""First version that tells prefixes of different salts apart in storage below the host's memory (SGLang's
pull request 38577); earlier ones know them there by their tokens alone."""
STORAGES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")
"""Settings by which a server keeps prefixes in such storage, which no flush empties."""
FLUSHES_BELOW_WAITING = (0, 5, 21)
"""First version that drops its prefixes while retracted requests wait. By its source an earlier one ends
with "Cache flush failed after updating weights" (SGLang's issue 33783); 0.5.19 ended so on a GPU."""
KEEP_ROUTERS = (0, 5, 10), (0, 5, 19)
"""First version that chooses the experts of GLM-4.5 by the weights of its first pass for ever, and the first
later one that does not."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server can do."""

    version: str
    model: str
    update_sessions: bool
    """Tensors are taken between /begin_weight_update and /end_weight_update only (from 0.5.21 on)."""
    reports_spans: bool
    """Answers say which tokens are of which weights; without it a generation must not see an update."""
    returns_experts: bool
    """Answers say where the tokens of a mixture of experts went."""
    streams: bool
    """Tokens are handed out piece by piece, each once, as they are drawn."""
    tensor_ranks: int
    """Ranks that each take a copy of the tensors in a request."""
    settings: tuple[Mapping[str, Any], ...]
    """All settings of the server, or of both servers of a pair."""
    device: Literal["cpu", "cuda"] = "cuda"
    replicas: int = 1
    """Sets of such ranks, each with a copy of the model or a stage of it."""
    speculation: str = ""
    role: str = "null"
    """`prefill` or `decode` for half of a pair."""
    tells_loads: bool = False
    loads_adapters: bool = False
    """There is an endpoint that takes the tensors of adapters."""
    architectures: tuple[str, ...] = ()
    """Classes of the model; empty where the server does not say."""
    longest_prompt: int | None = None
    """Tokens that a prompt may have, and with it its answer; None where it does not say."""
    bootstrap_port: int = 0
    """Where a decode server finds out how to reach a prefill server."""

    @property
    def has_own_draft(self) -> bool:
        """Return whether updates of the policy must not get to its draft model, or to that of half of a
        pair."""
        return any(map(own_draft, self.settings))

    def warn_of_silence_of_versions(self, pause: str) -> None:
        """Warn where answers do not say which weights drew a token: an update ends what is under way.
        `pause` is what the configuration wants of it."""
        if not self.reports_spans and pause != "drain":
            log.warning("sglang_reports_no_versions_per_token", version=self.version, pause="interrupt")

    def refuse_model(self, config: Mapping[str, Any], url: str) -> None:
        """Raise `ConfigError` where the server at `url` would compute a model with this config.json by other
        weights: show images as its vision tower saw them before an update, among other tokens than the
        prompt's, route tokens of GLM-4.5 as before, or never load its output layer."""
        family = family_named(config.get("model_type"))
        if family.sees_images and self._numbers < SEES_BYTES:
            raise ConfigError(
                f"the model sees images, and the server at {url} is SGLang {self.version}, which keeps what "
                "its vision tower made of one over updates of weights, and turns prompts with images into "
                "text and into tokens again: use 0.5.23 or later"
            )
        first, end = KEEP_ROUTERS
        if family.sglang_kept_routers and first <= self._numbers < end:
            raise ConfigError(
                f"the server at {url} is SGLang {self.version}, which goes on choosing experts of GLM-4.5 "
                f"({config['model_type']}) by the weights of its first pass after updates: use 0.5.19 or "
                "later"
            )
        text = config.get("text_config") or {}
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
        if not (family.sglang_loads_output or tied):
            raise ConfigError(
                f"the {config['model_type']} has an output layer of its own (tie_word_embeddings=false), "
                f"which the server at {url} does not load, as SGLang's code is: use "
                "actors.engine.type=embedded"
            )

    def refuse_stored_prefixes(self, pause: str, url: str) -> None:
        """Raise `ConfigError` where the server at `url` may find keys and values of older weights in storage.
        `pause` is what an update does to requests: with `retract` they go on under the salt they have."""
        for server in self.settings:
            storage = next((name for name in STORAGES if server.get(name)), "")
            if not storage:
                continue
            if self._numbers < STORES_BY_SALT or storage == "enable_flexkv":
                raise ConfigError(
                    f"the server at {url} is SGLang {self.version} with {storage}, which may find stored "
                    "prefixes by their tokens alone, whatever weights computed them: use "
                    f"hicache_storage_backend with 0.5.20 or later, or leave {storage} out "
                    "(enable_hierarchical_cache alone keeps prefixes of each version apart)"
                )
            if pause == "retract":
                raise ConfigError(
                    f"actors.engine.pause=retract: the server at {url} has {storage}, where requests that go "
                    "on after an update find what older weights computed for them: set pause=in_place or "
                    "pause=drain"
                )

    def refuse_retraction(self, pause: str, url: str) -> None:
        """Raise `ConfigError` where the server at `url` would end at an update that retracts requests."""
        if pause == "retract" and self.reports_spans and self._numbers < FLUSHES_BELOW_WAITING:
            raise ConfigError(
                f"actors.engine.pause=retract: the server at {url} is SGLang {self.version}, which ends at "
                "an update that puts requests aside: use 0.5.21 or later, or pause=in_place or pause=drain"
            )

    @property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3])

    def refuse_silence(self, config: SglangEngineConfig, url: str, *, of_experts: bool) -> None:
        """Raise `ConfigError` unless the server at `url` says what engines with these settings are asked:
        where tokens went, if that is wanted, and which tokens sampling kept."""
        if of_experts and not self.returns_experts:
            raise ConfigError(
                f"actors.engine.routed_experts: the server at {url} does not return them: start it with "
                "--enable-return-routed-experts"
            )
        if config.attached and MASK_TOKENS in config.settings:
            self._refuse_silence_of_kept_sets(url)

    def _refuse_silence_of_kept_sets(self, url: str) -> None:
        """Raise `ConfigError` unless the server, which somebody else has started, tells sets of any size."""
        asked = f"sampling.keep_masks=true: the server at {url}"
        if not tells_kept(self.speculation):
            raise ConfigError(
                f"{asked} does not tell what it kept with speculative_algorithm={self.speculation!r}: start "
                "it without, or leave out keep_masks"
            )
        for server in self.settings:
            if (most := server.get(MASK_TOKENS)) is None:
                raise ConfigError(
                    f"{asked} is SGLang {self.version}, which does not tell what it kept: use one that has "
                    "--sampling-mask-max-tokens, such as 0.5.23, or leave out keep_masks"
                )
            if int(most) < MOST_KEPT:
                raise ConfigError(
                    f"{asked} ends requests of which it kept more than {most} tokens: start it with "
                    "--sampling-mask-max-tokens 4096"
                )


def drafts(server: Mapping[str, Any]) -> bool:
    """Return whether the server has a draft model; n-grams are from the requests. `server`: as for
    `own_draft`."""
    return server.get("speculative_algorithm") not in (None, "", "NGRAM")


def own_draft(server: Mapping[str, Any]) -> bool:
    """Return whether the draft model has a checkpoint of its own; else it is a part of the policy's, and
    moves on."""
    path = server.get("speculative_draft_model_path")
    return drafts(server) and path not in (None, "", server.get("model_path"))
