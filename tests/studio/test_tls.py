"""The service with a certificate of its own: the client talks to it, and in the clear nobody does."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

import sublet
from tests.client.test_http import certificate as certificate
from tests.studio.conftest import HostedSessions
from tests.studio.served import Served, token_for


def test_a_session_over_tls(hosted_here: HostedSessions, certificate: Path) -> None:
    token = token_for(hosted_here.ledger, "ann")
    served = Served(
        hosted_here.home.environment,
        options=("--tls-cert", str(certificate), "--tls-key", str(certificate)),
    )
    served.start()
    try:
        studio = sublet.connect(f"https://127.0.0.1:{served.port}", token, certificate=str(certificate))
        with studio.session(vram="1GiB", ttl="1m") as session:
            assert session.run(pow, 2, 10) == 1024
        clear = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        with pytest.raises((http.client.HTTPException, OSError)):
            clear.request("GET", "/healthz")
            clear.getresponse()
        clear.close()
    finally:
        served.kill()
