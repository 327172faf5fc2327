"""A collector of OpenTelemetry in this process, over HTTP."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What it was sent; `refuses` has it answer as one that is broken does."""

    def __init__(self) -> None:
        self.url = ""
        self.refuses = False
        self.spans: list = []
        self.values: dict[str, float] = {}
        """The latest value of each gauge."""
        self.senders: list[dict[str, str]] = []
        """What was said of the process behind each request."""

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            found = ExportTraceServiceRequest.FromString(body).resource_spans
            self.spans += [span for each in found for scope in each.scope_spans for span in scope.spans]
        else:
            assert path == "/v1/metrics"
            found = ExportMetricsServiceRequest.FromString(body).resource_metrics
            for metric in (m for each in found for scope in each.scope_metrics for m in scope.metrics):
                [point] = metric.gauge.data_points
                self.values[metric.name] = point.as_double
        self.senders += [{a.key: a.value.string_value for a in each.resource.attributes} for each in found]

    def attributes(self, span) -> dict[str, object]:
        return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if not collector.refuses:
                collector.take(self.path, body)
            self.send_response(400 if collector.refuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
