"""`launch data`: gives a running run other prompts."""

import asyncio
from pathlib import Path

from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.requests import DataAccepted, NewData
from bus.streams.blob_store import delete_blob, put_blob
from bus.streams.publish import Publisher
from launch.process.run_connection import joined
from launch.settings.run_config import RunConfig
from storage.prompt_files.dataset import encoded_prompts, load_prompts

RUN_TIMEOUT_S = 5.0
"""Longest wait for a run, since only one that goes on takes other prompts."""
ANSWER_TIMEOUT_S = 300.0
"""Longest wait for the answer, before which every prompt is rendered and tokenised."""


async def add_data(where: RunConfig, path: Path, keep_old: bool, stop: asyncio.Event) -> DataAccepted | None:
    """Send the prompts in `path` to the run's storage; None if `stop` came before the run was found.

    Raises `BusAwayError` when there is no such run, and `ConfigError` for bad rows, prompts that do not fit
    the model, and a storage that does not answer.
    """
    limit_s = min(where.bus.join_timeout_s, RUN_TIMEOUT_S)
    where = where.model_copy(update={"bus": where.bus.model_copy(update={"join_timeout_s": limit_s})})
    async with Bus.connect(where.bus, where.run, name="data") as bus:
        config = await joined(bus, where, {}, stop)
        if config is None:
            return None
        prompts = await asyncio.to_thread(load_prompts, path, config.data.keys)
        blob = await put_blob(bus, Publisher(bus), encoded_prompts(prompts, str(path)), "prompts")
        request = NewData(prompts=blob, keep_old=keep_old, source=str(path))
        try:
            return await bus.request(
                bus.subject("rpc", "data"), request, DataAccepted, timeout_s=ANSWER_TIMEOUT_S
            )
        except BusError as error:
            reason = error.refusal or error
            raise ConfigError(f"{path}: run {where.run!r} goes on with its prompts: {reason}") from error
        finally:
            await delete_blob(bus, blob)
