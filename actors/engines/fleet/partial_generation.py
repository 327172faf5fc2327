"""What an engine handed out of a generation: whether it can be one."""

import numpy as np
import structlog

from actors.engines.base import NOTHING, Generation, GenerationRequest, InterruptedGenerationError
from bus.errors import EngineError

log = structlog.get_logger()


def left_of(request: GenerationRequest, error: EngineError) -> Generation:
    """Return what is known of the tokens of a request that failed."""
    if not isinstance(error, InterruptedGenerationError):
        return NOTHING
    try:
        return sound(request, error.partial)
    except EngineError as unsound:
        log.warning("tokens_not_kept", reason=str(unsound))
        return NOTHING


def sound(request: GenerationRequest, generation: Generation) -> Generation:
    """Raise EngineError for a generation that is none."""
    lengths = [len(generation.token_ids), len(generation.logprobs), len(generation.policy_versions)]
    if generation.kv_versions is not None:
        lengths.append(len(generation.kv_versions))
    if len(set(lengths)) > 1 or lengths[0] > request.sampling.max_new_tokens:
        raise EngineError(
            f"{request.request_id}: {lengths} tokens, log-probs and versions, where "
            f"{request.sampling.max_new_tokens} at most were asked for"
        )
    if not np.isfinite(generation.logprobs).all():
        raise EngineError(f"{request.request_id}: a log-prob is not finite")
    return generation
