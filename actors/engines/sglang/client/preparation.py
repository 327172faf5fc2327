"""Asks the processes of SGLang servers to bring changes to their devices before the servers are paused."""

import asyncio
import time
from pathlib import Path

import structlog

from actors.engines.sglang.in_server.sluice_changes import READY, SOCKETS, short

log = structlog.get_logger()
PREPARE_S = 5.0
"""What takes longer is given up, and the server reads the changes in the pause."""


async def prepared(file: Path) -> None:
    """Return when the processes that listen beside a file have its changes on their devices, or cannot: then
    the server reads the file in the pause. Before its first changes no process listens."""
    began = time.monotonic()
    answers = await asyncio.gather(*(_answer(address, file) for address in file.parent.glob(SOCKETS)))
    if reasons := sorted({answer for answer in answers if answer != READY}):
        log.debug("changes_not_prepared", file=file.name, reasons=reasons)
    elif answers:
        seconds = round(time.monotonic() - began, 3)
        log.debug("changes_prepared", file=file.name, processes=len(answers), seconds=seconds)


async def _answer(address: Path, file: Path) -> str:
    try:
        async with asyncio.timeout(PREPARE_S):
            with short(address) as path:
                reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(f"{file}\n".encode())
                return (await reader.read()).decode() or "the process ended"
            finally:
                writer.close()
    except TimeoutError:
        return f"not within {PREPARE_S:g} s"
    except OSError as error:  # the process is gone
        return str(error)
