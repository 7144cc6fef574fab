"""The verbs of tokens, sessions and prices, each as one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sublet.core.billing.price import Price, check_class, check_micro, check_tier
from sublet.core.errors import BadInput, NotIsolated, SubletError
from sublet.core.leasing.lease import Request
from sublet.core.studio.session import check_detail, opened
from sublet.core.studio.token import Scope, Token, check_digest, check_id, check_note
from sublet.core.values import MAX_DURATION_US, check_name
from sublet.ledger.engine import Verbs
from sublet.ledger.tx import Tx
from sublet.ledger.verbs.billing import prices
from sublet.ledger.verbs.leasing import waitlist
from sublet.ledger.verbs.studio import session_usage, sessions, tokens
from sublet.ports.ledger import SessionAnswer, SessionUsage


class StudioVerbs(Verbs):
    """Part of `SqlLedger`."""

    # tokens

    def add_token(
        self,
        token_id: str,
        digest: str,
        tenant: str,
        *,
        actor: str,
        scope: Scope = Scope.USER,
        lifetime_us: int = 0,
        note: str = "",
    ) -> Token:
        check_name(tenant, what="tenant")
        check_id(token_id)
        check_digest(digest)
        check_note(note)
        if not 0 <= lifetime_us <= MAX_DURATION_US:
            raise BadInput("a token expires after at most a year; 0: never")
        return self._write(
            lambda tx: tokens.add(tx, token_id, digest, tenant, scope, lifetime_us, note, actor), durable=True
        )

    def tokens(self, tenant: str = "") -> list[Token]:
        return self.engine.read(lambda tx: tokens.list_tokens(tx, tenant))

    def look_token(self, token_id: str) -> Token | None:
        return tokens.token_of(self.engine.glance(tokens.BY_ID, token_id))

    def rotate_token(
        self, token_id: str, new_id: str, digest: str, *, actor: str, overlap_us: int = 0
    ) -> Token:
        check_id(token_id)
        check_id(new_id)
        check_digest(digest)
        if not 0 <= overlap_us <= MAX_DURATION_US:
            raise BadInput("an overlap is at most a year; 0: the old token is refused at once")
        return self._write(
            lambda tx: tokens.rotate(tx, token_id, new_id, digest, overlap_us, actor), durable=True
        )

    def revoke_token(self, token_id: str, *, actor: str) -> Token:
        check_id(token_id)
        return self._write(lambda tx: tokens.revoke(tx, token_id, actor), durable=True)

    # studio sessions

    def open_session(
        self,
        session_id: str,
        tenant: str,
        *,
        request: Request,
        warm_us: int,
        host: str,
        name: str = "",
        checkpoint: str = "",
        alone: NotIsolated | None = None,
    ) -> SessionAnswer:
        asked = opened(
            session_id,
            tenant,
            request=request,
            warm_us=warm_us,
            name=name,
            checkpoint=checkpoint,
            host=host,
        )
        return self._write(lambda tx: sessions.open_session(tx, asked, alone), durable=True)

    def others_have_sessions(self, tenant: str) -> bool:
        return self.engine.read(lambda tx: sessions.others_have(tx, tenant))

    def look_session(self, session_id: str, tenant: str, *, explain: bool = False) -> SessionAnswer:
        if not explain:
            return self._read(lambda tx: sessions.look(tx, session_id, tenant))

        def read(tx: Tx) -> SessionAnswer | SubletError:
            found = sessions.look(tx, session_id, tenant)
            if isinstance(found, SubletError) or found.lease is None:
                return found
            return replace(found, wait=waitlist.explained(tx, found.lease))

        return self._read(read)

    def token_and_session(
        self, keys: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
        def read(tx: Tx) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
            visits: dict[tuple[str, str], tuple[Token, SessionAnswer | None]] = {}
            for token_id, session_id in keys:
                token = tokens.look(tx, token_id)
                if token is not None:
                    found = sessions.look(tx, session_id, token.tenant)
                    session = None if isinstance(found, SubletError) else found
                    visits[(token_id, session_id)] = (token, session)
            return visits

        return self.engine.read(read)

    def sessions(self, *, tenant: str = "", open_only: bool = True, limit: int = 1000) -> list[SessionAnswer]:
        def read(tx: Tx) -> list[SessionAnswer]:
            found = sessions.list_sessions(tx, tenant, open_only, limit)
            waits = waitlist.waits(tx, [x.lease for x in found if x.lease is not None])
            return [replace(x, wait=waits.get(x.lease.id)) if x.lease is not None else x for x in found]

        return self.engine.read(read)

    def touch_sessions(self, keys: Sequence[tuple[str, str]]) -> None:
        if keys:
            self.engine.write(lambda tx: sessions.touch(tx, keys), durable=False)

    def answer_offer(self, session_id: str, tenant: str, *, accept: bool) -> SessionAnswer:
        return self._write(lambda tx: sessions.answer_offer(tx, session_id, tenant, accept), durable=True)

    def resume_session(self, session_id: str, tenant: str) -> SessionAnswer:
        return self._write(lambda tx: sessions.resume(tx, session_id, tenant), durable=True)

    def end_session(self, session_id: str, tenant: str, *, detail: str, actor: str) -> SessionAnswer:
        check_detail(detail)
        return self._write(lambda tx: sessions.end(tx, session_id, tenant, detail, actor), durable=True)

    def host_sessions(self, host: str) -> list[SessionAnswer]:
        return self.engine.read(lambda tx: sessions.of_host(tx, host))

    def bind_session(self, session_id: str, *, number: int, lease_id: str) -> SessionAnswer:
        check_name(lease_id, what="lease id")
        return self._write(lambda tx: sessions.bind(tx, session_id, number, lease_id), durable=True)

    def note_session(
        self,
        session_id: str,
        *,
        calls: int = 0,
        errors: int = 0,
        launches: int = 0,
        checkpoint_bytes: int = 0,
    ) -> None:
        counts = (calls, errors, launches, checkpoint_bytes)
        if any(count < 0 for count in counts):
            raise BadInput("a count is never negative")
        if any(counts):
            self.engine.write(lambda tx: sessions.note(tx, session_id, *counts), durable=False)

    def drop_sessions(self, before: int) -> int:
        return self.engine.write(lambda tx: sessions.drop(tx, before), durable=False)

    # what sessions used, and what that costs

    def session_usage(
        self, *, tenant: str = "", session_id: str = "", since: int = 0, limit: int = 1000
    ) -> list[SessionUsage]:
        return self.engine.read(lambda tx: session_usage.used(tx, tenant, session_id, since, limit))

    def prices(self) -> list[Price]:
        return self.engine.read(prices.list_prices)

    def set_price(self, device_class: str, micro_per_gpu_hour: int, *, actor: str, tier: str = "") -> Price:
        check_class(device_class)
        check_tier(tier)
        check_micro(micro_per_gpu_hour)
        return self.engine.write(
            lambda tx: prices.put(tx, device_class, tier, micro_per_gpu_hour, actor), durable=True
        )

    def remove_price(self, device_class: str, *, actor: str, tier: str = "") -> None:
        self._write(lambda tx: prices.remove(tx, device_class, tier, actor), durable=True)
