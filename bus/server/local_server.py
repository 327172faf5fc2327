"""Tells whether the bus at the other end of a connection is this host's own, or asks clients for credentials.

An address on loopback proves nothing: a tunnel may listen there and lead to a bus that others write on.
Credentials in a URL prove nothing either: a server that asks nobody takes every client."""

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
from nats.aio.client import Client

SERVER = "nats-server"
CONFIG_OPTIONS, STORE_OPTIONS = ("-c", "--config"), ("-sd", "--store_dir")
_KEY_FILE = re.compile(r'key_file: "([^"]+)"')


def reaches_own_server(client: Client) -> bool:
    """Return whether this connection ends at a nats-server that this process sees, all of whose sockets are
    on loopback: no other host is connected to it, as a client, a server of its cluster or a leaf node.

    A tunnel that somebody on this host opens into that server (`ssh -R`) is a process of this host to it, and
    lets strangers in: no socket of the server shows that.

    Another user's processes cannot be looked at, unless by root: what they serve is not this host's own as
    far as this process can prove it."""
    writer = client._transport._io_writer if client._transport is not None else None
    here = writer.get_extra_info("sockname") if writer is not None else None
    return here is not None and any(_is_end_of(process, here[:2]) for process in psutil.process_iter())


def server_directories() -> Iterator[Path]:
    """Yield the directories of the nats-servers that this process sees: those of their configuration, streams
    and keys. What a configuration says of streams elsewhere is not read."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process has ended, or is not ours to look at
            if Path(process.exe()).name == SERVER:
                words, here = process.cmdline(), Path(process.cwd())
                named = {option: here / value for option, value in pairwise(words)}
                yield from (named[option] for option in STORE_OPTIONS if option in named)
                for file in (named[option] for option in CONFIG_OPTIONS if option in named):
                    yield file.parent
                    yield from (
                        here / Path(key).parent for key in _KEY_FILE.findall(file.read_text(errors="replace"))
                    )


def demands_credentials(client: Client) -> bool:
    """Return whether the server refuses clients without credentials: it says so in its first message, and a
    user for clients that give none (`no_auth_user`) makes it say that it asks nobody."""
    return bool(client._server_info.get("auth_required"))


def _is_end_of(process: psutil.Process, place: tuple[str, int]) -> bool:
    """Return whether a process is a nats-server of this host alone with a connection to address and port."""
    try:
        if Path(process.exe()).name != SERVER:
            return False
        sockets = process.net_connections("inet")
    except (psutil.Error, OSError):  # the process has ended, or is not ours to look at
        return False
    used = [end for each in sockets for end in (each.laddr, each.raddr) if end]
    connected = any(each.raddr and tuple(each.raddr) == place for each in sockets)
    return connected and all(ipaddress.ip_address(end.ip).is_loopback for end in used)
