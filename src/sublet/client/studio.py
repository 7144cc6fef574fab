"""`sublet.connect(url, token)`: a studio, with the words of `sublet.gpu`.

Rules of this file:
- The token says whose work it is: there is no tenant to choose.
- `connect` uses the token once, so that a wrong one, or a wrong address, is reported where it was written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from sublet.client.facts import Facts, read_facts, read_lease
from sublet.client.http import PATIENCE_SECONDS, Client, Cut
from sublet.client.lease import RemoteLease
from sublet.client.request import (
    END_PATIENCE_SECONDS,
    OnOffer,
    OnWait,
    end_session,
    look,
    new_session_id,
    open_session,
    session_body,
    until_active,
)
from sublet.client.session import Session
from sublet.client.state import StudioStore, get_checkpoint
from sublet.client.stream import StudioEvent, events
from sublet.core.errors import BadInput, Disconnected, SubletError
from sublet.core.leasing.options import DEFAULT_TTL, DEFAULT_VRAM, Duration, GpuOptions, Size
from sublet.core.values import parse_duration
from sublet.ports.ledger import Answer
from sublet.processes.worker.warm_calls import OnGpu, Warm, on_gpu_decorator
from sublet.settings import load_settings

#: The live stream says that it is there every fifteen seconds.
_EVENT_SILENCE_SECONDS = 45.0


class RemoteRequest:
    """What `studio.gpu(...)` returns. Nothing is asked for until `with` or `.acquire()`."""

    def __init__(
        self,
        client: Client,
        asked: Mapping[str, Any],
        *,
        on_wait: OnWait | None,
        on_offer: OnOffer | None,
    ) -> None:
        self._client = client
        self._asked = dict(asked)
        self._on_wait = on_wait
        self._on_offer = on_offer
        self._lease: RemoteLease | None = None

    def acquire(self) -> RemoteLease:
        """Acquire now. Outside a `with` block it counts as idle until it is touched or works."""
        session_id = new_session_id()
        facts: Facts | None = None
        try:
            facts = open_session(self._client, self._asked, session_id)
            facts = until_active(self._client, facts, on_wait=self._on_wait, on_offer=self._on_offer)
            return RemoteLease(self._client, facts)
        except BaseException as e:
            # It may be there although the answer never came; one that was refused is over by itself.
            if facts is not None or not isinstance(e, SubletError) or isinstance(e, Disconnected):
                end_session(self._client, session_id, patience_seconds=END_PATIENCE_SECONDS)
            raise

    def hold(self) -> RemoteLease:
        """The same as `acquire`: the studio sees by itself whether a lease is used."""
        return self.acquire()

    def __enter__(self) -> RemoteLease:
        self._lease = self.acquire()
        return self._lease.__enter__()

    def __exit__(self, *error: Any) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.__exit__(*error)


class Studio:
    def __init__(self, client: Client, me: Mapping[str, Any]) -> None:
        self._client = client
        self._me = dict(me)
        self._warm: dict[tuple[object, ...], Warm] = {}
        self._lock = threading.Lock()

    @property
    def tenant(self) -> str:
        return str(self._me.get("tenant", ""))

    @property
    def address(self) -> str:
        return str(self._client.address)

    def __repr__(self) -> str:
        return f"<Studio {self.address}, tenant {self.tenant}>"

    def __reduce__(self) -> Any:
        raise TypeError("a connection to a studio cannot be pickled: it holds a token")

    # GPUs

    def gpu(
        self,
        vram: Size = DEFAULT_VRAM,
        ttl: Duration = DEFAULT_TTL,
        *,
        count: int = 1,
        exclusivity: str = "shared",
        tier: str = "interactive",
        wait: Duration | None = None,
        least: Size | None = None,
        tenant: str | None = None,
        job: str = "",
        hold_cap: Duration | None = None,
        warm: Duration | None = None,
        holder: str | None = None,
        on_wait: OnWait | None = None,
        on_offer: OnOffer | None = None,
    ) -> RemoteRequest:
        """A GPU of the studio for a while: `with studio.gpu(vram="8GB", ttl="5m") as lease:
        lease.run(function, x)`.

        The words are those of `sublet.gpu`. `job` is the checkpoint name that `lease.save` saves under;
        `warm`: how long it is kept when nobody uses it (the ttl)."""
        options = GpuOptions(
            vram=vram,
            ttl=ttl,
            count=count,
            exclusivity=exclusivity,
            tier=tier,
            wait=wait,
            least=least,
            tenant=tenant,
            job=job,
            hold_cap=hold_cap,
            holder=holder,
        )
        return self.lease(options, warm=warm, on_wait=on_wait, on_offer=on_offer)

    def lease(
        self,
        options: GpuOptions,
        *,
        warm: Duration | None = None,
        on_wait: OnWait | None = None,
        on_offer: OnOffer | None = None,
    ) -> RemoteRequest:
        """Like `gpu`, with its options as one record."""
        if options.spreads:
            raise BadInput("a studio's leases are of one machine", remedy="leave spread out, or SUBLET_URL")
        if options.tenant is not None and options.tenant != self.tenant:
            raise BadInput(
                f"the token is tenant {self.tenant}'s, not {str(options.tenant)[:40]!r}'s; nothing was "
                "asked for",
                remedy="leave tenant out, or connect with the other tenant's token",
            )
        if options.holder not in (None, "worker"):
            raise BadInput(
                f"holder {options.holder!r} is not possible here: in a studio a worker of the studio's "
                "holds the lease",
                remedy="leave holder out, and use lease.run(function) or lease.open()",
            )
        asked = session_body(
            replace(options, job=""), warm=warm, checkpoint=options.job, offers=on_offer is not None
        )
        return RemoteRequest(self._client, asked, on_wait=on_wait, on_offer=on_offer)

    def on_gpu(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        vram: Size = DEFAULT_VRAM,
        ttl: Duration | Callable[..., Duration] = DEFAULT_TTL,
        batch: int = 1,
        **options: Any,
    ) -> Any:
        """Run a function in the studio: `@studio.on_gpu(vram="8GB", ttl="2m")`. As `sublet.on_gpu`."""

        def warm() -> Warm:
            key = (vram, *sorted((name, str(value)) for name, value in options.items()))
            with self._lock:
                return self._warm.setdefault(
                    key, Warm(lambda ttl_us: self.gpu(vram, ttl_us / 1e6, **options).acquire())
                )

        made: OnGpu[..., Any] | Callable[..., OnGpu[..., Any]] = on_gpu_decorator(
            function, warm, ttl, batch=batch, options=options, known=self.gpu
        )
        return made

    # sessions

    def session(
        self,
        vram: Size = DEFAULT_VRAM,
        ttl: Duration = DEFAULT_TTL,
        *,
        tier: str = "interactive",
        checkpoint: str = "",
        name: str = "",
        least: Size | None = None,
        wait: Duration | None = None,
        count: int = 1,
        exclusivity: str = "shared",
        hold_cap: Duration | None = None,
        warm: Duration | None = None,
        offers: bool = False,
        id: str = "",
    ) -> Session:
        """Open a session. It may have to wait: `.wait_until_active()`, or just `.run(...)`. Opened again with
        the same `id` and the same wishes it is the same one."""
        options = GpuOptions(
            vram=vram,
            ttl=ttl,
            count=count,
            exclusivity=exclusivity,
            tier=tier,
            wait=wait,
            least=least,
            hold_cap=hold_cap,
        )
        asked = session_body(options, warm=warm, checkpoint=checkpoint, name=name, offers=offers)
        return Session(self._client, open_session(self._client, asked, id))

    def find(self, session_id: str) -> Session:
        """A session of this tenant that was opened before, here or elsewhere."""
        return Session(self._client, look(self._client, quote(str(session_id), safe="")))

    def sessions(self, *, open: bool = True, limit: int = 100) -> list[Session]:
        query = {"open": "true" if open else "false", "limit": limit}
        found = self._client.get("/v1/sessions", query)["sessions"]
        return [Session(self._client, read_facts(one)) for one in found]

    # what there is

    def me(self) -> dict[str, Any]:
        """Who the token is, what it may use, and what it uses."""
        return dict(self._client.get("/v1/me"))

    def devices(self) -> list[dict[str, Any]]:
        return _rows(self._client.get("/v1/devices"), "devices")

    def leases(self, *, live: bool = True) -> list[dict[str, Any]]:
        return _rows(self._client.get("/v1/leases", {"live": "true" if live else "false"}), "leases")

    def waitlist(self) -> list[dict[str, Any]]:
        return _rows(self._client.get("/v1/waitlist"), "waitlist")

    def usage(self, *, days: int = 7, by: str = "session") -> list[dict[str, Any]]:
        """By tenant, session, tier, day or job."""
        return _rows(self._client.get("/v1/usage", {"days": days, "by": by}), "rows")

    def checkpoints(self) -> list[dict[str, Any]]:
        return _rows(self._client.get("/v1/checkpoints"), "checkpoints")

    def checkpoint(self, name: str) -> Any:
        """What was saved last under this name."""
        return get_checkpoint(self._client, quote(str(name), safe=""))

    def look_lease(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        """The row of one of the tenant's leases."""
        patience = None if patience_us is None else patience_us / 1e6
        said = self._client.get(f"/v1/leases/{quote(lease_id, safe='')}", patience_seconds=patience)
        return read_lease(said)

    def store(self) -> StudioStore:
        """The store for a notebook's `--keep`."""
        return StudioStore(self._client)

    def events(self, *, after: int | None = None) -> Iterator[StudioEvent]:
        """What happens in the studio, as it happens, without end: leave the loop when you have seen enough. A
        cut connection is taken up after the last event; none is told twice."""
        last = after
        patience = self._client.patience()
        while True:
            try:
                query = {"after": last} if last is not None else None
                with self._client.stream(
                    "GET", "/v1/events", query=query, silence_seconds=_EVENT_SILENCE_SECONDS
                ) as response:
                    for event in events(response):
                        patience.renew()
                        last = event.id
                        yield event
            except (Cut, Disconnected) as e:
                why = e.why if isinstance(e, Cut) else e.message
                if not patience.pause(e.pause if isinstance(e, Cut) else 0.0):
                    raise self._client.unreachable(why) from None

    def close(self) -> None:
        """Give back what `on_gpu` keeps warm, and close the connections. Open sessions stay."""
        with self._lock:
            kept, self._warm = list(self._warm.values()), {}
        for warm in kept:
            with warm.lock:
                warm.release()
        self._client.close()

    def __enter__(self) -> Studio:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(
    url: str = "",
    token: str = "",
    *,
    patience: Duration = PATIENCE_SECONDS,
    certificate: str = "",
    in_the_clear: bool = False,
) -> Studio:
    """A studio to lease GPUs from: `studio = sublet.connect("https://studio.example.org", token)`.

    Without an address or a token, SUBLET_URL and SUBLET_TOKEN are used. `patience`: how long a cut connection
    is tried again. `certificate`: a PEM file to trust, for a studio that signed its own. `in_the_clear`:
    plain HTTP to another machine, in a network that is trusted with the token."""
    settings = load_settings()
    client = Client(
        url or settings["url"],
        token or settings["token"],
        patience_seconds=parse_duration(patience, what="patience") / 1e6,
        certificate=certificate,
        in_the_clear=in_the_clear,
    )
    me = client.get("/v1/me")
    return Studio(client, me if isinstance(me, dict) else {})


_connected: dict[tuple[str, str, int], Studio] = {}
_connecting = threading.Lock()


def connected(url: str, token: str) -> Studio:
    """The process's studio for this address and token, connected to once."""
    key = (url, token, os.getpid())
    with _connecting:
        found = _connected.get(key)
        if found is None:
            found = _connected[key] = connect(url, token)
        return found


def _rows(said: Any, name: str) -> list[dict[str, Any]]:
    rows = said.get(name) if isinstance(said, dict) else said
    if not isinstance(rows, list):
        raise BadInput("the studio's answer cannot be read", remedy="use one version of sublet on both sides")
    return [dict(row) for row in rows]
