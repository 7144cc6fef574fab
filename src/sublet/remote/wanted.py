"""What is asked of a studio, and the way from asking to having it.

Rules of this file:
- Words are read here as `sublet.gpu` reads them, so that what is wrong is told before anything is sent.
- A session's id is made here: asking twice with the same one is asking once.
- Whoever stops waiting, for whatever reason, ends what was asked for: nobody's place is kept for nobody.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sublet.core.admission import Wait
from sublet.core.device import parse_exclusivity
from sublet.core.errors import BadInput, NotFound, Stale, SubletError
from sublet.core.lease import Request, parse_tier
from sublet.core.session import ID_BYTES
from sublet.core.values import check_name, parse_duration, parse_size, parse_size_range
from sublet.ports.ledger import Answer
from sublet.remote.client import Client
from sublet.remote.facts import Facts, ending_of, offer_as_answer, read_facts

OnWait = Callable[[Wait], None]
OnOffer = Callable[[Answer], bool]

#: The studio answers such a question after so long, if nothing changed. Whoever shows a place in the waitlist looks more often.
LOOK_SECONDS = 20
EXPLAIN_SECONDS = 5
END_PATIENCE_SECONDS = 2.0
_HAVING_IT = frozenset({"active", "revoking"})
_OVER = frozenset({"suspended", "ended"})


def new_session_id() -> str:
    return "S" + secrets.token_hex(ID_BYTES)


def wish(
    *,
    vram: str | int,
    ttl: str | int | float,
    count: int = 1,
    exclusivity: str = "shared",
    tier: str = "interactive",
    wait: str | int | float | None = None,
    least: str | int | None = None,
    hold_cap: str | int | float | None = None,
    warm: str | int | float | None = None,
    checkpoint: str = "",
    name: str = "",
    offers: bool = False,
) -> dict[str, Any]:
    """The body of POST /v1/sessions: bytes and seconds, checked as everywhere."""
    span = parse_size_range(vram, what="vram")
    least_bytes = parse_size(least, what="least") if least is not None else 0
    if span.least != span.most:
        least_bytes = least_bytes or span.least
    if isinstance(count, bool) or not isinstance(count, int):
        raise BadInput(f"count {count!r} must be a whole number")
    request = Request(
        tenant="tenant",  # the token says which
        vram_bytes=span.most,
        ttl_us=parse_duration(ttl, what="ttl"),
        count=count,
        least_bytes=least_bytes,
        exclusivity=parse_exclusivity(exclusivity),
        tier=parse_tier(tier),
        wait_us=None if wait is None else parse_duration(wait, what="wait"),
        hold_cap_us=None if hold_cap is None else parse_duration(hold_cap, what="hold_cap"),
    )
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
    """Asked for; perhaps not had yet."""
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
    """With a wait: when something changed since that version, or after so long."""
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
    """Its facts when it has a GPU; raises what it was refused with. Without `on_offer`, an offer is left to whoever answers it."""
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
            # What was said takes a moment to become true: the same offer is not asked about again.
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
