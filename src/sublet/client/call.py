"""One call in a session, from its first byte to its answer, however often the connection is cut meanwhile.

Rules of this file:
- A call has an id that is made here. It is sent once; sending it again with the same id only listens to it.
  So a call whose connection was cut goes on at the byte that was read last: nothing is shown twice, nothing
  runs twice.
- A call without any answer may never have arrived. It is sent again only while the session still has the
  lease it was meant for.
- When the patience is over it is `Disconnected`: the call may still be running, and the message says how to
  listen to it again.
- Ctrl-C interrupts the call in the session, and its answer is waited for; a second one does not wait.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.client.errors import error_from
from sublet.client.facts import read_facts
from sublet.client.http import Client, Cut
from sublet.client.stream import CallReader, StreamMessage, chunk
from sublet.core.errors import Disconnected, LeaseLost, NotFound, Stale, SubletError, WorkerLost
from sublet.core.studio import frames

#: The session host says that it is there every ten seconds.
SILENCE_SECONDS = 35.0
#: Interrupting, or reporting that nobody answers a question, is worth a few tries.
SHORT_PATIENCE_SECONDS = 5.0
FRAMES_TYPE = "application/x-sublet-frames"

Parts = Sequence[bytes | bytearray | memoryview]
#: The answer to a question of a call.
Reply = tuple[bool, Parts]


class CallListener(Protocol):
    """Receives a call's output. Called by the thread that waits for the call, in the order of the output."""

    def text(self, stream: str, text: str) -> None: ...
    def show(self, display: bytes) -> None: ...
    def ask(self, head: dict[str, Any], parts: Sequence[bytearray]) -> Reply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The end of a call."""

    fine: bool
    parts: tuple[bytearray, ...]
    launches: int
    seconds: float
    interrupted: bool


def new_call_id() -> str:
    return "c" + secrets.token_hex(12)


class Call:
    def __init__(
        self,
        client: Client,
        session_id: str,
        target: str,
        parts: Parts | None,
        *,
        lease_id: str,
        call: str = "",
    ) -> None:
        """Without parts it is a call that was made before, and is listened to from its beginning."""
        self._client = client
        self._session = f"/v1/sessions/{session_id}"
        self._session_id = session_id
        self._lease_id = lease_id
        self.id = call or new_call_id()
        self._target = target
        self._parts = parts
        self._reader = CallReader()
        self._interrupted = False
        self._sent = self._resent = False

    def run(self, listener: CallListener) -> CallResult:
        while True:
            try:
                return self._through_cuts(listener)
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                self._interrupt()
            except SubletError:
                raise
            except BaseException:
                # Showing its output raised: nobody waits for the call any more.
                self._interrupt()
                raise

    def _through_cuts(self, listener: CallListener) -> CallResult:
        patience = self._client.patience()
        while True:
            try:
                return self._listen(listener, patience.renew)
            except Cut as cut:
                if not cut.kept and not patience.pause(cut.pause):
                    raise self._given_up(cut.why) from None
            except Disconnected as e:
                if not patience.pause():
                    raise self._given_up(e.message) from None

    # one connection

    def _listen(self, listener: CallListener, heard: Callable[[], None]) -> CallResult:
        reader = self._reader
        reader.connected()
        attach = reader.began or self._parts is None
        query = {"call": self.id, "after": reader.after}
        self._resent = self._sent
        if not attach and self._resent:
            self._check_still_meant()
        head = {"target": self._target, **({"attach": True} if attach else {})}
        body = frames.message(frames.HEAD, head, [] if attach else self._parts or [])
        self._sent = True
        try:
            with self._client.stream(
                "POST",
                f"{self._session}/calls",
                query=query,
                body=body,
                kind=FRAMES_TYPE,
                silence_seconds=SILENCE_SECONDS,
            ) as response:
                while True:
                    message = reader.next()
                    if message is None:
                        data = chunk(response)
                        if not data:
                            raise Cut("the connection was cut")
                        heard()
                        reader.feed(data)
                        continue
                    ended = self._took(message, listener)
                    if ended is not None:
                        return ended
        except NotFound as e:
            # The holder of its lease is gone, and the lease with it. A call that was only now sent was not
            # begun.
            facts = read_facts(self._client.get(self._session, patience_seconds=0))
            raise WorkerLost(
                f"the session's worker is gone ({facts.why}): {e.message}", begun=attach or self._resent
            ) from None
        except Stale as e:
            if not attach:
                raise
            raise WorkerLost(
                f"the studio knows nothing of call {self.id} any more: {e.message}",
                remedy="its session's lease is over: look at what it saved, and call again",
            ) from None

    def _check_still_meant(self) -> None:
        """Check, before an unanswered call is sent again, that it would not begin under another lease."""
        facts = read_facts(self._client.get(self._session, patience_seconds=0))
        if facts.status not in ("active", "revoking") or facts.lease_id != self._lease_id:
            raise WorkerLost(
                f"the session's lease ended while its call was on the way ({facts.why}); whether it began "
                "is not known"
            )

    def _took(self, message: StreamMessage, listener: CallListener) -> CallResult | None:
        kind = message.kind
        if kind in (frames.OUT, frames.ERR):
            stream = "stdout" if kind == frames.OUT else "stderr"
            listener.text(stream, message.data.decode("utf-8", "replace"))
        elif kind == frames.SHOW:
            listener.show(message.data)
        elif kind == frames.ASK:
            self._answer(message, listener)
        elif kind == frames.GAP:
            listener.text("stderr", "[some of the output is not kept any more]\n")
        elif kind == frames.FAIL:
            error = error_from(message.head())
            if isinstance(error, Disconnected):  # said on the way: the call itself may go on
                self._reader.take_back(message)
            raise error
        elif kind == frames.DONE:
            head = message.head()
            seconds = head.get("seconds")
            return CallResult(
                fine=frames.flag_of(head, "ok"),
                parts=message.parts,
                launches=frames.count_of(head, "launches", most=1 << 62, default=0),
                seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
                interrupted=self._interrupted,
            )
        return None

    def _answer(self, message: StreamMessage, listener: CallListener) -> None:
        """Send an answer, even if finding it failed: the call waits for one."""
        head = message.head()
        number = frames.count_of(head, "number", most=1 << 31)
        fine, parts = False, ()
        try:
            fine, parts = listener.ask(head, message.parts)  # type: ignore[assignment]
        finally:
            body = frames.message(frames.HEAD, {"ok": fine}, parts)
            # The call no longer waits: it went on or is over, and reports that itself.
            with contextlib.suppress(Stale, NotFound, LeaseLost):
                self._client.ask(
                    "POST",
                    f"{self._session}/calls/{self.id}/answers/{number}",
                    query={"ok": "true" if fine else "false"},
                    body=body,
                    kind=FRAMES_TYPE,
                )

    def _interrupt(self) -> None:
        with contextlib.suppress(SubletError):
            self._client.post(
                f"{self._session}/interrupt", {"call": self.id}, patience_seconds=SHORT_PATIENCE_SECONDS
            )

    def _given_up(self, why: str) -> Disconnected:
        seconds = round(self._client.patience_seconds)
        return Disconnected(
            f"the studio could not be reached for {seconds} s ({why}); call {self.id} may still be running "
            "there, "
            "and what it says is kept",
            remedy=f"when the studio is back: studio.find({self._session_id!r}).attach({self.id!r})",
        )
