"""Traces: a span for each request, and inside it one for opening a session and one for running a call.

Rules of this file:
- Without OTEL_EXPORTER_OTLP_ENDPOINT nothing of OpenTelemetry is imported and a span costs one comparison.
  With it but without the packages (extra `otel`), the service refuses to start: traces that were asked for
  must not be missing.
- A client's `traceparent` becomes the parent of our span. Nothing else that the client sends is used.
- A span has only the attributes named here. Headers, queries, bodies, code and error texts may be secrets.
- Spans are sent in the background. When the collector is gone they are dropped, and no request waits for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sublet.core.errors import MissingExtra

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
INSTALL = "pip install 'sublet[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT"
#: What a span may carry.
ATTRIBUTES = frozenset(
    {
        "http.request.method",
        "http.route",
        "http.response.status_code",
        "sublet.request_id",
        "sublet.tenant",
        "sublet.session_id",
        "sublet.call_id",
        "error.type",
    }
)


class Tracing:
    """Created once per process. Spans go to `exporter`, by default OTLP over HTTP."""

    def __init__(self, *, exporter: Any = None, at_once: bool = False) -> None:
        self._provider: Any = None
        if exporter is None and not any(os.environ.get(name) for name in ENDPOINTS):
            return
        try:
            self._api: Any = import_module("opentelemetry.trace")
            sdk: Any = import_module("opentelemetry.sdk.trace")
            export: Any = import_module("opentelemetry.sdk.trace.export")
            resources: Any = import_module("opentelemetry.sdk.resources")
            context: Any = import_module("opentelemetry.trace.propagation.tracecontext")
            if exporter is None:
                otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
                exporter = otlp.OTLPSpanExporter()
        except ImportError as e:
            raise MissingExtra(
                "traces are asked for, and the packages for them are not installed", remedy=INSTALL
            ) from e
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        named = os.environ.get("OTEL_SERVICE_NAME") or "sublet-studio"
        self._provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": named}))
        processor = export.SimpleSpanProcessor if at_once else export.BatchSpanProcessor
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("sublet.studio")
        self._propagator = context.TraceContextTextMapPropagator()

    @property
    def on(self) -> bool:
        return self._provider is not None

    @contextlib.contextmanager
    def span(self, name: str, attributes: Mapping[str, str | int] | None = None) -> Iterator[None]:
        """A span inside the current request's span."""
        if self._provider is None:
            yield
            return
        with self._begun(name, self._api.SpanKind.INTERNAL, None, attributes or {}):
            yield

    def begin(self, name: str, attributes: Mapping[str, str | int]) -> Callable[[], None]:
        """Begins a span that outlives the request's own function; call the returned function to end it."""
        if self._provider is None:
            return _nothing
        span = self._tracer.start_span(name, attributes=_checked(attributes))
        return lambda: span.end() if span.is_recording() else None

    @contextlib.contextmanager
    def _begun(self, name: str, kind: Any, parent: Any, attributes: Mapping[str, str | int]) -> Iterator[Any]:
        with self._tracer.start_as_current_span(
            name,
            context=parent,
            kind=kind,
            attributes=_checked(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._api.Status(self._api.StatusCode.ERROR))
                raise

    def around(self, app: ASGIApp) -> ASGIApp:
        """The app with a span around each request, or the app itself when tracing is off."""
        if self._provider is None:
            return app

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._traced(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return traced

    async def _traced(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        sent = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        method = scope["method"] if scope["method"].isalpha() else "other"
        parent = self._propagator.extract(sent)
        with self._begun(method, self._api.SpanKind.SERVER, parent, {}) as span:
            span.set_attribute("http.request.method", method)

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(self._api.Status(self._api.StatusCode.ERROR))
                await send(message)

            try:
                await app(scope, receive, sending)
            finally:
                _name(span, method, scope.get("sublet"))

    def close(self) -> None:
        """Sends the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def _nothing() -> None:
    pass


def _checked(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    unknown = attributes.keys() - ATTRIBUTES
    assert not unknown, f"no span carries {sorted(unknown)}"
    return dict(attributes)


def _name(span: Any, method: str, context: Any) -> None:
    """Adds what is known of a request only after it was routed and its token read."""
    route = getattr(context, "route", "")
    if route:
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
    for attribute, value in (
        ("sublet.request_id", getattr(context, "id", "")),
        ("sublet.tenant", getattr(context, "tenant", "")),
    ):
        if value:
            span.set_attribute(attribute, value)
