"""HTTP to a studio: what is sent, what is repeated, what is refused, and what is said about it."""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import socket
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sublet
from sublet.client import http as client_module
from sublet.client.errors import error_from, error_of_answer
from sublet.client.http import Client, parse_address
from sublet.core.errors import (
    BadInput,
    Disconnected,
    Misconfigured,
    NotFound,
    QuotaReached,
    SubletError,
    Unauthorized,
    WorkerLost,
    error_tree,
)
from tests.client.canned import ME, Answer, Asked, canned, error, said
from tests.free_ports import free_port

TOKEN = "sublet_0123456789abcdef_" + "ab" * 16


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PATIENCE_SECONDS", 0.2)


# --- errors --------------------------------------------------------------------------------------------------

OURS = [cls for cls in error_tree() if cls.__module__ == "sublet.core.errors"]


@pytest.mark.parametrize("known", OURS, ids=lambda cls: cls.code)
def test_every_code_is_its_class_with_the_studio_s_words(known: type[SubletError]) -> None:
    with canned(lambda asked: error(500, known.code, "it happened", "do this")) as server:
        client = Client(server.url, TOKEN, patience_seconds=0)
        with pytest.raises(SubletError) as caught:
            client.get("/v1/me", patience_seconds=0)
    assert type(caught.value) is known
    assert caught.value.message == "it happened"
    assert caught.value.remedy == "do this"


def test_codes_are_told_apart() -> None:
    assert len({cls.code for cls in OURS}) == len(OURS)


@pytest.mark.parametrize(
    ("status", "family"),
    [(401, Unauthorized), (404, NotFound), (422, BadInput), (503, Disconnected), (418, SubletError)],
)
def test_a_code_of_a_newer_studio_is_its_status_s_family(status: int, family: type[SubletError]) -> None:
    found = error_of_answer(status, b'{"code": "from_the_future", "message": "m", "remedy": "r"}')
    assert type(found) is family


def test_a_lost_worker_may_have_begun_unless_it_says_it_had_not() -> None:
    lost = error_from({"code": "worker_lost", "message": "m"})
    assert isinstance(lost, WorkerLost)
    assert lost.begun
    lost = error_from({"code": "worker_lost", "message": "m", "begun": False, "reason": "why"})
    assert isinstance(lost, WorkerLost)
    assert (lost.begun, lost.reason) == (False, "why")


def test_what_the_operator_finds_it_by_is_noted_where_the_studio_failed() -> None:
    assert "r1" in str(error_from({"code": "internal", "message": "m", "id": "r1"}, 500).__notes__)
    assert not hasattr(error_from({"code": "not_found", "message": "m", "id": "r1"}, 404), "__notes__")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"detail": "x"}', b'{"code": 3}', b"\xff\xfe"])
def test_what_is_not_a_studio_s_error_is_none(body: bytes) -> None:
    assert error_of_answer(404, body) is None


# --- the token -----------------------------------------------------------------------------------------------


def test_the_token_is_in_one_header_and_nowhere_else(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with canned(lambda asked: said(ME)) as server:
        studio = sublet.connect(server.url, TOKEN)
        shown = f"{studio!r} {studio._client!r} {studio.address}"
        (asked,) = server.asked
    assert asked.headers["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in asked.path
    assert TOKEN not in str({k: v for k, v in asked.headers.items() if k != "Authorization"})
    assert TOKEN not in shown + caplog.text + "".join(capsys.readouterr())
    with pytest.raises(TypeError):
        pickle.dumps(studio)


@pytest.mark.parametrize(
    "url",
    [
        f"http://ann:{TOKEN}@127.0.0.1:1",
        f"http://127.0.0.1:1?token={TOKEN}",
        f"http://127.0.0.1:1#{TOKEN}",
        "ftp://127.0.0.1",
        "127.0.0.1:8470",
        "",
        "http://",
        "http://127.0.0.1:port",
    ],
)
def test_an_address_that_is_none_is_told_without_what_it_holds(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        sublet.connect(url or " ", TOKEN)
    assert TOKEN not in str(caught.value) + caught.value.remedy
    assert caught.value.remedy


def test_no_token_and_one_that_cannot_be_one_are_sent_nowhere() -> None:
    with canned(lambda asked: said(ME)) as server:
        for token in ("", "two words", "line\nbreak", "ü"):
            with pytest.raises(Unauthorized) as caught:
                sublet.connect(server.url, token or " ")
            assert token.strip() == "" or token not in str(caught.value)
        assert not server.asked


def test_plain_http_to_another_machine_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(Misconfigured, match="in the clear") as caught:
        sublet.connect("http://192.0.2.1:8470", TOKEN)
    assert "ssh -L" in caught.value.remedy
    assert Client("http://192.0.2.1:8470", TOKEN, in_the_clear=True)
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "[::1]"):
        assert Client(f"http://{host}:8470", TOKEN)


def test_a_redirect_is_not_followed_and_nobody_else_sees_the_token() -> None:
    with canned(lambda asked: said(ME)) as other:
        there = f"{other.url}/v1/me"
        with (
            canned(lambda asked: Answer(307, b"", {"Location": there})) as server,
            pytest.raises(Misconfigured, match="redirect") as caught,
        ):
            sublet.connect(server.url, TOKEN)
        assert other.url in str(caught.value)
        assert not other.asked


def test_a_wrong_token_is_told_at_once() -> None:
    with canned(lambda asked: error(401, "unauthorized", "the token does not open this")) as server:
        with pytest.raises(Unauthorized, match="does not open"):
            sublet.connect(server.url, TOKEN)
        assert len(server.asked) == 1


# --- addresses and certificates ------------------------------------------------------------------------------


def test_nothing_listens_there() -> None:
    with pytest.raises(Disconnected, match="there is no studio at") as caught:
        sublet.connect(f"http://127.0.0.1:{free_port()}", TOKEN)
    assert "SUBLET_URL" in caught.value.remedy
    assert "sublet serve" in caught.value.remedy


def test_what_answers_is_no_studio() -> None:
    for answer in (Answer(404, b"<html>no</html>"), Answer(200, b"<html>hello</html>")):
        with (
            canned(lambda asked, answer=answer: answer) as server,  # type: ignore[misc]
            pytest.raises(Misconfigured, match="not a studio") as caught,
        ):
            sublet.connect(server.url, TOKEN)
        assert "SUBLET_URL" in caught.value.remedy


def test_what_answers_does_not_speak_http() -> None:
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.sendall(b"SSH-2.0-OpenSSH\r\n")
            sock.close()

    threading.Thread(target=greet, daemon=True).start()
    with pytest.raises(Disconnected, match="there is no studio"):
        sublet.connect(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN)
    listener.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate for 127.0.0.1, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "studio")])
    now = datetime.datetime.now(datetime.UTC)
    import ipaddress

    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "studio.pem"
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_certificate_nobody_vouches_for_is_refused_with_what_to_do(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with canned(lambda asked: said(ME), tls=context) as server:
        with pytest.raises(Misconfigured, match="certificate") as caught:
            sublet.connect(server.url, TOKEN)
        assert "SSL_CERT_FILE" in caught.value.remedy
        assert not server.asked
        assert sublet.connect(server.url, TOKEN, certificate=str(certificate)).tenant == "ann"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert sublet.connect(server.url, TOKEN).tenant == "ann"
        with pytest.raises(Misconfigured, match="certificate file"):
            sublet.connect(server.url, TOKEN, certificate="/nowhere.pem")


def test_tls_to_a_port_that_has_none(certificate: Path) -> None:
    with canned(lambda asked: said(ME)) as server, pytest.raises((Misconfigured, Disconnected)) as caught:
        sublet.connect(server.url.replace("http:", "https:"), TOKEN)
    assert TOKEN not in str(caught.value)


def test_a_path_before_ours_is_kept() -> None:
    with canned(lambda asked: said(ME)) as server:
        sublet.connect(f"{server.url}/studio/", TOKEN)
        assert server.asked[0].path == "/studio/v1/me"
    assert str(parse_address("https://[::1]:9/a/")) == "https://[::1]:9/a"


# --- again ---------------------------------------------------------------------------------------------------


def test_a_cut_request_is_sent_again_until_the_patience_is_over() -> None:
    cuts = [Answer(cut=True), Answer(502, b"bad gateway"), error(503, "disconnected"), said(ME)]
    with canned(lambda asked: cuts.pop(0)) as server:
        client = Client(server.url, TOKEN)
        client._reached = True
        assert client.get("/v1/me") == ME
        assert len(server.asked) == 4
    with canned(lambda asked: Answer(cut=True)) as server:
        client = Client(server.url, TOKEN, patience_seconds=0.3)
        client._reached = True
        with pytest.raises(Disconnected, match="cannot be reached"):
            client.get("/v1/me")
        assert len(server.asked) > 2


def test_half_an_answer_is_no_answer() -> None:
    answers = [Answer(200, b'{"tenant": "ann", "scope": "user"}', cut_after=10), said(ME)]
    with canned(lambda asked: answers.pop(0)) as server:
        client = Client(server.url, TOKEN)
        client._reached = True
        assert client.get("/v1/me") == ME


def test_asked_too_often_it_waits_as_long_as_it_was_told() -> None:
    import time

    answers = [error(429, "too_many", Retry_After="1"), said(ME)]
    with canned(lambda asked: answers.pop(0)) as server:
        client = Client(server.url, TOKEN)
        client._reached = True
        began = time.monotonic()
        assert client.get("/v1/me") == ME
        assert time.monotonic() - began >= 1.0


def test_a_refusal_is_not_asked_again() -> None:
    with canned(lambda asked: error(409, "quota_reached")) as server:
        client = Client(server.url, TOKEN)
        with pytest.raises(QuotaReached):
            client.get("/v1/me")
        assert len(server.asked) == 1


def test_connections_are_kept_and_a_stale_one_is_replaced_without_a_pause() -> None:
    ports: list[int] = []

    def answer(asked: Asked) -> Answer:
        return said(ME)

    with canned(answer) as server:
        client = Client(server.url, TOKEN, patience_seconds=0)
        for _ in range(3):
            client.get("/v1/me")
        assert len(client._pool.idle) == 1
        ports.append(client._pool.idle[0][1].sock.getsockname()[1])
        client._pool.idle[0][1].sock.shutdown(socket.SHUT_RDWR)  # as a server that hung up meanwhile
        assert client.get("/v1/me") == ME
        assert client._pool.idle[0][1].sock.getsockname()[1] not in ports
        client.close()
        assert not client._pool.idle


def test_a_forked_child_uses_no_connection_of_its_parent_s() -> None:
    with canned(lambda asked: said(ME)) as server:
        client = Client(server.url, TOKEN)
        client.get("/v1/me")
        (_, connection) = client._pool.idle[0]
        pid = os.fork()
        if pid == 0:
            fine = client.get("/v1/me") == ME and client._pool.idle[0][1] is not connection
            os._exit(0 if fine else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert client.get("/v1/me") == ME


# --- anywhere ------------------------------------------------------------------------------------------------


def test_the_client_imports_nothing_that_only_linux_has() -> None:
    code = """
        import sys
        for name in ("fcntl", "resource", "pwd", "grp", "termios", "apsw", "numpy", "torch", "fastapi"):
            sys.modules[name] = None
        import sublet
        sublet.connect, sublet.Studio, sublet.Session
        import sublet.client.lease, sublet.client.worker, sublet.client.stream, sublet.client.state
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_importing_sublet_does_not_import_the_client() -> None:
    code = "import sys, sublet; assert not [m for m in sys.modules if m.startswith('sublet.client')]"
    subprocess.run([sys.executable, "-c", code], check=True)
