"""Calls through a real session host: run once, heard whole, whoever is cut off or killed."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sublet.core.leasing.lease import EndReason
from sublet.core.studio import frames
from sublet.store.codec import TreeCodec
from sublet.studio.holder import finding
from sublet.studio.holder.call_queue import WAITING_MOST
from tests.homes import wait_until
from tests.studio.conftest import GIB, HostedSessions
from tests.studio.line import Line, ask, attach, code


@pytest.fixture
def session(hosted_here: HostedSessions) -> str:
    opened = hosted_here.open(vram=GIB, checkpoint="mine")
    hosted_here.becomes("active", opened)
    return opened


def test_code_prints_shows_and_counts(hosted_here: HostedSessions, session: str) -> None:
    heard = code(hosted_here.settings, session, "x = 20\nprint('hello')\nx + 1").all()
    assert heard.text() == "hello\n"
    assert heard.shown[-1]["data"]["text/plain"] == "21"
    assert heard.done["ok"] is True
    again = code(hosted_here.settings, session, "import sys; print(x, file=sys.stderr)").all()
    assert again.text(frames.ERR) == "20\n"  # the session remembers
    wait_until(lambda: hosted_here.look(session).session.calls == 2)
    assert hosted_here.look(session).session.errors == 0


def test_what_the_code_raises_is_its_answer(hosted_here: HostedSessions, session: str) -> None:
    heard = code(hosted_here.settings, session, "def f():\n    return 1 / 0\nf()").all()
    assert heard.done["ok"] is False
    told = frames.read_head(heard.parts[0])
    assert told["kind"] == "ZeroDivisionError"
    assert "return 1 / 0" in str(told["trace"])
    wait_until(lambda: hosted_here.look(session).session.errors == 1)


def test_a_call_is_run_once_whoever_sends_it_again(hosted_here: HostedSessions, session: str) -> None:
    code(hosted_here.settings, session, "count = 0").all()
    text = "count += 1; print(count)"
    first = code(hosted_here.settings, session, text, call="one").all()
    again = code(hosted_here.settings, session, text, call="one").all()
    assert first.text() == again.text() == "1\n"
    assert code(hosted_here.settings, session, "count").all().shown[-1]["data"]["text/plain"] == "1"
    gone = code(hosted_here.settings, session, text, call="one").all()
    assert (
        gone.failed["code"] == "stale"
    )  # its answer made room for the next one's; still it is not run again


def test_who_was_cut_off_comes_back_at_the_byte_it_had(hosted_here: HostedSessions, session: str) -> None:
    text = "import time\nfor i in range(40):\n    print(i, flush=True)\n    time.sleep(0.02)\n'end'"
    line = code(hosted_here.settings, session, text, call="cut")
    seen, at = [], 0
    for kind, data in line.frames():
        seen.append((kind, data))
        at = line.heard.read
        if len(seen) == 5:
            break
    line.sock.close()
    time.sleep(0.2)
    rest = attach(hosted_here.settings, session, "cut", at).all()
    whole = b"".join(d for k, d in seen + rest.frames if k == frames.OUT).decode()
    assert whole.split() == [str(i) for i in range(40)]
    assert rest.done["ok"] is True
    everything = attach(hosted_here.settings, session, "cut").all()
    assert everything.text().split() == [str(i) for i in range(40)]


def test_a_call_nobody_listens_to_goes_on(hosted_here: HostedSessions, session: str) -> None:
    text = "print('in', flush=True); import time; time.sleep(0.4); done = 'yes'"
    line = code(hosted_here.settings, session, text, call="alone")
    next(line.frames())
    line.sock.close()
    after = code(hosted_here.settings, session, "print(done)").all()  # waits for its turn
    assert after.text() == "yes\n"


def test_an_interrupt_ends_the_call_and_not_the_session(hosted_here: HostedSessions, session: str) -> None:
    line = code(
        hosted_here.settings, session, "print('in', flush=True)\nimport time\ntime.sleep(60)", call="long"
    )
    for kind, _ in line.frames():
        if kind == frames.OUT:
            break
    stop = {"op": "interrupt", "session": session, "tenant": "ann", "call": "long"}
    assert ask(hosted_here.settings, **stop).done["ok"] is True
    heard = line.all()
    assert heard.done["ok"] is False
    assert frames.read_head(heard.parts[-1])["kind"] == "KeyboardInterrupt"
    assert code(hosted_here.settings, session, "print('still')").all().text() == "still\n"
    assert ask(hosted_here.settings, **stop).failed["code"] == "stale"


def test_a_call_that_waits_for_its_turn_is_interrupted_and_not_the_one_before_it(
    hosted_here: HostedSessions, session: str
) -> None:
    settings = hosted_here.settings
    first = code(settings, session, "import time\nprint('in', flush=True)\ntime.sleep(60)", call="a")
    next(frame for frame in first.frames() if frame[0] == frames.OUT)
    second = code(settings, session, "print('never')\ntime.sleep(60)", call="b")
    stop = {"op": "interrupt", "session": session, "tenant": "ann"}
    wait_until(lambda: ask(settings, **stop, call="b").frames[-1][0] == frames.DONE)
    time.sleep(0.3)
    assert ask(settings, **stop, call="a").done["ok"] is True, "it was hit by what was meant for the other"
    for line in (first, second):
        heard = line.all()
        assert heard.done["ok"] is False
        assert frames.read_head(heard.parts[-1])["kind"] == "KeyboardInterrupt"
        assert "never" not in heard.text()


def test_only_so_many_calls_wait_and_the_next_is_told_so(hosted_here: HostedSessions, session: str) -> None:
    settings, where, extra = hosted_here.settings, {"session": session, "tenant": "ann"}, 5
    first = code(settings, session, "import time\nprint('in', flush=True)\ntime.sleep(600)", call="first")
    next(frame for frame in first.frames() if frame[0] == frames.OUT)
    with ThreadPoolExecutor(WAITING_MOST + extra) as listeners:
        lines = [code(settings, session, f"print({i})", call=f"w{i}") for i in range(WAITING_MOST + extra)]
        heard = [listeners.submit(line.all) for line in lines]
        wait_until(lambda: sum(one.done() for one in heard) == extra)
        head = {"op": "call", **where, "call": "more", "parts": 1}
        large = Line(settings, head, [b"x" * (8 << 20)]).all()
        assert large.failed["code"] == "too_many"
        assert f"{WAITING_MOST} calls wait in this session" in str(large.failed["message"])
        assert attach(settings, session, "more").all().failed["code"] == "stale"  # it was not begun
        assert ask(settings, op="interrupt", **where, call="first").done["ok"] is True
        all_heard = [one.result() for one in heard]
    refused = [one for one in all_heard if frames.FAIL in dict(one.frames)]
    assert [one.failed["code"] for one in refused] == ["too_many"] * extra
    printed = {one.text() for one in all_heard if one not in refused}
    assert len(printed) == WAITING_MOST
    assert code(settings, session, "print('again')", call="more").all().text() == "again\n"


def test_readers_that_do_not_read_take_no_memory_of_the_session_host(
    hosted_here: HostedSessions, session: str
) -> None:
    settings, where = hosted_here.settings, {"session": session, "tenant": "ann"}
    size, readers = 64 << 20, 10
    data = b"".join(bytes(p) for p in TreeCodec().encode({"w": b"x" * size}))
    assert ask(settings, [data], op="save", **where).done["version"] == 1
    before = anonymous_bytes(finding.session_host_pid(settings))
    lines = [Line(settings, {"op": "load", **where}) for _ in range(readers)]
    for line in lines:
        assert next(line.frames())[0] == frames.DONE  # the rest waits for who does not read it
    taken = anonymous_bytes(finding.session_host_pid(settings)) - before
    assert taken < readers * size / 4
    assert lines[-1].all().parts == [data]
    for line in lines:
        line.sock.close()


def anonymous_bytes(pid: int) -> int:
    """The memory of a process that the kernel cannot drop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_another_tenants_session_is_not_there(hosted_here: HostedSessions, session: str) -> None:
    for tenant in ("bea", "", "a" * 63):
        heard = code(hosted_here.settings, session, "1", tenant=tenant).all()
        assert heard.failed["code"] == "not_found"
    nobody = code(hosted_here.settings, "S" + "0" * 20, "1").all()
    assert nobody.failed["code"] == "not_found"
    for op in ("interrupt", "save", "load", "answer"):
        heard = ask(
            hosted_here.settings,
            [b"x"] if op == "save" else [],
            op=op,
            session=session,
            tenant="bea",
            call="c",
            number=1,
        )
        assert heard.failed["code"] == "not_found"


def test_a_revoked_lease_ends_the_call_with_its_reason(hosted_here: HostedSessions, session: str) -> None:
    line = code(hosted_here.settings, session, "print('in', flush=True)\nimport time\ntime.sleep(60)")
    next(line.frames())
    lease = hosted_here.look(session).lease
    assert lease is not None
    hosted_here.ledger.revoke(
        lease.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=0, actor="op"
    )
    told = line.all().failed
    assert told["code"] == "worker_lost"
    assert "maintenance" in told["message"]
    refused = code(hosted_here.settings, session, "1").all()
    assert refused.failed["code"] in ("lease_lost", "worker_lost")


def test_a_killed_worker_is_told(hosted_here: HostedSessions, session: str) -> None:
    line = code(hosted_here.settings, session, "import os\nprint('in', flush=True)\nos.kill(os.getpid(), 9)")
    assert line.all().failed["code"] == "worker_lost"
    hosted_here.becomes("suspended", session)
    hosted_here.ledger.resume_session(session, "ann")
    hosted_here.becomes("active", session)
    assert code(hosted_here.settings, session, "print('again')").all().text() == "again\n"


def test_what_a_session_saves_is_there_after_a_loss(hosted_here: HostedSessions, session: str) -> None:
    save = "import sublet\nsublet.save({'epoch': 3, 'name': 'x'})"
    assert code(hosted_here.settings, session, save).all().done["ok"] is True
    assert hosted_here.look(session).session.checkpoint_bytes > 0
    lease = hosted_here.look(session).lease
    assert lease is not None
    os.kill(lease.holder.pid, signal.SIGKILL)
    hosted_here.becomes("suspended", session)
    hosted_here.ledger.resume_session(session, "ann")
    hosted_here.becomes("active", session)
    heard = code(hosted_here.settings, session, "import sublet\nsublet.saved()").all()
    assert heard.shown[-1]["data"]["text/plain"] == "{'epoch': 3, 'name': 'x'}"
    loaded = ask(hosted_here.settings, op="load", session=session, tenant="ann")
    assert TreeCodec().decode(memoryview(loaded.parts[0])) == {"epoch": 3, "name": "x"}


def test_a_client_saves_and_loads(hosted_here: HostedSessions, session: str) -> None:
    where = {"session": session, "tenant": "ann"}
    assert ask(hosted_here.settings, op="load", **where).failed["code"] == "not_found"
    data = b"".join(bytes(p) for p in TreeCodec().encode({"w": [1, 2]}))
    assert ask(hosted_here.settings, [data], op="save", **where).done["version"] == 1
    assert ask(hosted_here.settings, [data], op="save", **where).done["version"] == 2
    assert ask(hosted_here.settings, op="load", **where).parts == [data]
    assert hosted_here.ledger.head("studio/ann/mine") is not None


def test_garbage_on_the_socket_harms_nobody(hosted_here: HostedSessions, session: str) -> None:
    pid = finding.session_host_pid(hosted_here.settings)
    for junk in (
        b"\xff" * 4096,
        frames.HEADER.pack(frames.HEAD, 1 << 60),
        frames.HEADER.pack(frames.PART, 5) + b"abcde",
        frames.frame(frames.HEAD, b"[1]"),
        frames.frame(frames.HEAD, b'{"op":"no"}'),
        frames.frame(frames.HEAD, b'{"op":"call","session":5}'),
        frames.head_frame(
            frames.HEAD, {"op": "call", "session": session, "tenant": "ann", "call": "../x", "parts": 0}
        ),
        frames.head_frame(
            frames.HEAD,
            {
                "op": "call",
                "session": session,
                "tenant": "ann",
                "call": "c",
                "target": "os:system",
                "parts": 1,
            },
        )
        + frames.frame(frames.PART, b"x"),
        b"",
    ):
        sock = finding.connected(hosted_here.settings)
        sock.sendall(junk)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
        sock.close()
        assert all(kind == frames.FAIL for kind, _ in frames.FrameReader().feed(answer))
    assert finding.session_host_pid(hosted_here.settings) == pid
    assert code(hosted_here.settings, session, "print(1)").all().text() == "1\n"


def test_a_flood_is_heard_whole_and_slowly_enough(hosted_here: HostedSessions, session: str) -> None:
    text = "for i in range(20000):\n    print('x' * 99)"
    heard = code(hosted_here.settings, session, text).all()
    assert len(heard.text()) == 2_000_000
