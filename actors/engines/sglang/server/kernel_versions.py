"""Whether a server of SGLang that is to compute as the learner does has the learner's kernels."""

import json
from collections.abc import Mapping
from pathlib import Path

from actors.engines.on_policy import tells_unscaled_logprobs
from actors.engines.sglang.server.settings import interpreter, server_environment
from actors.settings.engines import EngineConfig
from bus.errors import ConfigError
from bus.process import kernel_versions
from bus.process.child_process import ask_child
from bus.process.kernel_versions import differences

ASK_S = 60.0
"""Time in which an interpreter starts and looks at its packages, on a slow disk too."""
REMEDY = (
    "model.numerics=sglang has log-probs equal to the bit only where both have the same kernels: install the "
    "same versions of these for both"
)


async def learners_kernels(engine: EngineConfig, learner: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of packages that a server with these settings has; none for other arithmetic.
    `learner` has those of the learner, by the name of the package. Raises `ConfigError` where they differ."""
    if not tells_unscaled_logprobs(engine):
        return {}
    python = interpreter(engine.servers)
    versions = await _versions(python, server_environment(engine.servers, {}, python))
    if other := differences(versions, learner):
        raise ConfigError(f"{python}: {other}. {REMEDY}, or set model.numerics=fast")
    return versions


async def _versions(python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    command = str(python), kernel_versions.__file__
    try:
        told = await ask_child(command, limit_s=ASK_S, env=environment)
    except TimeoutError:
        raise ConfigError(f"{python} did not tell its packages within {ASK_S:g} s: does it start?") from None
    except OSError as error:
        raise ConfigError(f"cannot execute {python}: {error.strerror}") from error
    if told.status:
        last = told.errors.strip()[-300:]
        raise ConfigError(f"{python} ended with status {told.status} and cannot run SGLang: {last}")
    return dict(json.loads(told.answer))
