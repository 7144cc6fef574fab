"""Traces, for those who collect them: a span for each request, and one inside it for a session that is opened and a call that is run.

Rules of this file:
- Without OTEL_EXPORTER_OTLP_ENDPOINT nothing of OpenTelemetry is imported and a span costs one comparison. With it, and without the
  packages (extra `otel`), the service says so and does not start: whoever asks for traces must not miss them unawares.
- A client's `traceparent` is taken over, so that its span is the parent of ours. Nothing else of what it sends is.
- Attributes are those named here. No header, no query, no body, no code, no text of an error ever becomes one: each may be a secret.
- Spans are sent behind the requests. When the collector is gone they are dropped, and no request waits for it.
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
    """Made once per process; `exporter` is where spans go, OTLP over HTTP unless a test says otherwise."""

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
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
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
        """A part of the request that is being answered."""
        if self._provider is None:
            yield
            return
        with self._begun(name, self._api.SpanKind.INTERNAL, None, attributes or {}):
            yield

    def begin(self, name: str, attributes: Mapping[str, str | int]) -> Callable[[], None]:
        """A part of the request that goes on after the request's own function is done; call what comes back when it is over."""
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
        """The same app, each of its requests a span; the app itself when nobody collects them."""
        return _Traced(app, self) if self.on else app

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _nothing() -> None:
    pass


def _checked(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    unknown = attributes.keys() - ATTRIBUTES
    assert not unknown, f"no span carries {sorted(unknown)}"
    return dict(attributes)


class _Traced:
    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = self._tracing
        sent = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        method = scope["method"] if scope["method"].isalpha() else "other"
        with own._begun(method, own._api.SpanKind.SERVER, own._propagator.extract(sent), {}) as span:
            span.set_attribute("http.request.method", method)

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(own._api.Status(own._api.StatusCode.ERROR))
                await send(message)

            try:
                await self._app(scope, receive, sending)
            finally:
                _name(span, method, scope.get("sublet"))


def _name(span: Any, method: str, visit: Any) -> None:
    """What is known of a request only after it was routed and its token read."""
    route = getattr(visit, "route", "")
    if route:
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
    for attribute, value in (
        ("sublet.request_id", getattr(visit, "id", "")),
        ("sublet.tenant", getattr(visit, "tenant", "")),
    ):
        if value:
            span.set_attribute(attribute, value)
