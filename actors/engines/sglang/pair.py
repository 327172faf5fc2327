"""The servers of one engine: one of our own or at a URL, or a pair of such for prompts and what follows."""

import asyncio
from pathlib import Path

from actors.engines.sglang.client.client import SglangClient
from actors.engines.sglang.pair_client import PairClient, together
from actors.engines.sglang.server.gpu_count import base_gpu_id, gpus
from actors.engines.sglang.server.server import HOST, AttachedServer, OwnServer, Server
from actors.engines.sglang.server.settings import device_of
from actors.settings.engines import SglangEngineConfig, by_name
from bus.errors import ConfigError
from bus.server.nats_server import free_port

PAIRED = ("disaggregation_mode", "disaggregation_transfer_backend", "disaggregation_bootstrap_port")
"""Settings that make two servers a pair, which the engine decides."""


def server_of(config: SglangEngineConfig, model: Path, log_file: Path, first_gpu: int) -> Server:
    """Return what an engine is to start or find, as configured; not started. Raises `ConfigError` for
    settings of a pair that the engine decides."""
    pair = config.disaggregation
    if not pair.enabled:
        return (
            AttachedServer(config)
            if config.url is not None
            else OwnServer(config, model, log_file, first_gpu)
        )
    if pair.prefill_url is not None:
        prefill_at = config.model_copy(update={"url": pair.prefill_url})
        return Pair(AttachedServer(prefill_at), AttachedServer(config))
    prefill, decode = halves(config, first_gpu)
    beside = log_file.with_name(f"{log_file.stem}-prefill{log_file.suffix}")
    return Pair(OwnServer(prefill, model, beside, 0), OwnServer(decode, model, log_file, 0))


def halves(config: SglangEngineConfig, first_gpu: int) -> tuple[SglangEngineConfig, SglangEngineConfig]:
    """Return the settings of the prefill and of the decode server of one pair, which has GPUs of its own on
    CUDA. Raises `ConfigError` for settings that make them a pair."""
    pair, common = config.disaggregation, config.settings
    tables = [common | by_name(pair.prefill), common | by_name(pair.decode)]
    for given in tables:
        for name in PAIRED:
            if name in given:
                raise ConfigError(f"actors.engine: {name}={given[name]!r}: the engine sets this itself")
    wanted = [gpus(given) for given in tables]
    first = base_gpu_id(common, first_gpu)
    port = free_port(HOST)
    configs = []
    for mode, given, own, gpu in zip(
        ("prefill", "decode"), tables, (pair.prefill, pair.decode), (first, first + wanted[0]), strict=True
    ):
        given |= dict(zip(PAIRED, (mode, pair.transfer, port), strict=True))
        if device_of(given) == "cuda" and "base_gpu_id" not in by_name(own):
            given["base_gpu_id"] = gpu
        environment = _environment(config) | config.environment
        configs.append(config.model_copy(update={"server": given, "environment": environment}))
    prefill, decode = configs
    return prefill, decode


def _environment(config: SglangEngineConfig) -> dict[str, str]:
    """Both are on this host, and a request may wait for room in the decode server as long as it may take."""
    limit_s = str(int(config.request_timeout_s))
    limits = ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    return {"SGLANG_HOST_IP": HOST, **dict.fromkeys(limits, limit_s)}


class Pair:
    """A prefill and a decode server: they start, serve and end together."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def phase(self) -> str:
        return " and ".join(dict.fromkeys((self.prefill.phase, self.decode.phase)))

    async def start(self) -> SglangClient:
        return PairClient(*await together(self.prefill.start(), self.decode.start()))

    async def until_ready(self, client: SglangClient) -> None:
        """Return when both servers serve; they start at the same time."""
        assert isinstance(client, PairClient), "`start` made this client"
        await together(self.prefill.until_ready(client.prefill), self.decode.until_ready(client.decode))

    async def ended(self, *, within_s: float) -> str:
        """Return why one server ended: the other is of no use without it."""
        looks = {
            asyncio.create_task(server.ended(within_s=within_s)): name
            for name, server in (("prefill", self.prefill), ("decode", self.decode))
        }
        try:
            done, _ = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for look in looks:
                look.cancel()
        reasons = [f"its {looks[look]} server: {look.result()}" for look in done if look.result()]
        return reasons[0] if reasons else ""

    async def kill(self) -> None:
        await together(self.prefill.kill(), self.decode.kill())
