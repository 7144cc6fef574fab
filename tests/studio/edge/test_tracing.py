"""Traces: nothing without being asked, the client's span as parent, and nothing secret in any of them."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from sublet.core.errors import MissingExtra
from sublet.studio.edge import tracing as module
from sublet.studio.edge.tracing import Tracing

SECRET = "sublet_0123456789abcdef"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(spans: InMemorySpanExporter) -> Tracing:
    return Tracing(exporter=spans, at_once=True)


async def ask(app: Any, **headers: str) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/sessions/{SECRET}",
        "query_string": f"token={SECRET}".encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    await app(scope, receive, send)
    return sent


def studio(tracing: Tracing, status: int = 201, fails: bool = False) -> Any:
    """An app that routes, reads a token, and opens a session."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scope["sublet"] = SimpleNamespace(id="abc", route="/v1/sessions", tenant="ada")
        with tracing.span("session.open", {"sublet.session_id": "S1"}):
            if fails:
                raise ValueError(SECRET)
        await send({"type": "http.response.start", "status": status, "headers": []})

    return tracing.around(app)


def test_a_request_and_what_is_in_it(traced: Tracing, spans: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = asyncio.run(ask(studio(traced), traceparent=parent, authorization=f"Bearer {SECRET}"))
    assert sent[0]["status"] == 201
    inner, outer = spans.get_finished_spans()
    assert (outer.name, outer.kind) == ("POST /v1/sessions", SpanKind.SERVER)
    assert f"{outer.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{outer.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(outer.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/sessions",
        "http.response.status_code": 201,
        "sublet.request_id": "abc",
        "sublet.tenant": "ada",
    }
    assert (inner.name, dict(inner.attributes)) == ("session.open", {"sublet.session_id": "S1"})
    assert inner.parent.span_id == outer.context.span_id
    assert outer.resource.attributes["service.name"] == "sublet-studio"


def test_a_traceparent_that_is_none_begins_a_trace(traced: Tracing, spans: InMemorySpanExporter) -> None:
    asyncio.run(ask(studio(traced), traceparent="00-zz"))
    assert spans.get_finished_spans()[-1].parent is None


def test_failures_are_marked_and_nothing_of_them_told(traced: Tracing, spans: InMemorySpanExporter) -> None:
    asyncio.run(ask(studio(traced, status=503)))
    assert spans.get_finished_spans()[-1].status.status_code is StatusCode.ERROR
    with pytest.raises(ValueError, match=SECRET):
        asyncio.run(ask(studio(traced, fails=True)))
    told = [span.to_json() for span in spans.get_finished_spans()]
    assert any('"error.type": "ValueError"' in text for text in told)
    assert not [text for text in told if SECRET in text]


def test_only_named_attributes(traced: Tracing) -> None:
    with pytest.raises(AssertionError, match="no span carries"), traced.span("x", {"code": "print(1)"}):
        pass


def test_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracing = Tracing()
    app = object()
    assert (tracing.on, tracing.around(app)) == (False, app)  # type: ignore[arg-type]
    with tracing.span("anything"):
        pass
    tracing.close()
    code = (
        "import sys, sublet.studio.edge.tracing as t; t.Tracing(); print([m for m in sys.modules if "
        "'opentelemetry' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_asked_for_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtra) as caught:
        Tracing()
    assert "sublet[otel]" in caught.value.remedy


def test_sent_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real exporter, to a collector that listens here."""
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    tracing = Tracing()
    asyncio.run(ask(studio(tracing)))
    tracing.close()
    server.shutdown()
    server.server_close()
    assert [path for path, _ in got] == ["/v1/traces"]
    body = got[0][1]
    text = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    assert b"POST /v1/sessions" in text
    assert b"ours" in text
