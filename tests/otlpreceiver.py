"""A collector for tests: it takes OTLP over HTTP, and reads it with OpenTelemetry's own messages."""

import contextlib
import http.server
import threading
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Received:
    """One span, as a collector reads it."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict
    failed: bool
    links: list


@dataclass
class Receiver:
    """What a collector got so far. `status` is what it answers."""

    port: int = 0
    status: int = 200
    spans: list = field(default_factory=list)
    raw: list = field(default_factory=list)
    headers: list = field(default_factory=list)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def named(self, name):
        """Return the one span of a name."""
        (found,) = [each for each in self.spans if each.name == name]
        return found

    def take(self, path, headers, body):
        assert path == "/v1/traces"
        assert headers["content-type"] == "application/x-protobuf"
        self.headers.append(dict(headers))
        self.raw.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = attributes_of(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [read(each, resource["service.name"]) for each in scope.spans]


def attributes_of(pairs):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


def read(span, service):
    return Received(
        service=service,
        name=span.name,
        kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=attributes_of(span.attributes),
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        links=[(each.trace_id.hex(), each.span_id.hex()) for each in span.links],
    )


@contextlib.contextmanager
def receiver():
    """Run a collector in a thread."""
    got = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if got.status == 200:
                got.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(got.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        got.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join()
