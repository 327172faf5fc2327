"""How many GPUs an SGLang server uses, by its settings, and which one is its first. Loads without torch."""

from collections.abc import Mapping

from actors.settings.engines import EngineSettings, SglangSetting, by_name
from bus.errors import ConfigError

Settings = Mapping[str, SglangSetting]


def base_gpu_id(given: Settings, first_gpu: int) -> int:
    """Return the first GPU of a server: that of the user's settings, or else the one it is planned for.
    Raises `ConfigError` for a setting that is no number."""
    return size(given, "base_gpu_id") if given.get("base_gpu_id") is not None else first_gpu


def gpus(given: Settings) -> int:
    """Return how many a server uses. Raises `ConfigError` for a size that is no number."""
    found = replicas(given)
    for name, longer in (("tp_size", "tensor_parallel_size"), ("pp_size", "pipeline_parallel_size")):
        found *= size(given, name, longer)
    return found


def gpus_of_engine(engine: EngineSettings) -> int:
    """Return how many an engine uses in all, which may be a pair of servers; none where the actor starts no
    server. Raises `ConfigError` for a size that is no number."""
    if not engine.starts_servers:
        return 0
    common, pair = engine.servers.settings, engine.servers.disaggregation
    if not pair.enabled:
        return gpus(common)
    return sum(gpus(common | by_name(own)) for own in (pair.prefill, pair.decode))


def gpus_of_host(engine: EngineSettings) -> int:
    """Return how many an engine uses on each of its hosts. Raises `ConfigError` as `gpus_of_engine` does."""
    return gpus_of_engine(engine) // engine.servers.nodes


def replicas(given: Settings) -> int:
    """Copies of the model that one server has, each on GPUs of its own."""
    return 1 if is_on(given.get("enable_dp_attention")) else size(given, "dp_size", "data_parallel_size")


def is_on(value: SglangSetting | None) -> bool:
    """Return whether a flag is given and not turned off, or a size is more than 1."""
    return value is not None and str(value).lower() not in ("false", "none", "0", "1")


def size(given: Settings, *names: str) -> int:
    """Return the first of these settings that is given, 1 without any. Raises `ConfigError` for no number."""
    for name in names:
        if (value := given.get(name)) is not None:
            try:
                return int(str(value))
            except ValueError:
                raise ConfigError(f"actors.engine.server.{name}={value!r} is not a whole number") from None
    return 1
