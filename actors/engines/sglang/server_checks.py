"""Whether SGLang servers that somebody else keeps alive fit the run, told before they are needed."""

import json
from pathlib import Path

from actors.engines.sglang.client.client import SglangClient
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.tensor_files import State
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError, EngineError
from bus.waiting import bounded

LOOK_S = 20.0
"""Time in which a server that runs answers."""
LEFT_TOKENS = 16
"""Tokens of the shortest prompt that is worth an answer."""


async def check_servers(settings: SglangEngineConfig, model: Path, *, max_new_tokens: int) -> None:
    """Look at each running server that is to evaluate the model in a directory.

    Raises `ConfigError` for one that does not answer, is no SGLang server, serves another kind of model, or
    has no room for an answer."""
    architectures = json.loads((model / "config.json").read_text()).get("architectures") or []
    for url in settings.attached:
        facts = await _facts(url)
        if facts.architectures and set(facts.architectures).isdisjoint(architectures):
            raise ConfigError(
                f"{url} serves {', '.join(facts.architectures)} ({facts.model}), and the run's model is "
                f"{', '.join(architectures)}: it cannot take its weights: start it with the run's model"
            )
        room = facts.longest_prompt
        if room is not None and room < max_new_tokens + LEFT_TOKENS:
            raise ConfigError(
                f"{url} takes contexts of {room} tokens, and an answer may have sampling.max_new_tokens="
                f"{max_new_tokens}: start it with a larger --context-length and --max-total-tokens, or "
                "lower max_new_tokens"
            )


async def check_weights(settings: SglangEngineConfig, model: Path, state: State, policy_version: int) -> None:
    """Give each running server the weights of a version. Raises `ConfigError` for one that refuses."""
    for url in settings.attached:
        engine = SglangEngine(model, settings.attached_to(url), Path())
        try:
            await engine.start()
            await engine.load_weights(state, policy_version)
        except EngineError as error:
            raise ConfigError(
                f"{url} does not take the weights of version {policy_version}: {error}. Its --model-path "
                "must be the run's model"
            ) from error
        finally:
            await engine.close()


async def _facts(url: str) -> ServerFacts:
    client = SglangClient.connect(url)
    try:
        async with bounded(LOOK_S, f"{url} did not answer"):
            return await client.facts()
    except EngineError as error:
        raise ConfigError(
            f"{url} cannot evaluate: {error}. Start SGLang there first, or leave it out of the settings; "
            "other servers take no weights, and may only answer for a model that stays as it is, as one of "
            "actors.evaluation.endpoints"
        ) from error
    finally:
        await client.close()
