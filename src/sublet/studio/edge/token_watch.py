"""Streams that end with their token: whoever holds one open is told when its token is revoked or expires.

Rules of this file:
- Every stream registers, events and calls alike. Every second each token in use is looked up once, however
  many streams it has (threat 30: all of them end within 2 s).
- While the ledger cannot be reached nobody is told: nothing new is let in either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.core.errors import SubletError
from sublet.core.studio.token import judge

if TYPE_CHECKING:
    from sublet.studio.service import Service

LOOK_SECONDS = 1.0


class TokenHold:
    """One stream's view of its token."""

    __slots__ = ("_ended", "token_id", "why")

    def __init__(self, token_id: str, ended: Callable[[str], None] = lambda why: None) -> None:
        self.token_id = token_id
        self.why = ""  # 'revoked' or 'expired', once it is over
        self._ended = ended

    def tell(self, why: str) -> None:
        self.why = why
        self._ended(why)


class TokenWatch:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._holds: set[TokenHold] = set()

    def join(self, hold: TokenHold) -> TokenHold:
        self._holds.add(hold)
        return hold

    def leave(self, hold: TokenHold) -> None:
        self._holds.discard(hold)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            tokens = sorted({hold.token_id for hold in self._holds})
            for token_id, why in zip(tokens, await asyncio.gather(*map(self._over, tokens)), strict=True):
                for hold in [h for h in self._holds if why and h.token_id == token_id and not h.why]:
                    hold.tell(why)

    async def _over(self, token_id: str) -> str:
        try:
            token = (await self._service.look_up(token_id))[0]
        except SubletError:
            return ""
        return "revoked" if token is None else judge(token, self._service.now_us())
