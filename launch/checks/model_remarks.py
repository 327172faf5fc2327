"""What a start says of the models of a run: how their weights travel, and what their chats are like.

It takes torch and transformers, which the process that supervises a run does not load: model_check.py asks
for it."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

from bus.errors import ConfigError
from bus.policy_names import DEFAULT_POLICY
from bus.topology import MIB
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_here, model_on_disk
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.model_files.model_reading import read_tokenizer
from storage.model_files.weight_files import weight_files


def model_remarks(configs: Sequence[RunConfig]) -> list[str]:
    """Return what there is to say of the models of each policy. Raises as `transport_remark` and
    `chat_remark`."""
    said = [remark(config) for remark in (transport_remark, chat_remark) for config in configs]
    return [*filter(None, said)]


def transport_remark(config: RunConfig) -> str:
    """Say how large the published weights are and which transport carries them; nothing where the model's
    files are not on this host, or cannot be read, of which whoever loads the model says what is wrong. The
    learner is to run on this host.

    Raises `ConfigError` for weights that are too large for the stream which is set for them."""
    transport, stream_bytes = config.learner.publication.transport, config.bus.streams.weights_mib * MIB
    if config.model.path is None:
        return ""
    from learner.model_directories.dtypes import published_dtype  # loads torch

    model = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    item_bytes = published_dtype(config.learner, config.model).itemsize
    try:
        size = elements(model) * item_bytes
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


def _remedy(config: RunConfig) -> str:
    """Return what to set; a further policy's weights must outlive its learner, so HTTP does not serve."""
    if config.trains == DEFAULT_POLICY:
        return "set the type to auto, http or files"
    return (
        f"set policies.{config.trains}.learner.publication.transport.type=files, with a directory that all "
        "hosts mount, or a larger bus.streams.weights_mib"
    )


def elements(model: Path) -> int:
    """Return the number of elements of all weights in the safetensors files of a directory. Raises `OSError`
    or `ValueError` where there are none, or one is not whole."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for name in weight_files(model):
        try:
            with safe_open(model / name, framework="numpy") as opened:
                total += sum(prod(opened.get_slice(key).get_shape()) for key in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged ({error})") from error
    return total


def chat_remark(config: RunConfig) -> str:
    """Say by which tokens answers end and what names them, and how tool calls are read where an environment
    has tools; nothing for a model that is not on this host. Raises `ConfigError` where no token ends an
    answer, a file names what is no token, or no format reads the calls that the template writes."""
    model = model_here(config.model.path, RunDirectory(config.directory, config.run))
    if model is None:
        return ""
    from actors.policy.chat_format import ChatFormat  # not for help
    from storage.chats.stop_tokens import stop_tokens

    tokenizer = read_tokenizer(model)
    whose = "" if config.trains == DEFAULT_POLICY else f" of policy {config.trains!r}"
    said = f"Answers{whose} end with {', '.join(map(str, stop_tokens(model, tokenizer)))}."
    if not config.actors.offers_native_tools:
        return said
    calls = ChatFormat(tokenizer, config.actors.tool_calls).calls
    calls.refuse_unread()
    unseen = "" if calls.writes else "; the chat template itself writes none, and may not show tools"
    return f"{said} Their tool calls are read as {calls.format}{unseen}."
