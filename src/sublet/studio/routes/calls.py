"""The routes that reach a session's worker: run code, call functions, answer questions, save and load state.

Rules of this file:
- The ledger says whose session it is and on which host, before the session host is asked. A session of
  another host is answered with 421.
- A call goes on when its client disconnects; the same call id attaches to it again. Only `interrupt` stops
  it.
- Bytes of calls and states pass through; the service opens nothing but the JSON of `run`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from sublet.core.errors import BadInput, Elsewhere, LeaseLost, NotFound, TokenExpired, TokenRevoked, TooLarge
from sublet.core.studio import frames
from sublet.core.studio.session import SessionStatus
from sublet.core.studio.token import Credential
from sublet.machine.spill import SpillRoom
from sublet.studio.edge.auth import Access, BodyLimit, credential, terms
from sublet.studio.edge.relay import (
    CHUNK_BYTES,
    SILENCE_SECONDS,
    AnswerEnd,
    FrameFollower,
    RelayedOperation,
    failure,
)
from sublet.studio.edge.streams import Stream
from sublet.studio.edge.token_watch import TokenHold
from sublet.studio.edge.wire import Json, dumped, error_json, shown, told
from sublet.studio.routes.requests import Interrupt, RunCode
from sublet.studio.routes.sessions import SessionReads, session_id_of
from sublet.studio.service import Service

FRAMES_TYPE = "application/x-sublet-frames"
LINES_TYPE = "application/x-ndjson"
STATE_TYPE = "application/octet-stream"
#: Of a body whose size its request does not say: more than any may have.
UNKNOWN_BYTES = 1 << 62
#: Of what an exception says of itself.
ERROR_MOST_BYTES = 16 << 20
#: After this long without output a call is answered with the beginning of a stream.
FIRST_SECONDS = 1.0
#: How soon a silent call lets the service leave.
LOOK_SECONDS = 0.5
_NUMBER = re.compile(r"[0-9]{1,18}")


class CallRoutes:
    def __init__(self, service: Service, sessions: SessionReads) -> None:
        self._service = service
        self._sessions = sessions

    async def _here(self, request: Request, *, begins: bool = False) -> tuple[str, Credential]:
        """The path's session, if it is the caller's and on this host. With `begins` its lease must not be
        over: the session host may learn of that a moment after the ledger."""
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

    async def _followed(
        self, operation: RelayedOperation, head: dict[str, Any], who: Credential
    ) -> tuple[AsyncIterator[bytes], _Held]:
        """The call's output and what it holds. A call that is refused before its first output raises that
        error."""
        first = await operation.soon(FIRST_SECONDS)
        if first is not None and len(first) >= frames.HEADER.size and first[0] == frames.FAIL:
            for kind, payload in frames.FrameReader(frames.ANSWER_KINDS).feed(first):
                if kind == frames.FAIL:
                    operation.close()
                    raise failure(frames.read_head(payload))
        tenant = head["tenant"]
        self._service.streams.enter(tenant)
        hold = self._service.tokens.join(TokenHold(who.token_id))
        closed = self._service.meters.own.stream("call")
        over = self._service.tracing.begin(
            "session.call", {"sublet.session_id": head["session"], "sublet.call_id": head["call"]}
        )

        def close() -> None:
            operation.close()
            self._service.tokens.leave(hold)
            over()
            closed()
            self._service.streams.leave(tenant)

        return _passing(self._service, operation, first, hold), _Held(close, hold)

    @terms(Access.USER, body=BodyLimit.JSON)
    async def run(self, request: Request, session_id: str, body: RunCode) -> Stream:
        session_id, who = await self._here(request, begins=True)
        call = body.call or secrets.token_hex(8)
        head = {
            "op": "call",
            "session": session_id,
            "tenant": who.tenant,
            "call": call,
            "target": "code",
            "attach": False,
        }
        operation = await self._service.relay.begin()
        try:
            await operation.send(
                frames.message(
                    frames.HEAD, head, [json.dumps({"code": body.code, "name": f"<{call}>"}).encode()]
                )
            )
            pieces, held = await self._followed(operation, head, who)
        except BaseException:
            operation.close()
            raise
        request_id = request.scope["sublet"].id
        return Stream(
            _as_lines(pieces, call, request_id),
            LINES_TYPE,
            close=held.close,
            headers={"X-Call-Id": call},
            cut_when=held.is_over,
        )

    @terms(Access.USER, body=BodyLimit.CALL)
    async def call(
        self,
        request: Request,
        session_id: str,
        call: Annotated[str, Query(max_length=64)],
        after: Annotated[int, Query(ge=0, le=1 << 53)] = 0,
    ) -> Stream:
        session_id, who = await self._here(request, begins=_sends_something(request))
        head = {
            "op": "call",
            "session": session_id,
            "tenant": who.tenant,
            "call": call_id_of(call),
            "after": after,
        }
        operation = await self._service.relay.begin()
        try:
            await _send_body(operation, request, head, self._service.room_of(who.tenant))
            pieces, held = await self._followed(operation, head, who)
        except BaseException:
            operation.close()
            raise
        return Stream(
            pieces, FRAMES_TYPE, close=held.close, headers={"X-Call-Id": call}, cut_when=held.is_over
        )

    @terms(Access.USER, body=BodyLimit.CALL)
    async def answer(
        self, request: Request, session_id: str, call: str, number: str, ok: bool = True
    ) -> Json:
        session_id, who = await self._here(request)
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
        async with self._service.relay.operation() as operation:
            await _send_body(operation, request, head, self._service.room_of(who.tenant))
            await operation.answer(frames.HEAD_MOST_BYTES)
        return Json({"call": call, "number": int(number)})

    @terms(Access.USER, body=BodyLimit.JSON)
    async def interrupt(self, request: Request, session_id: str, body: Interrupt | None = None) -> Json:
        session_id, who = await self._here(request)
        wanted = body.call if body is not None and body.call else ""
        head = {"op": "interrupt", "session": session_id, "tenant": who.tenant, "call": wanted}
        async with self._service.relay.operation() as operation:
            await operation.send(frames.message(frames.HEAD, head, []))
            await operation.answer(frames.HEAD_MOST_BYTES)
        return Json({"interrupted": True})

    @terms(Access.USER, body=BodyLimit.CALL)
    async def save(self, request: Request, session_id: str) -> Json:
        session_id, who = await self._here(request)
        head = {"op": "save", "session": session_id, "tenant": who.tenant, "parts": 1}
        async with self._service.relay.operation() as operation:
            await _send_bytes(operation, request, head, self._service.room_of(who.tenant))
            done, _ = await operation.answer(frames.HEAD_MOST_BYTES)
        return Json({"version": done.get("version"), "bytes_written": done.get("bytes_written")})

    @terms(Access.USER)
    async def load(
        self, request: Request, session_id: str, version: Annotated[int, Query(ge=0, le=1 << 53)] = 0
    ) -> Response:
        session_id, who = await self._here(request)
        head = {"op": "load", "session": session_id, "tenant": who.tenant, "version": version}
        operation = await self._service.relay.begin()
        try:
            await operation.send(frames.message(frames.HEAD, head, []))
            size, pieces = await _one_part(operation)
        except BaseException:
            operation.close()
            raise
        hold = self._service.tokens.join(TokenHold(who.token_id))

        def close() -> None:
            operation.close()
            self._service.tokens.leave(hold)

        # Cut short of the announced length: the reader sees that it is not whole.
        return Stream(
            pieces,
            STATE_TYPE,
            close=close,
            headers={"Content-Length": str(size)},
            cut_when=lambda: bool(hold.why),
        )


def add_calls(router: APIRouter, service: Service, sessions: SessionReads) -> None:
    routes = CallRoutes(service, sessions)
    router.post(
        "/v1/sessions/{session_id}/run",
        summary="Run source code in the session's worker; lines of JSON tell what it prints, shows and "
        "returns",
    )(routes.run)
    router.post(
        "/v1/sessions/{session_id}/calls",
        summary="A call as frames: its parts in, what it says out; the same ?call= again takes it up from "
        "byte ?after=",
        openapi_extra=_frames_body("the parts of the call"),
    )(routes.call)
    router.post(
        "/v1/sessions/{session_id}/calls/{call}/answers/{number}",
        summary="The answer to a question the call asked",
        openapi_extra=_frames_body("the parts of the answer"),
    )(routes.answer)
    router.post(
        "/v1/sessions/{session_id}/interrupt", summary="Stop what runs, as Ctrl-C would; the session stays"
    )(routes.interrupt)
    router.put(
        "/v1/sessions/{session_id}/state",
        summary="Save a state (the bytes of its tree) under the session's checkpoint",
        openapi_extra=_bytes_body("the tree's bytes"),
    )(routes.save)
    router.get("/v1/sessions/{session_id}/state", summary="The state that was saved last, or ?version=")(
        routes.load
    )


class _Held:
    """What an open stream holds: how to give it back, and whether its token is over."""

    def __init__(self, close: Callable[[], None], hold: TokenHold) -> None:
        self.close = close
        self._hold = hold

    def is_over(self) -> bool:
        return bool(self._hold.why)


async def _passing(
    service: Service, operation: RelayedOperation, data: bytes | None, hold: TokenHold
) -> AsyncIterator[bytes]:
    """Passes output on until the call is over, the session host is gone, its token is over, or the service
    leaves; the client then attaches to the call at another service."""
    ending, silent = AnswerEnd(), 0.0
    while data != b"":
        if hold.why:
            if ending.between_frames:
                yield _token_is_over(hold.why)
            return
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


def _token_is_over(why: str) -> bytes:
    error = (TokenRevoked if why == "revoked" else TokenExpired)(
        f"the token of this stream has {'been revoked' if why == 'revoked' else 'expired'}; the call goes on"
    )
    return frames.head_frame(
        frames.FAIL, {"code": error.code, "message": error.message, "remedy": error.remedy}
    )


def _sends_something(request: Request) -> bool:
    """Whether the request has a body. Without one it attaches to a call, which is possible after the lease
    too."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def call_id_of(text: str) -> str:
    """Checks a call id by the one rule the frames have."""
    return frames.call_id_of({"call": text})


# --- bodies in ---


async def _send_body(
    operation: RelayedOperation, request: Request, head: dict[str, Any], room: SpillRoom
) -> None:
    """Sends the client's frames behind a head of ours. If the client sent a head they pass as they come,
    otherwise they wait in the tenant's room and are counted first; they are never held in memory whole."""
    pieces = request.stream()
    said, rest = await _head_first(pieces)
    parts = FrameFollower((frames.PART,))
    counted = 0
    if said is not None:
        to_come = frames.count_of(said, "parts", default=0)
        await operation.send(
            [frames.head_frame(frames.HEAD, {**head, **_taken_from(said), "parts": to_come})]
        )
        async for data in _after(rest, pieces):
            counted += sum(1 for _ in parts.watch(data))
            if counted > to_come:
                raise BadInput("more parts came than the head said")
            await operation.send([data])
        if not parts.whole or counted < to_come:
            raise BadInput("fewer parts came than the head said; nothing was begun")
        return
    kept = room.collect()
    kept.begin(_length_of(request))
    async for data in _after(rest, pieces):
        counted += sum(1 for _ in parts.watch(data))
        kept.write(data)
    if not parts.whole:
        raise BadInput("the body ends in the middle of a frame; nothing was begun")
    extra = {"target": "pickled", "attach": counted == 0} if head["op"] == "call" else {}
    await operation.send([frames.head_frame(frames.HEAD, {**head, **extra, "parts": counted})])
    await _send_kept(operation, kept.done()[0])


async def _head_first(pieces: AsyncIterator[bytes]) -> tuple[dict[str, Any] | None, bytes]:
    """The head that the body begins with, if any, and the bytes read with it."""
    seen = b""
    async for data in pieces:
        seen += data
        if len(seen) < frames.HEADER.size:
            continue
        kind, length = frames.HEADER.unpack_from(seen)
        if kind != frames.HEAD:
            break
        frames.header(kind, length)  # refuses a head that is too large
        end = frames.HEADER.size + length
        if len(seen) >= end:
            return frames.read_head(seen[frames.HEADER.size : end]), seen[end:]
    return None, seen


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in pieces:
        if data:
            yield data


async def _send_kept(operation: RelayedOperation, kept: memoryview) -> None:
    for at in range(0, kept.nbytes, CHUNK_BYTES):
        await operation.send([kept[at : at + CHUNK_BYTES]])


def _length_of(request: Request) -> int:
    said = request.headers.get("content-length", "")
    return int(said) if said.isdecimal() else UNKNOWN_BYTES


def _taken_from(said: dict[str, Any]) -> dict[str, Any]:
    """The fields a client's head may set, which do not include whose session it is."""
    taken: dict[str, Any] = {}
    if "target" in said:
        taken["target"] = frames.text_of(said, "target", most=20)
    for name in ("ok", "attach"):
        if name in said:
            taken[name] = frames.flag_of(said, name)
    return taken


async def _send_bytes(
    operation: RelayedOperation, request: Request, head: dict[str, Any], room: SpillRoom
) -> None:
    """Sends a body as one part, whose length must be known before it is sent on."""
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        await operation.send([frames.head_frame(frames.HEAD, head), frames.header(frames.PART, int(length))])
        async for data in request.stream():
            if data:
                await operation.send([data])
        return
    kept = room.collect()
    kept.begin(UNKNOWN_BYTES)
    async for data in request.stream():
        kept.write(data)
    (whole,) = kept.done()
    await operation.send([frames.head_frame(frames.HEAD, head), frames.header(frames.PART, whole.nbytes)])
    await _send_kept(operation, whole)


# --- answers out ---


async def _one_part(operation: RelayedOperation) -> tuple[int, AsyncIterator[bytes]]:
    """The size of the part that follows DONE, and its bytes as they come."""
    seen = bytearray()
    while True:
        data = await operation.receive()
        seen += data
        at, kinds = 0, []
        while len(seen) - at >= frames.HEADER.size:
            kind, length = frames.HEADER.unpack_from(seen, at)
            kinds.append(kind)
            if kind == frames.PART:
                return length, _rest(operation, bytes(seen[at + frames.HEADER.size :]), length)
            if length > frames.HEAD_MOST_BYTES:
                raise BadInput("the session host sent a frame that cannot be read")
            if len(seen) - at - frames.HEADER.size < length:
                break
            payload = bytes(seen[at + frames.HEADER.size : at + frames.HEADER.size + length])
            if kind == frames.FAIL:
                raise failure(frames.read_head(payload))
            if kind == frames.DONE and not frames.count_of(frames.read_head(payload), "parts", default=0):
                raise NotFound("nothing was saved there yet", remedy="save a state first")
            at += frames.HEADER.size + length
        if not data:
            raise failure(
                {
                    "code": "disconnected",
                    "message": "the process that holds the session went away",
                    "remedy": "",
                }
            )


async def _rest(operation: RelayedOperation, first: bytes, size: int) -> AsyncIterator[bytes]:
    data = first
    while size > 0:
        piece = data[:size]
        size -= len(piece)
        if piece:
            yield piece
        if size and not (data := await operation.receive()):
            return  # shorter than announced: the reader sees that it is not whole


async def _as_lines(pieces: AsyncIterator[bytes], call: str, request_id: str) -> AsyncIterator[bytes]:
    """Turns frames into lines of JSON, for people and pages. It ends with the last line: parts of an answer
    that nobody is shown are not read."""
    reader = frames.FrameReader(frames.ANSWER_KINDS, part_most=ERROR_MOST_BYTES)
    done: dict[str, Any] | None = None
    over = False
    async for data in pieces:
        lines: list[bytes] = []
        for kind, payload in _fed(reader, data):
            if kind in (frames.OUT, frames.ERR):
                stream = "stdout" if kind == frames.OUT else "stderr"
                lines.append(
                    dumped({"kind": "text", "stream": stream, "text": payload.decode("utf-8", "replace")})
                )
            elif kind == frames.SHOW:
                lines.append(_display_line(payload))
            elif kind == frames.FAIL:
                lines.append(
                    dumped(
                        {
                            "kind": "failed",
                            "error": error_json(*told(failure(frames.read_head(payload))), request_id),
                        }
                    )
                )
                over = True
            elif kind == frames.DONE:
                done = frames.read_head(payload)
                if done.get("ok") or not frames.count_of(done, "parts", default=0):
                    lines.append(_done_line(done, call))
                    over = True
            elif kind == frames.PART and done is not None and not over:
                lines += [_error_line(payload), _done_line(done, call)]
                over = True
            elif kind == frames.BEAT:
                lines.append(b'{"kind":"beat"}')
        if lines:
            yield b"\n".join(lines) + b"\n"
        if over:
            return
    lost = {
        "code": "disconnected",
        "message": "the stream was cut; the call goes on",
        "remedy": f"follow it with POST …/calls?call={call}",
        "id": request_id,
    }
    yield dumped({"kind": "failed", "error": lost}) + b"\n"


def _fed(reader: frames.FrameReader, data: bytes) -> list[tuple[int, bytes]]:
    """A frame that is larger than its kind may be shown as is the call's end."""
    try:
        return reader.feed(data)
    except TooLarge as e:
        return [(frames.FAIL, frames.packed_head({"code": e.code, "message": e.message, "remedy": e.remedy}))]


def _display_line(payload: bytes) -> bytes:
    try:
        display = json.loads(payload, parse_constant=lambda name: None, parse_float=_finite)
    except (ValueError, RecursionError):
        display = None
    if not isinstance(display, dict):
        return dumped({"kind": "display", "data": {}})
    what = display.pop("what", "display")
    try:
        return dumped({**display, "kind": "result" if what == "result" else "display", "what": what})
    except (ValueError, RecursionError):
        return dumped({"kind": "display", "data": {}})


def _finite(text: str) -> float | None:
    """What no JSON has is shown as null, as a browser would: it must not cut its own stream."""
    number = float(text)
    return number if math.isfinite(number) else None


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
