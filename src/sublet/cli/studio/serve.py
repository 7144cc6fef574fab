"""`sublet serve`: the studio's HTTP service."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import click

from sublet.core.errors import BadInput, MissingExtra
from sublet.core.studio.isolation import IsolationMode
from sublet.core.values import parse_size
from sublet.settings import load_settings

if TYPE_CHECKING:
    from sublet.studio.edge.http_edge import Network
    from sublet.studio.serving import ServiceAddress


def _networks(texts: tuple[str, ...]) -> list[Network]:
    try:
        return [ipaddress.ip_network(text, strict=False) for text in texts]
    except ValueError as e:
        raise BadInput(
            f"--trusted-proxy: {e}", remedy="write an address or a network, such as 10.0.0.0/8"
        ) from e


def _say(opened: ServiceAddress) -> None:
    click.echo(f"sublet studio at {opened.url}")
    if opened.token:
        click.echo(f"operator token: {opened.token}")
        click.echo("keep it now: it is not stored and cannot be shown again", err=True)
    click.echo(opened.isolation.summary)
    for line in opened.isolation.advice:
        click.echo(f"  {line}")


@click.command(
    epilog="Example:  sublet serve --host 0.0.0.0 --port 8443 --tls-cert /etc/studio.pem --tls-key "
    "/etc/studio.key"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0: any free one."
)
@click.option("--tls-cert", default="", help="Certificate chain, PEM.")
@click.option("--tls-key", default="", help="Its private key, PEM.")
@click.option(
    "--trusted-proxy",
    multiple=True,
    metavar="CIDR",
    help="X-Forwarded-* counts only when the connection comes from here. May be given several times.",
)
@click.option(
    "--behind-proxy",
    is_flag=True,
    help="A proxy in front does TLS: listen in the clear elsewhere than on loopback.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen in the clear elsewhere than on loopback: tokens can be read on the way.",
)
@click.option(
    "--isolation",
    type=click.Choice([mode.value for mode in IsolationMode]),
    help="Where this host cannot keep tenants apart: required lets in one tenant only; none lets in people "
    "who trust each other. Default: SUBLET_ISOLATION, or required.",
)
@click.option("--metrics-open", is_flag=True, help="/metrics without a token.")
@click.option(
    "--max-call", default="256MiB", show_default=True, help="The most bytes of one call or saved state."
)
@click.option(
    "--rate", default=200.0, show_default=True, help="Requests a second of one tenant; 0: no limit."
)
@click.option(
    "--address-rate",
    default=500.0,
    show_default=True,
    help="Requests a second from one address; 0: no limit.",
)
@click.option("--max-connections", default=2000, show_default=True, help="Open at once.")
@click.option(
    "--max-streams", default=64, show_default=True, help="Streams one tenant may have open at once."
)
def serve(
    host: str,
    port: int,
    tls_cert: str,
    tls_key: str,
    trusted_proxy: tuple[str, ...],
    behind_proxy: bool,
    insecure: bool,
    isolation: str | None,
    metrics_open: bool,
    max_call: str,
    rate: float,
    address_rate: float,
    max_connections: int,
    max_streams: int,
) -> None:
    """The studio over HTTP: sessions, dashboard, events and the page, for many tenants.

    The first start prints an operator's token, once. Killed at any moment, or run several times on one
    PostgreSQL ledger, it loses nothing: everything it knows is in the ledger, and sessions are held by a
    process of their own. SIGTERM: it leaves within 10 s.
    """
    try:
        from sublet.studio import serving
        from sublet.studio.edge.limits import EdgeLimits
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("sublet"):
            raise
        raise MissingExtra(
            f"the service needs {e.name}, which is not installed", remedy="pip install 'sublet[studio]'"
        ) from e
    limits = EdgeLimits(
        call_bytes=parse_size(max_call, what="max-call"),
        tenant_rate=rate,
        address_rate=address_rate,
        connections=max_connections,
        tenant_streams=max_streams,
    )
    serving.serve(
        load_settings(isolation=isolation),
        serving.ListenAddress(
            host=host,
            port=port,
            certificate=tls_cert,
            key=tls_key,
            behind_proxy=behind_proxy,
            insecure=insecure,
        ),
        limits,
        _networks(trusted_proxy),
        metrics_open=metrics_open,
        on_open=_say,
    )
