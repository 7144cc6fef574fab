"""The routes that reach a session's worker: run code, call functions, answer its questions, save and load its state.

Rules of this file:
- The ledger is asked first whose session it is and where it lives; only then is the attendant. A session of another host is told so (421).
- A call goes on when its client goes away; the same call id takes it up again. Only `interrupt` stops it.
- Bytes of calls and states pass through; the service opens nothing but the JSON of `run`.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from sublet.core.errors import BadInput, Elsewhere, LeaseLost, NotFound
from sublet.core.session import SessionStatus
from sublet.core.token import Credential
from sublet.ports import sealed
from sublet.studio.auth import Body, Opens, credential, terms
from sublet.studio.bodies import Interrupt, RunCode
from sublet.studio.relay import CHUNK_BYTES, SILENCE_SECONDS, Ending, Operation, Passing, failure
from sublet.studio.service import Service
from sublet.studio.sessions import Sessions, session_id_of
from sublet.studio.streams import Stream
from sublet.studio.wire import Json, dumped, error_json, shown, told

FRAMES_TYPE = "application/x-sublet-frames"
LINES_TYPE = "application/x-ndjson"
STATE_TYPE = "application/octet-stream"
#: A body without a head is kept on disk above this until its parts are counted.
SPOOL_BYTES = 8 << 20
#: An answer of one piece: a state.
ANSWER_MOST_BYTES = 4 << 30
#: A call that says nothing for so long is answered with the beginning of a stream.
FIRST_SECONDS = 1.0
#: How soon a call that says nothing lets the service leave.
LOOK_SECONDS = 0.5
_NUMBER = re.compile(r"[0-9]{1,18}")


class Calls:
    def __init__(self, service: Service, sessions: Sessions) -> None:
        self._service = service
        self._sessions = sessions

    async def here(self, request: Request, *, begins: bool = False) -> tuple[str, Credential]:
        """The session of the path, which is the caller's and lives on this host; with `begins`, only if its lease is not over: whoever
        holds it may hear of that a moment later than the ledger says it."""
        who, session_id = credential(request), session_id_of(request)
        answer = await self._sessions.look(session_id, who)
        host = answer.session.host
        if host != self._service.host:
            raise Elsewhere(f"the session lives on host {host}, this service is that of {self._service.host}")
        if begins and answer.status in (SessionStatus.SUSPENDED, SessionStatus.ENDED):
            reason, detail = answer.why
            raise LeaseLost(
                f"the session has no GPU any more ({reason}: {detail}); nothing was begun",
                remedy="resume the session, or open a new one",
            )
        if not answer.session.ended_at:
            self._service.touches.add(session_id, who.tenant)
        return session_id, who

    async def once(self, head: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        async with self._service.relay.operation() as operation:
            await operation.send(sealed.message(sealed.HEAD, head, parts))
            return await operation.answer(ANSWER_MOST_BYTES)

    async def followed(self, operation: Operation, head: dict[str, Any]) -> tuple[AsyncIterator[bytes], Any]:
        """What the call says, its first words looked at: a refusal before any of them is an answer with its own status."""
        first = await operation.soon(FIRST_SECONDS)
        if first is not None and len(first) >= sealed.HEADER.size and first[0] == sealed.FAIL:
            for kind, payload in sealed.Frames(sealed.ANSWER_KINDS).feed(first):
                if kind == sealed.FAIL:
                    operation.close()
                    raise failure(sealed.read_head(payload))
        tenant = head["tenant"]
        self._service.streams.enter(tenant)
        closed = self._service.meters.own.stream("call")
        over = self._service.tracing.begin(
            "session.call", {"sublet.session_id": head["session"], "sublet.call_id": head["call"]}
        )

        def close() -> None:
            operation.close()
            over()
            closed()
            self._service.streams.leave(tenant)

        return _passing(self._service, operation, first), close


async def _passing(service: Service, operation: Operation, data: bytes | None) -> AsyncIterator[bytes]:
    """Until the call is over, its holder is gone, or the service leaves: then the client takes it up at another one."""
    ending, silent = Ending(), 0.0
    while data != b"":
        if data is None:
            silent += LOOK_SECONDS
            if service.leaving or silent > SILENCE_SECONDS:
                return
        else:
            silent = 0.0
            ending.watch(data)
            yield data
            if ending.over:
                return
        data = await operation.soon(LOOK_SECONDS)


def _sends_something(request: Request) -> bool:
    """Without a body, a call is only taken up again: that is possible after its lease, too."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def call_id_of(text: str) -> str:
    """As the frames have it: there is one rule of what an id may be."""
    return sealed.call_id_of({"call": text})


def add_calls(router: APIRouter, service: Service, sessions: Sessions) -> None:
    calls = Calls(service, sessions)

    @router.post(
        "/v1/sessions/{session_id}/run",
        summary="Run source code in the session's worker; lines of JSON tell what it prints, shows and returns",
    )
    @terms(Opens.USER, body=Body.JSON)
    async def run(request: Request, session_id: str, body: RunCode) -> Stream:
        session_id, who = await calls.here(request, begins=True)
        call = body.call or secrets.token_hex(8)
        head = {
            "op": "call",
            "session": session_id,
            "tenant": who.tenant,
            "call": call,
            "target": "code",
            "attach": False,
        }
        operation = await service.relay.begin()
        try:
            await operation.send(
                sealed.message(
                    sealed.HEAD, head, [json.dumps({"code": body.code, "name": f"<{call}>"}).encode()]
                )
            )
            pieces, close = await calls.followed(operation, head)
        except BaseException:
            operation.close()
            raise
        request_id = request.scope["sublet"].id
        return Stream(
            _as_lines(pieces, call, request_id), LINES_TYPE, close=close, headers={"X-Call-Id": call}
        )

    @router.post(
        "/v1/sessions/{session_id}/calls",
        summary="A call as frames: its parts in, what it says out; the same ?call= again takes it up from byte ?after=",
        openapi_extra=_frames_body("the parts of the call"),
    )
    @terms(Opens.USER, body=Body.CALL)
    async def call(
        request: Request,
        session_id: str,
        call: Annotated[str, Query(max_length=64)],
        after: Annotated[int, Query(ge=0, le=1 << 53)] = 0,
    ) -> Stream:
        session_id, who = await calls.here(request, begins=_sends_something(request))
        head = {
            "op": "call",
            "session": session_id,
            "tenant": who.tenant,
            "call": call_id_of(call),
            "after": after,
        }
        operation = await service.relay.begin()
        try:
            await _send_body(operation, request, head)
            pieces, close = await calls.followed(operation, head)
        except BaseException:
            operation.close()
            raise
        return Stream(pieces, FRAMES_TYPE, close=close, headers={"X-Call-Id": call})

    @router.post(
        "/v1/sessions/{session_id}/calls/{call}/answers/{number}",
        summary="The answer to a question the call asked",
        openapi_extra=_frames_body("the parts of the answer"),
    )
    @terms(Opens.USER, body=Body.CALL)
    async def answer(request: Request, session_id: str, call: str, number: str, ok: bool = True) -> Json:
        session_id, who = await calls.here(request)
        if _NUMBER.fullmatch(number) is None:
            raise NotFound("there is no such question", remedy="answer the number the question came with")
        head = {
            "op": "answer",
            "session": session_id,
            "tenant": who.tenant,
            "call": call_id_of(call),
            "number": int(number),
            "ok": ok,
        }
        async with service.relay.operation() as operation:
            await _send_body(operation, request, head)
            await operation.answer(sealed.HEAD_MOST_BYTES)
        return Json({"call": call, "number": int(number)})

    @router.post(
        "/v1/sessions/{session_id}/interrupt", summary="Stop what runs, as Ctrl-C would; the session stays"
    )
    @terms(Opens.USER, body=Body.JSON)
    async def interrupt(request: Request, session_id: str, body: Interrupt | None = None) -> Json:
        session_id, who = await calls.here(request)
        wanted = body.call if body is not None and body.call else ""
        await calls.once({"op": "interrupt", "session": session_id, "tenant": who.tenant, "call": wanted}, [])
        return Json({"interrupted": True})

    @router.put(
        "/v1/sessions/{session_id}/state",
        summary="Save a state (the bytes of its tree) under the session's checkpoint",
        openapi_extra=_bytes_body("the tree's bytes"),
    )
    @terms(Opens.USER, body=Body.CALL)
    async def save(request: Request, session_id: str) -> Json:
        session_id, who = await calls.here(request)
        head = {"op": "save", "session": session_id, "tenant": who.tenant, "parts": 1}
        async with service.relay.operation() as operation:
            await _send_bytes(operation, request, head)
            done, _ = await operation.answer(sealed.HEAD_MOST_BYTES)
        return Json({"version": done.get("version"), "bytes_written": done.get("bytes_written")})

    @router.get("/v1/sessions/{session_id}/state", summary="The state that was saved last, or ?version=")
    @terms(Opens.USER)
    async def load(
        request: Request, session_id: str, version: Annotated[int, Query(ge=0, le=1 << 53)] = 0
    ) -> Response:
        session_id, who = await calls.here(request)
        head = {"op": "load", "session": session_id, "tenant": who.tenant, "version": version}
        operation = await service.relay.begin()
        try:
            await operation.send(sealed.message(sealed.HEAD, head, []))
            size, pieces = await _one_part(operation)
        except BaseException:
            operation.close()
            raise
        return Stream(pieces, STATE_TYPE, close=operation.close, headers={"Content-Length": str(size)})


# --- bodies in ------------------------------------------------------------------------------------------------


async def _send_body(operation: Operation, request: Request, head: dict[str, Any]) -> None:
    """The client's frames behind a head of ours. Behind a head of the client's they pass as they come; without one they are counted
    first. None of them is held whole."""
    pieces = request.stream()
    said, rest = await _head_first(pieces)
    parts = Passing((sealed.PART,))
    counted = 0
    if said is not None:
        to_come = sealed.count_of(said, "parts", default=0)
        await operation.send(
            [sealed.head_frame(sealed.HEAD, {**head, **_taken_from(said), "parts": to_come})]
        )
        async for data in _after(rest, pieces):
            counted += sum(1 for _ in parts.watch(data))
            if counted > to_come:
                raise BadInput("more parts came than the head said")
            await operation.send([data])
        if not parts.whole or counted < to_come:
            raise BadInput("fewer parts came than the head said; nothing was begun")
        return
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as kept:
        async for data in _after(rest, pieces):
            counted += sum(1 for _ in parts.watch(data))
            kept.write(data)
        if not parts.whole:
            raise BadInput("the body ends in the middle of a frame; nothing was begun")
        extra = {"target": "pickled", "attach": counted == 0} if head["op"] == "call" else {}
        await operation.send([sealed.head_frame(sealed.HEAD, {**head, **extra, "parts": counted})])
        await _send_kept(operation, kept)


async def _head_first(pieces: AsyncIterator[bytes]) -> tuple[dict[str, Any] | None, bytes]:
    """The head the body begins with, if it does, and what came with it."""
    seen = b""
    async for data in pieces:
        seen += data
        if len(seen) < sealed.HEADER.size:
            continue
        kind, length = sealed.HEADER.unpack_from(seen)
        if kind != sealed.HEAD:
            break
        sealed.header(kind, length)  # refuses a head that is too large
        end = sealed.HEADER.size + length
        if len(seen) >= end:
            return sealed.read_head(seen[sealed.HEADER.size : end]), seen[end:]
    return None, seen


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in pieces:
        if data:
            yield data


async def _send_kept(operation: Operation, kept: IO[bytes]) -> None:
    kept.seek(0)
    while data := kept.read(CHUNK_BYTES):
        await operation.send([data])


def _taken_from(said: dict[str, Any]) -> dict[str, Any]:
    """What a client's head may say. Whose session it is, is not among it."""
    taken: dict[str, Any] = {}
    if "target" in said:
        taken["target"] = sealed.text_of(said, "target", most=20)
    for name in ("ok", "attach"):
        if name in said:
            taken[name] = sealed.flag_of(said, name)
    return taken


async def _send_bytes(operation: Operation, request: Request, head: dict[str, Any]) -> None:
    """A body that is one part. Its length must be known before it is sent on."""
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        await operation.send([sealed.head_frame(sealed.HEAD, head), sealed.header(sealed.PART, int(length))])
        async for data in request.stream():
            if data:
                await operation.send([data])
        return
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as kept:
        async for data in request.stream():
            kept.write(data)
        await operation.send([sealed.head_frame(sealed.HEAD, head), sealed.header(sealed.PART, kept.tell())])
        await _send_kept(operation, kept)


# --- answers out ----------------------------------------------------------------------------------------------


async def _one_part(operation: Operation) -> tuple[int, AsyncIterator[bytes]]:
    """The size and the bytes of the part that follows DONE, passed on as they come."""
    seen = bytearray()
    while True:
        data = await operation.receive()
        seen += data
        at, kinds = 0, []
        while len(seen) - at >= sealed.HEADER.size:
            kind, length = sealed.HEADER.unpack_from(seen, at)
            kinds.append(kind)
            if kind == sealed.PART:
                return length, _rest(operation, bytes(seen[at + sealed.HEADER.size :]), length)
            if length > sealed.HEAD_MOST_BYTES:
                raise BadInput("the attendant sent a frame that cannot be read")
            if len(seen) - at - sealed.HEADER.size < length:
                break
            payload = bytes(seen[at + sealed.HEADER.size : at + sealed.HEADER.size + length])
            if kind == sealed.FAIL:
                raise failure(sealed.read_head(payload))
            if kind == sealed.DONE and not sealed.count_of(sealed.read_head(payload), "parts", default=0):
                raise NotFound("nothing was saved there yet", remedy="save a state first")
            at += sealed.HEADER.size + length
        if not data:
            raise failure(
                {
                    "code": "disconnected",
                    "message": "the process that holds the session went away",
                    "remedy": "",
                }
            )


async def _rest(operation: Operation, first: bytes, size: int) -> AsyncIterator[bytes]:
    data = first
    while size > 0:
        piece = data[:size]
        size -= len(piece)
        if piece:
            yield piece
        if size and not (data := await operation.receive()):
            return  # shorter than was said: whoever reads sees that it is not whole


async def _as_lines(pieces: AsyncIterator[bytes], call: str, request_id: str) -> AsyncIterator[bytes]:
    """Frames as lines of JSON, for people and pages."""
    frames = sealed.Frames(sealed.ANSWER_KINDS)
    done: dict[str, Any] | None = None
    over = False
    async for data in pieces:
        lines: list[bytes] = []
        for kind, payload in frames.feed(data):
            if kind in (sealed.OUT, sealed.ERR):
                stream = "stdout" if kind == sealed.OUT else "stderr"
                lines.append(
                    dumped({"kind": "text", "stream": stream, "text": payload.decode("utf-8", "replace")})
                )
            elif kind == sealed.SHOW:
                lines.append(_display_line(payload))
            elif kind == sealed.FAIL:
                lines.append(
                    dumped(
                        {
                            "kind": "failed",
                            "error": error_json(*told(failure(sealed.read_head(payload))), request_id),
                        }
                    )
                )
                over = True
            elif kind == sealed.DONE:
                done = sealed.read_head(payload)
                if done.get("ok") or not sealed.count_of(done, "parts", default=0):
                    lines.append(_done_line(done, call))
                    over = True
            elif kind == sealed.PART and done is not None and not over:
                lines += [_error_line(payload), _done_line(done, call)]
                over = True
            elif kind == sealed.BEAT:
                lines.append(b'{"kind":"beat"}')
        if lines:
            yield b"\n".join(lines) + b"\n"
    if not over:
        lost = {
            "code": "disconnected",
            "message": "the stream was cut; the call goes on",
            "remedy": f"follow it with POST …/calls?call={call}",
            "id": request_id,
        }
        yield dumped({"kind": "failed", "error": lost}) + b"\n"


def _display_line(payload: bytes) -> bytes:
    try:
        display = json.loads(payload)
    except (ValueError, RecursionError):
        display = None
    if not isinstance(display, dict):
        return dumped({"kind": "display", "data": {}})
    what = display.pop("what", "display")
    return dumped({**display, "kind": "result" if what == "result" else "display", "what": what})


def _error_line(payload: bytes) -> bytes:
    try:
        said = json.loads(payload)
        name, text, trace = said["kind"], said["text"], said.get("trace", "")
    except (ValueError, KeyError, TypeError, RecursionError):
        name, text, trace = "Error", "the code failed, and said nothing that can be read", ""
    return dumped(
        {
            "kind": "error",
            "name": shown(str(name), 200),
            "message": str(text)[:100_000],
            "traceback": str(trace)[:200_000],
        }
    )


def _done_line(done: dict[str, Any], call: str) -> bytes:
    return dumped(
        {
            "kind": "done",
            "ok": bool(done.get("ok")),
            "launches": done.get("launches", 0),
            "seconds": done.get("seconds", 0),
            "call": call,
        }
    )


def _frames_body(what: str) -> dict[str, Any]:
    return {
        "requestBody": {
            "description": what,
            "content": {FRAMES_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    }


def _bytes_body(what: str) -> dict[str, Any]:
    return {
        "requestBody": {
            "description": what,
            "content": {STATE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    }
