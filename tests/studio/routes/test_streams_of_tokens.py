"""Threat 30: a token that is revoked ends every stream it has, within 2 s, and not the call."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator

import pytest

from sublet.core.studio import frames
from sublet.studio.edge.relay import SessionHostRelay
from sublet.studio.routes import calls
from tests.studio.conftest import GIB, HostedSessions
from tests.studio.running import Running, running
from tests.waiting import wait_until

#: On a crowded machine; on a quiet one it is under two.
SOON_SECONDS = 10.0
SAYS_AND_WAITS = "print('in', flush=True)\nimport time\ntime.sleep(600)"
SAYS_FOR_EVER = "while True: print('x' * 10_000, flush=True)"


@pytest.fixture
def attended(hosted_here: HostedSessions) -> Iterator[Running]:
    with running(
        hosted_here.ledger, hosted_here.settings, relay=SessionHostRelay(hosted_here.settings)
    ) as found:
        yield found


@pytest.fixture
def session(hosted_here: HostedSessions) -> str:
    opened = hosted_here.open(vram=GIB)
    hosted_here.becomes("active", opened)
    return opened


def _asked(
    studio: Running, token: str, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=60)
    headers = {"Authorization": f"Bearer {token}", **({"Content-Type": kind} if body else {})}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    return answer


def _revoke(studio: Running, token: str) -> float:
    studio.ledger.revoke_token(token.split("_")[1], actor="test")
    return time.monotonic()


def test_the_lines_of_a_call_end_with_their_token(
    attended: Running, session: str, hosted_here: HostedSessions
) -> None:
    token = attended.token("ann")
    body = json.dumps({"code": SAYS_AND_WAITS, "call": "c1"}).encode()
    lines = _asked(attended, token, "POST", f"/v1/sessions/{session}/run", body)
    assert json.loads(lines.readline())["text"] == "in\n"
    at = _revoke(attended, token)
    said = [json.loads(line) for line in lines.read().splitlines()]
    assert time.monotonic() - at < SOON_SECONDS
    assert said[-1]["kind"] == "failed"
    assert said[-1]["error"]["code"] == "token_revoked"
    assert "the call goes on" in said[-1]["error"]["message"]
    assert hosted_here.status(session).value == "active"
    wait_until(lambda: not attended.service.tokens._holds)


def test_the_frames_of_a_call_end_with_their_token(attended: Running, session: str) -> None:
    token = attended.token("ann")
    head = frames.message(
        frames.HEAD, {"target": "code"}, [json.dumps({"code": SAYS_AND_WAITS, "name": "x"}).encode()]
    )
    sent = b"".join(bytes(piece) for piece in head)
    answer = _asked(attended, token, "POST", f"/v1/sessions/{session}/calls?call=c2", sent, calls.FRAMES_TYPE)
    reader = frames.FrameReader(frames.ANSWER_KINDS)
    assert reader.feed(answer.read1(1 << 16))
    at = _revoke(attended, token)
    last = [one for data in iter(lambda: answer.read1(1 << 16), b"") for one in reader.feed(data)][-1]
    assert time.monotonic() - at < SOON_SECONDS
    assert last[0] == frames.FAIL
    assert frames.read_head(last[1])["code"] == "token_revoked"


def test_a_reader_that_takes_nothing_is_cut_with_its_token(attended: Running, session: str) -> None:
    """Its last words would wait for it for ever."""
    token = attended.token("ann")
    body = json.dumps({"code": SAYS_FOR_EVER, "call": "c3"}).encode()
    answer = _asked(attended, token, "POST", f"/v1/sessions/{session}/run", body)
    wait_until(lambda: attended.service.tokens._holds)
    at = _revoke(attended, token)
    wait_until(lambda: not attended.service.tokens._holds)
    assert time.monotonic() - at < SOON_SECONDS
    try:
        said = answer.read()
    except (http.client.IncompleteRead, OSError):
        pass  # nothing could be said any more
    else:  # the cell had not yet said enough to fill what lies between the two
        assert json.loads(said.splitlines()[-1])["error"]["code"] == "token_revoked"
    attended.ask("POST", f"/v1/sessions/{session}/interrupt", attended.operator)


def test_events_end_with_their_token(attended: Running) -> None:
    token = attended.token("ann")
    events = _asked(attended, token, "GET", "/v1/events")
    assert events.readline() == b": sublet\n"
    at = _revoke(attended, token)
    assert b"event: token_revoked" in events.read()
    assert time.monotonic() - at < SOON_SECONDS
    wait_until(lambda: not attended.service.tokens._holds)


def test_the_stream_of_another_token_goes_on(attended: Running, session: str) -> None:
    token, other = attended.token("ann"), attended.token("ben")
    body = json.dumps({"code": "import time\nprint('in', flush=True)\ntime.sleep(2.5)\n'out'"}).encode()
    lines = _asked(attended, token, "POST", f"/v1/sessions/{session}/run", body)
    lines.readline()
    _revoke(attended, other)
    assert json.loads(lines.read().splitlines()[-1])["kind"] == "done"


@pytest.mark.parametrize(
    ("shown", "data"),
    [
        ('{"data":{"a":NaN}}', {"a": None}),
        ('{"data":{"a":[Infinity,-Infinity,1e999,1.5]}}', {"a": [None, None, None, 1.5]}),
        ('{"data":{"a":1}}', {"a": 1}),
        ("not json", {}),
    ],
)
def test_a_display_is_json_whatever_the_worker_sends(shown: str, data: dict[str, object]) -> None:
    """A display with NaN in it raised, and cut its own stream."""
    assert json.loads(calls._display_line(shown.encode()))["data"] == data


def test_a_display_that_is_too_deep_is_empty() -> None:
    deep = '{"data":' + "[" * 100_000 + "]" * 100_000 + "}"
    assert json.loads(calls._display_line(deep.encode()))["data"] == {}
