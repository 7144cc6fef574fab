"""A stay in a studio: what `studio.session(...)` gives.

Rules of this file:
- A session outlives its leases. When its GPU was taken or given back it is suspended, and `resume` asks for
  another one: what was saved under its checkpoint name is there, what was only in its worker is gone.
- All state is the studio's: any other process with the same token may `studio.find` it and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from sublet.client.facts import Facts, StudioOffer, ending_of, read_facts
from sublet.client.http import Client
from sublet.client.request import OnOffer, OnWait, answer_offer, look, until_active
from sublet.client.state import StudioSaved, get_state, put_state
from sublet.client.worker import RemoteWorker
from sublet.core.errors import LeaseLost, SubletError, WorkerLost
from sublet.ports.worker import Screen

_HAVING_IT = ("active", "revoking")


class Session:
    def __init__(self, client: Client, facts: Facts) -> None:
        self._client = client
        self._facts = facts
        self._worker: RemoteWorker | None = None

    # what it is

    @property
    def id(self) -> str:
        return self._facts.id

    @property
    def name(self) -> str:
        return self._facts.name

    @property
    def tenant(self) -> str:
        return self._facts.tenant

    @property
    def checkpoint(self) -> str:
        return self._facts.checkpoint

    @property
    def facts(self) -> Facts:
        """As of the last answer; `look` asks again."""
        return self._facts

    @property
    def status(self) -> str:
        """Now: opening, waiting, offered, active, revoking, suspended or ended."""
        return self.look().status

    @property
    def lease_id(self) -> str:
        return self._facts.lease_id

    @property
    def devices(self) -> tuple[str, ...]:
        return self._facts.devices

    @property
    def vram_bytes(self) -> int:
        """Per device, as granted."""
        return self._facts.granted_bytes

    @property
    def offer(self) -> StudioOffer | None:
        """A smaller slice that is held for it now, as of the last answer."""
        return self._facts.offer

    @property
    def usage(self) -> Mapping[str, Any]:
        """What it used so far, as of the last answer."""
        return self._facts.usage

    def __repr__(self) -> str:
        return f"<Session {self.id} {self._facts.status} at {self._client.address}>"

    def look(self, *, wait: float = 0.0) -> Facts:
        """Ask for its state now; with a wait, when something changed or after so long."""
        return self._took(look(self._client, self.id, wait=wait, version=self._facts.version))

    # its GPU

    def wait_until_active(self, on_wait: OnWait | None = None, on_offer: OnOffer | None = None) -> Session:
        """Raises what it was refused with, and leaves the session as it is when interrupted."""
        self._took(until_active(self._client, self.look(), on_wait=on_wait, on_offer=on_offer))
        return self

    def accept(self) -> Session:
        """Take the smaller slice that is offered."""
        self._took(read_facts(self._post("accept")))
        return self

    def decline(self) -> Session:
        """Keep the place in the waitlist."""
        self._took(answer_offer(self._client, self._facts, False))
        return self

    def resume(self) -> Session:
        """Ask for another GPU after one was lost or given back."""
        self._took(read_facts(self._post("resume")))
        return self

    def touch(self) -> None:
        """Tell the studio that it is in use: an unused session gives its GPU back after a while."""
        self._post("touch")

    # work

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call it in the session; waits for its GPU if it has none yet."""
        return self._in_worker(lambda worker: worker.call(function, args, kwargs))

    def run_code(self, text: str, *, screen: Screen | None = None) -> int:
        """Run source in the session: its names stay there for the next. How many kernels it launched."""
        return self._in_worker(lambda worker: worker.run_code(text, screen))  # type: ignore[no-any-return]

    def attach(self, call_id: str, *, screen: Screen | None = None) -> Any:
        """Listen again to a call whose connection was given up: what it says is shown, what it returned is
        returned."""
        self.look()
        return self._the_worker().attach(call_id, screen)

    def interrupt(self) -> None:
        """Raise a KeyboardInterrupt in the code that runs in it."""
        self._post("interrupt")

    def _in_worker(self, work: Callable[[RemoteWorker], Any]) -> Any:
        if self._facts.status not in _HAVING_IT:
            self.wait_until_active()
        try:
            return work(self._the_worker())
        except LeaseLost as lost:
            self._worker = None
            raise self._explained(lost) from lost.__cause__

    def _the_worker(self) -> RemoteWorker:
        """The worker of the current lease. A new lease has a new worker, with nothing of the last one's."""
        if self._worker is None or self._worker.lease_id != self._facts.lease_id:
            self._worker = RemoteWorker(self._client, self.id, self._facts.lease_id)
        return self._worker

    def _explained(self, lost: LeaseLost) -> LeaseLost:
        try:
            facts = self.look()
        except SubletError:
            return lost
        if facts.status not in ("suspended", "ended") or facts.why in lost.message:
            return lost
        remedy = "session.resume() asks for another GPU" if facts.status == "suspended" else ""
        message = f"GPU session ended ({facts.why}); {lost.message}"
        if isinstance(lost, WorkerLost):
            return WorkerLost(message, begun=lost.begun, reason=facts.why, remedy=remedy)
        return type(lost)(message, remedy=remedy)

    # what it keeps

    def save(self, state: Any) -> StudioSaved:
        """A dict of plain values, arrays and tensors, under its checkpoint name; durable when it returns."""
        return put_state(self._client, self.id, state)

    def saved(self, version: int = 0) -> Any:
        """What was saved last, or that version; None when nothing was."""
        return get_state(self._client, self.id, version)

    # its end

    def end(self) -> Session:
        """Give everything back. What it saved stays. Ending twice is ending once."""
        self._took(read_facts(self._client.ask("DELETE", f"/v1/sessions/{self.id}").json()))
        return self

    def check(self) -> None:
        """Raise unless it has a GPU now."""
        facts = self.look()
        if facts.status not in _HAVING_IT:
            raise ending_of(facts)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _post(self, verb: str) -> Any:
        return self._client.post(f"/v1/sessions/{self.id}/{verb}")

    def _took(self, facts: Facts) -> Facts:
        self._facts = facts
        return facts
