"""One call in a session, from its first byte to its answer, however often the connection is cut meanwhile.

Rules of this file:
- A call has an id that is made here. It is sent once; whoever sends it again with the same id only listens to it. So a call whose
  connection was cut is taken up at the byte that was read last: nothing is shown twice, nothing runs twice.
- A call of which nothing was heard may never have arrived. It is sent again only while the lease it was meant for is the session's.
- When the patience is over it is `Disconnected`: the call may still be running, and the message says how to listen to it again.
- Ctrl-C interrupts the call in the session, and its answer is waited for; a second one does not wait.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.errors import Disconnected, LeaseLost, NotFound, Stale, SubletError, WorkerLost
from sublet.ports import sealed
from sublet.remote.client import Client, Cut
from sublet.remote.errors import error_from
from sublet.remote.facts import read_facts
from sublet.remote.stream import CallReader, Message, chunk

#: The attendant says that it is there every ten seconds.
SILENCE_SECONDS = 35.0
#: To interrupt, to answer that nobody answers: worth a few tries.
SHORT_PATIENCE_SECONDS = 5.0
FRAMES_TYPE = "application/x-sublet-frames"

Parts = Sequence[bytes | bytearray | memoryview]
#: What a call's question is answered with.
Reply = tuple[bool, Parts]


class Listener(Protocol):
    """Where what a call says goes. Called by whoever waits for the call, in the order in which it was said."""

    def text(self, stream: str, text: str) -> None: ...
    def show(self, display: bytes) -> None: ...
    def ask(self, head: dict[str, Any], parts: Sequence[bytearray]) -> Reply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a call ended with."""

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
        """Without parts it is one that was made before, and is listened to from its beginning."""
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

    def run(self, listener: Listener) -> Ended:
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
                # Whoever showed it raised: the call is nobody's any more.
                self._interrupt()
                raise

    def _through_cuts(self, listener: Listener) -> Ended:
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

    def _listen(self, listener: Listener, heard: Callable[[], None]) -> Ended:
        reader = self._reader
        reader.connected()
        attach = reader.began or self._parts is None
        query = {"call": self.id, "after": reader.after}
        self._resent = self._sent
        if not attach and self._resent:
            self._check_still_meant()
        head = {"target": self._target, **({"attach": True} if attach else {})}
        body = sealed.message(sealed.HEAD, head, [] if attach else self._parts or [])
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
            # Whoever held its lease is gone, and the lease with it. Of a call that was only now sent, nothing was begun.
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
        """Nothing was heard of it. Under another lease than it was meant for it must not begin."""
        facts = read_facts(self._client.get(self._session, patience_seconds=0))
        if facts.status not in ("active", "revoking") or facts.lease_id != self._lease_id:
            raise WorkerLost(
                f"the session's lease ended while its call was on the way ({facts.why}); whether it began is not known"
            )

    def _took(self, message: Message, listener: Listener) -> Ended | None:
        kind = message.kind
        if kind in (sealed.OUT, sealed.ERR):
            stream = "stdout" if kind == sealed.OUT else "stderr"
            listener.text(stream, message.data.decode("utf-8", "replace"))
        elif kind == sealed.SHOW:
            listener.show(message.data)
        elif kind == sealed.ASK:
            self._answer(message, listener)
        elif kind == sealed.GAP:
            listener.text("stderr", "[some of the output is not kept any more]\n")
        elif kind == sealed.FAIL:
            error = error_from(message.head())
            if isinstance(error, Disconnected):  # said on the way: the call itself may go on
                self._reader.take_back(message)
            raise error
        elif kind == sealed.DONE:
            head = message.head()
            seconds = head.get("seconds")
            return Ended(
                fine=sealed.flag_of(head, "ok"),
                parts=message.parts,
                launches=sealed.count_of(head, "launches", most=1 << 62, default=0),
                seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
                interrupted=self._interrupted,
            )
        return None

    def _answer(self, message: Message, listener: Listener) -> None:
        """The call waits for it, whatever becomes of whoever answers."""
        head = message.head()
        number = sealed.count_of(head, "number", most=1 << 31)
        fine, parts = False, ()
        try:
            fine, parts = listener.ask(head, message.parts)  # type: ignore[assignment]
        finally:
            body = sealed.message(sealed.HEAD, {"ok": fine}, parts)
            # Nobody waits any more: the call went on, or is over, and says so itself.
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
            f"the studio could not be reached for {seconds} s ({why}); call {self.id} may still be running there, "
            "and what it says is kept",
            remedy=f"when the studio is back: studio.find({self._session_id!r}).attach({self.id!r})",
        )
