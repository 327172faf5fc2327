"""The pause in which an SGLang server takes weights, and what becomes of its requests meanwhile."""

import time

from actors.engines.sglang.client.client import SglangClient
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.loading import Load
from actors.engines.sglang.requests_in_progress import RequestsInProgress
from actors.settings.engines import SglangEngineConfig
from bus.waiting import left_s


async def load_paused(
    load: Load, client: SglangClient, facts: ServerFacts, config: SglangEngineConfig,
    in_progress: RequestsInProgress,
) -> tuple[int, float]:  # fmt: skip
    """Run `load` while nothing is generated; return the version that it loads, and the seconds it took.

    Afterwards no request without a token is at the server that could find prefixes of older weights: those
    that waited were ended, and are sent again, or with `retract` the server has dropped all prefixes. A
    server that does not stream hides which requests wait: tokens of all that it has count as sampled over
    older keys and values.

    No request may be sent meanwhile. Raises `EngineError`, as `load` does."""
    end_s = time.monotonic() + config.update_timeout_s  # of all that follows together
    interrupts = config.adapter == "loaded"  # frozen weights change: requests are of one version each
    if config.pause == "drain" and not interrupts:
        await in_progress.drained(config.update_timeout_s)
    mode = config.pause if config.pause != "drain" and facts.reports_spans and not interrupts else None
    if mode == "in_place" and facts.role == "null":  # a pair hands its prompts over, or ends them
        # A request that waits is of the salt of the version before, whose prefixes it would find.
        await in_progress.interrupt(left_s(end_s), only=lambda request: request.may_wait)
    begun = time.perf_counter()
    if mode is None:
        await in_progress.interrupt(left_s(end_s))  # no answer may span the update
    else:
        in_progress.weights_change()
        await client.pause(mode)
    try:
        version = await load(mode == "retract", end_s)
    finally:
        if mode is not None:
            await client.resume()
    return version, time.perf_counter() - begun
