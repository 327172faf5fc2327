"""`launch data`: gives a running run other prompts."""

import asyncio
from pathlib import Path

from bus.connection import Bus
from bus.requests import DataAccepted, NewData
from bus.streams.blob_store import delete_blob, put_blob
from bus.streams.publish import Publisher
from launch.operations.process_answer import Asked, answer_of
from launch.process.run_connection import joined
from launch.settings.run_config import RunConfig
from storage.prompt_files.dataset import encoded_prompts, load_prompts

RUN_TIMEOUT_S = 5.0
"""Longest wait for a run, since only one that goes on takes other prompts."""
PROMPTS_TIMEOUT_S = 300.0
"""Longest wait for the answer, before which every prompt is rendered and tokenised."""


async def add_data(where: RunConfig, path: Path, keep_old: bool, stop: asyncio.Event) -> DataAccepted | None:
    """Send the prompts in `path` to the run's storage; None if `stop` came before the run was found.

    Raises `BusAwayError` when there is no such run, or its storage does not answer, and `ConfigError` for bad
    rows and prompts that do not fit the model.
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
        asked = Asked(
            "storage",
            f"{path}: run {where.run!r} goes on with its prompts",
            f"whether it took those of {path} is not known: its log says `data_set_takes_over` if it did",
        )
        subject = bus.subject("rpc", "data")
        try:
            return await answer_of(bus, subject, request, DataAccepted, asked, timeout_s=PROMPTS_TIMEOUT_S)
        finally:
            await delete_blob(bus, blob)
