"""Sliding windows: how many tokens the queries of each layer see."""

from transformers import PretrainedConfig

from bus.errors import ConfigError


def windows_of(hf_config: PretrainedConfig) -> list[int | None]:
    """Return for each layer how many tokens a query sees, its own the last of them; None is all before it.
    Configurations that do not tell kinds of layers apart have their window in all of them."""
    layers = hf_config.num_hidden_layers
    window = getattr(hf_config, "sliding_window", None) or None
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def shortest_window(hf_config: PretrainedConfig) -> int | None:
    """Return the shortest window that is shorter than the longest sequence; None where there is none."""
    windows = (window for window in windows_of(hf_config) if window is not None)
    return min((window for window in windows if window < hf_config.max_position_embeddings), default=None)


def refuse_shared_window(window: int | None, longest: int) -> None:
    """Raise `ConfigError` where sequences of up to `longest` tokens share prefixes and the window is less."""
    if window is not None and window < longest:
        raise ConfigError(
            f"learner.batch.share_prefixes=true: a sliding window of {window} tokens is not supported for "
            f"sequences of {longest}: set share_prefixes=false"
        )


def refuse_shared_sinks(sinks: bool) -> None:
    """Raise `ConfigError` where sequences share prefixes in a model whose attention has sinks."""
    if sinks:
        raise ConfigError(
            "learner.batch.share_prefixes=true: attention with sinks is not supported for sequences that "
            "share prefixes: set share_prefixes=false"
        )


def refuse_shared_states(states: bool) -> None:
    """Raise `ConfigError` where sequences share prefixes in a model whose layers take a state from token to
    token."""
    if states:
        raise ConfigError(
            "learner.batch.share_prefixes=true: linear attention is not supported for sequences that share "
            "prefixes, which would need the state behind each: set share_prefixes=false"
        )
