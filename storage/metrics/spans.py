"""Spans of what a process does, for a collector of OpenTelemetry where the run names one.

The packages are an extra and are loaded where a collector is named; elsewhere a span does nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import structlog

from bus.process.daemon_call import in_daemon_thread
from storage.metrics.sinks import OTLP_TIMEOUT_S, otlp_resource, refuse_missing
from storage.settings.metrics import MetricsConfig

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = structlog.get_logger()
Attribute: TypeAlias = str | int | float | bool
_tracers: list["Tracer"] = []
"""Sends the spans of this process; empty where no collector is named."""


@contextmanager
def span(name: str, **attributes: Attribute) -> Iterator[Callable[[str, Attribute], None]]:
    """Send what is done inside as a span, below the one around it; yields what adds an attribute. Tasks that
    are created inside are below it too. An exception is noted and goes on."""
    if not _tracers:
        yield lambda *_: None
        return
    with _tracers[-1].start_as_current_span(name, attributes=attributes) as noted:
        yield noted.set_attribute


@asynccontextmanager
async def traced(config: MetricsConfig, *, run: str, role: str) -> AsyncIterator[None]:
    """Send the spans of this process inside, if the run names a collector; leaving sends what is left, within
    `OTLP_TIMEOUT_S`.

    A collector that is away costs spans alone. Raises `ConfigError` for a package that is missing."""
    refuse_missing(MetricsConfig(otlp_url=config.otlp_url))
    if config.otlp_url is None:
        yield
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=f"{config.otlp_url}/v1/traces", timeout=OTLP_TIMEOUT_S)
    provider = TracerProvider(resource=otlp_resource(run, role), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracers.append(provider.get_tracer("sluice"))
    try:
        yield
    finally:
        _tracers.pop()
        try:
            await asyncio.wait_for(in_daemon_thread(provider.shutdown, "last spans"), OTLP_TIMEOUT_S)
        except TimeoutError:
            log.warning("spans_not_sent", collector=config.otlp_url, waited_s=OTLP_TIMEOUT_S)
