"""Sampling that the run has pinned: what an agent asks for besides is noted and not done."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actors.engines.base import Sampling
from actors.settings.gateway import Pin


def pinned(
    own: Sampling, asked: Mapping[str, float], pins: Sequence[Pin]
) -> tuple[Sampling, dict[str, tuple[float, float]]]:
    """Return the sampling of a request, and what it asked for and does not get: (asked, instead).

    Args:
        own: the run's.
        asked: temperature, top_p, top_k and max_new_tokens, as far as the client set them.
        pins: names of those that are the run's whatever was asked. max_new_tokens may only be lowered.
    """
    held = own.max_new_tokens
    wanted = {
        "temperature": asked.get("temperature", own.temperature),
        "top_p": asked.get("top_p", own.top_p),
        "top_k": max(0, int(asked.get("top_k", own.top_k))),  # -1 keeps all at other servers
    }
    given = {name: getattr(own, name) if name in pins else value for name, value in wanted.items()}
    lost = {name: (value, given[name]) for name, value in wanted.items() if value != given[name]}
    tokens = int(asked.get("max_new_tokens", held))
    if tokens > held:
        lost["max_new_tokens"] = (tokens, held)
    sampling = replace(
        own,
        temperature=float(given["temperature"]),
        top_p=float(given["top_p"]),
        top_k=int(given["top_k"]),
        max_new_tokens=min(tokens, held),
    )
    return sampling, lost
