"""Requests to a studio for a session, and the wait until it has a GPU.

Rules of this file:
- Arguments are read as `sublet.gpu` reads them, so that mistakes are reported before anything is sent.
- A session's id is made here: asking twice with the same one is asking once.
- A caller that stops waiting, for whatever reason, ends its request, so that no place is kept for nobody.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sublet.client.facts import Facts, ending_of, offer_as_answer, read_facts
from sublet.client.http import Client
from sublet.core.errors import NotFound, Stale, SubletError
from sublet.core.leasing.options import Duration, GpuOptions
from sublet.core.scheduling.admission import Wait
from sublet.core.studio.session import ID_BYTES
from sublet.core.values import check_name, parse_duration
from sublet.ports.ledger import Answer

OnWait = Callable[[Wait], None]
OnOffer = Callable[[Answer], bool]

#: The studio answers such a question after so long, if nothing changed. Whoever shows a place in the waitlist
#: looks more often.
LOOK_SECONDS = 20
EXPLAIN_SECONDS = 5
END_PATIENCE_SECONDS = 2.0
_HAVING_IT = frozenset({"active", "revoking"})
_OVER = frozenset({"suspended", "ended"})


def new_session_id() -> str:
    return "S" + secrets.token_hex(ID_BYTES)


def session_body(
    options: GpuOptions,
    *,
    warm: Duration | None = None,
    checkpoint: str = "",
    name: str = "",
    offers: bool = False,
) -> dict[str, Any]:
    """The body of POST /v1/sessions: bytes and seconds, checked as everywhere."""
    request = options.request(tenant="tenant")  # the token says which
    if checkpoint:
        check_name(checkpoint, what="checkpoint")
    asked: dict[str, Any] = {
        "vram": request.vram_bytes,
        "ttl": request.ttl_us / 1e6,
        "count": request.count,
        "exclusivity": request.exclusivity.value,
        "tier": request.tier.value,
        "offers": bool(offers),
    }
    if request.least_bytes:
        asked["least"] = request.least_bytes
    for key, us in (("wait", request.wait_us), ("hold_cap", request.hold_cap_us)):
        if us is not None:
            asked[key] = us / 1e6
    if warm is not None:
        asked["warm"] = parse_duration(warm, what="warm") / 1e6
    for key, text in (("checkpoint", checkpoint), ("name", name)):
        if text:
            asked[key] = text
    return asked


def open_session(client: Client, asked: Mapping[str, Any], session_id: str = "") -> Facts:
    """Ask for a session, which may have to wait."""
    session_id = session_id or new_session_id()
    try:
        return read_facts(client.post("/v1/sessions", {**asked, "id": session_id}))
    except (KeyboardInterrupt, SystemExit):  # it may have been opened already
        end_session(client, session_id, patience_seconds=END_PATIENCE_SECONDS)
        raise


def end_session(client: Client, session_id: str, *, patience_seconds: float | None = None) -> None:
    """Never raises: one that cannot be ended now is given back when nobody has used it for a while."""
    with contextlib.suppress(SubletError):
        client.ask("DELETE", f"/v1/sessions/{session_id}", patience_seconds=patience_seconds)


def look(client: Client, session_id: str, *, wait: float = 0.0, version: int = -1, **more: Any) -> Facts:
    """Return the session's facts. With a wait: when that version has changed, or after so long."""
    query = {"wait": f"{wait:.2f}", "version": version if version >= 0 else None} if wait else None
    if wait:
        more.setdefault("answer_seconds", wait + 15.0)
    return read_facts(client.get(f"/v1/sessions/{session_id}", query, **more))


def until_active(
    client: Client,
    facts: Facts,
    *,
    on_wait: OnWait | None = None,
    on_offer: OnOffer | None = None,
    still_wanted: Callable[[], None] = lambda: None,
) -> Facts:
    """Wait for a GPU and return the session's facts; raises the refusal. Without `on_offer`, an offer is left
    to whoever answers it."""
    told: Wait | None = None
    answered: tuple[str, float] | None = None
    while True:
        still_wanted()
        if facts.status in _HAVING_IT:
            return facts
        if facts.status in _OVER:
            raise ending_of(facts)
        if on_wait is not None and facts.wait is not None and facts.wait != told:
            told = facts.wait
            on_wait(told)
        offer = (facts.lease_id, facts.offer.until) if facts.offer is not None else None
        if on_offer is not None and offer is not None and offer != answered:
            # An answer takes a moment to take effect: the same offer is not asked about again.
            answered = offer
            facts = answer_offer(client, facts, on_offer(offer_as_answer(facts)))
            continue
        facts = look(
            client, facts.id, wait=EXPLAIN_SECONDS if on_wait else LOOK_SECONDS, version=facts.version
        )


def answer_offer(client: Client, facts: Facts, accept: bool) -> Facts:
    """An offer that ran out meanwhile leaves the place in the waitlist as it was."""
    verb = "accept" if accept else "decline"
    try:
        return read_facts(client.post(f"/v1/sessions/{facts.id}/{verb}"))
    except (Stale, NotFound):
        return look(client, facts.id)
