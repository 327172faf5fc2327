"""Which of a server's own settings go together with rollouts whose weights change, and on which device.

SGLang checks its settings against each other; here is what it would accept and a run would suffer from."""

from collections.abc import Mapping

from actors.config import SglangEngineConfig, SglangSetting
from bus.errors import ConfigError

Settings = Mapping[str, SglangSetting]
NEEDS_CUDA = {
    "speculative_algorithm": "its kernels for drafts are missing in the build for CPUs",
    "enable_deterministic_inference": "there are batch-invariant kernels for accelerators only",
    "enable_dp_attention": "attention on a CPU cannot fill up the batches of its ranks",
    "attn_dp_size": "attention on a CPU cannot fill up the batches of its ranks",
}
"""Settings that a server on a CPU dies of, and why."""
LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def refuse_unfit(config: SglangEngineConfig, given: Settings, device: str) -> None:
    """Raise `ConfigError` for settings with which rollouts would be wrong or could not begin.

    Args:
        config: the engine's settings.
        given: its `server` table by SGLang's names.
        device: which the server will use."""
    for name, reason in NEEDS_CUDA.items():
        if device == "cpu" and is_on(given.get(name)):
            raise _refusal(given, name, f"needs a GPU, this server is on the CPU: {reason}")
    if not config.disaggregation.enabled and str(given.get("disaggregation_mode", "null")) != "null":
        raise _refusal(
            given,
            "disaggregation_mode",
            "is half of a pair: leave it out, and set actors.engine.disaggregation.enabled=true for both",
        )
    for name in LOSSY:
        if str(given.get(name, 1)) not in ("1", "1.0"):
            raise _refusal(
                given,
                name,
                "accepts what the model would not draw: log-probs would be of others. Set 1",
            )
    _check_replicas(config, given)


def added(given: Settings) -> dict[str, SglangSetting]:
    """Settings that follow from the user's: a draft model is read from its files, the policy comes later.

    Where the server leaves its device, as with colocation, it keeps the draft: nobody sends that again."""
    if "speculative_draft_model_path" not in given:
        return {}
    leaves = is_on(given.get("enable_memory_saver"))
    return {
        "speculative_draft_load_format": "auto",
        **({"enable_draft_weights_cpu_backup": True} if leaves else {}),
    }


def replicas(given: Settings) -> int:
    """Copies of the model that one server has, each on GPUs of its own."""
    return 1 if is_on(given.get("enable_dp_attention")) else size(given, "dp_size", "data_parallel_size")


def is_on(value: SglangSetting | None) -> bool:
    """Whether a flag is given and not turned off, or a size is more than 1."""
    return value is not None and str(value).lower() not in ("false", "none", "0", "1")


def size(given: Settings, *names: str) -> int:
    """The first of these settings that is given, 1 without any. Raises `ConfigError` for no number."""
    for name in names:
        if (value := given.get(name)) is not None:
            try:
                return int(str(value))
            except ValueError:
                raise ConfigError(f"actors.engine.server.{name}={value!r} is not a whole number") from None
    return 1


def _check_replicas(config: SglangEngineConfig, given: Settings) -> None:
    ranks = size(given, "tp_size", "tensor_parallel_size")
    copies = size(given, "dp_size", "data_parallel_size")
    if is_on(given.get("enable_dp_attention")) and (copies < 2 or ranks % copies):
        raise _refusal(
            given,
            "enable_dp_attention",
            f"divides tp_size={ranks} by dp_size={copies}: give a divisor",
        )
    if replicas(given) > 1 and config.update != "disk":
        raise _refusal(
            given,
            "dp_size",
            "has replicas in one server, which takes tensors for one only: set actors.fleet.engines instead, "
            "or actors.engine.update=disk",
        )


def _refusal(given: Settings, name: str, reason: str) -> ConfigError:
    return ConfigError(f"actors.engine.server.{name}={given.get(name)!r} {reason}")
