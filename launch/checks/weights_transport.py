"""Which transport carries a model's weights to the actors, as far as this host sees the model's files."""

from math import prod
from pathlib import Path

from bus.errors import ConfigError
from bus.policy_names import DEFAULT_POLICY
from bus.topology import MIB
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_on_disk
from launch.model_files.weight_files import weight_files
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element by dtype."""


def transport_remark(config: RunConfig) -> str:
    """Say how large the published weights are and which transport carries them; nothing where the model's
    files are not on this host, or cannot be read, of which whoever loads the model says what is wrong.

    Raises `ConfigError` for weights that are too large for the stream which is set for them."""
    transport, stream_bytes = config.learner.publication.transport, config.bus.streams.weights_mib * MIB
    if config.model.path is None:
        return ""
    model = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    try:
        size = elements(model) * _item_bytes(config)
    except (OSError, ValueError):
        return ""
    if not transport.fits(size, stream_bytes):
        raise ConfigError(
            f"learner.publication.transport.type={transport.type}: {size >> 20} MiB of weights are more than "
            f"a fourth of bus.streams.weights_mib={config.bus.streams.weights_mib}, which holds several "
            f"versions: {_remedy(config)}"
        )
    chosen = transport.chosen(size, stream_bytes)
    reached = ", from the learner's host" if chosen.served_by_learner else ""
    whose = "" if config.trains == DEFAULT_POLICY else f" of policy {config.trains!r}"
    return f"A snapshot of the weights{whose} has {size / 1e6:,.0f} MB and goes by {chosen.type}{reached}."


def _item_bytes(config: RunConfig) -> int:
    """Return the bytes of a published element, as far as they do not depend on the learner's host."""
    dtype = config.learner.publish_dtype
    if dtype == "auto":
        dtype = config.model.dtype
    if dtype == "auto" and config.model.numerics == "exact":
        dtype = "float32"
    return ITEM_BYTES.get(dtype, ITEM_BYTES["bfloat16"])


def _remedy(config: RunConfig) -> str:
    """Return what to set; a further policy's weights must outlive its learner, so HTTP does not serve."""
    if config.trains == DEFAULT_POLICY:
        return "set the type to auto, http or files"
    return (
        f"set policies.{config.trains}.learner.publication.transport.type=files, with a directory that all "
        "hosts mount, or a larger bus.streams.weights_mib"
    )


def elements(model: Path) -> int:
    """Return the number of elements of all weights in the safetensors files of a directory.

    Raises `OSError` or `ValueError` where there are none, or one is not whole."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for name in weight_files(model):
        try:
            with safe_open(model / name, framework="numpy") as opened:
                total += sum(prod(opened.get_slice(key).get_shape()) for key in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged ({error})") from error
    return total
