"""Tokens: what a tenant shows a service to be let in, and when one is refused.

Rules of this file:
- A token's text is `sublet_<id>_<secret>`. The id finds the row and is no secret; of the secret only its
  SHA-256 is kept. The secret has 256 random bits, so a fast digest is enough: there is nothing to guess.
- `opens` is the only place where a secret is compared with a digest, in constant time. Leases use it too.
- The secret itself is made outside: nothing here is random.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from enum import Enum

from sublet.core.errors import BadInput

ID_BYTES = 8
SECRET_BYTES = 32
NOTE_CHARACTERS = 200

_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(rf"sublet_([0-9a-f]{{{2 * ID_BYTES}}})_([0-9a-f]{{{2 * SECRET_BYTES}}})")


class Scope(Enum):
    """What a token is for: a tenant's own things, or everybody's."""

    USER = "user"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    id: str
    tenant: str
    scope: Scope
    digest: str  # SHA-256 of the secret
    note: str = ""
    created_at: int = 0
    expires_at: int = 0  # 0: never
    revoked_at: int = 0  # 0: not


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """Who a request speaks for. Every row it touches is looked up with this tenant (T1)."""

    tenant: str
    scope: Scope
    token_id: str


def check_id(text: str) -> str:
    if not isinstance(text, str) or not _ID.fullmatch(text):
        # Not repeated: somebody may have given the whole token where its id belongs.
        raise BadInput(
            "that is not a token's id: write the 16 characters that 'sublet tenant token ls' shows",
            remedy="if a whole token was written where others may read it, rotate it",
        )
    return text


def check_digest(text: str) -> str:
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise BadInput("a token is kept as the SHA-256 of its secret, in hexadecimal")
    return text


def check_note(text: str) -> str:
    if not isinstance(text, str) or len(text) > NOTE_CHARACTERS or not text.isprintable():
        raise BadInput(f"a note is one line of at most {NOTE_CHARACTERS} printable characters")
    return check_no_token(text, what="a note")


def check_no_token(text: str, *, what: str) -> str:
    """What people write into the ledger others may read."""
    if _TEXT.search(text):
        raise BadInput(f"{what} must not hold a token: it is shown in listings")
    return text


def text_of(token_id: str, secret: str) -> str:
    return f"sublet_{token_id}_{secret}"


def parse_token(text: str) -> tuple[str, str] | None:
    """(id, secret), or None for what cannot be a token."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    return (found[1], found[2]) if found else None


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def opens(secret: str, digest: str) -> bool:
    """Is this the secret of that digest? Takes as long whatever the answer."""
    return hmac.compare_digest(digest_of(secret), digest)


def judge(token: Token, now: int) -> str:
    """'' or why a token whose secret was right is refused."""
    if token.revoked_at:
        return "revoked"
    if token.expires_at and now >= token.expires_at:
        return "expired"
    return ""


def rotated(old: Token, token_id: str, digest: str, now: int, overlap_us: int) -> tuple[Token, Token]:
    """The old one as it is from now on, and its successor, which lives as long as the old one was meant
    to."""
    until = now + overlap_us
    ends = min(old.expires_at, until) if old.expires_at else until
    leaving = Token(
        id=old.id,
        tenant=old.tenant,
        scope=old.scope,
        digest=old.digest,
        note=old.note,
        created_at=old.created_at,
        expires_at=ends if overlap_us else old.expires_at,
        revoked_at=0 if overlap_us else now,
    )
    successor = Token(
        id=token_id,
        tenant=old.tenant,
        scope=old.scope,
        digest=digest,
        note=old.note,
        created_at=now,
        expires_at=now + old.expires_at - old.created_at if old.expires_at else 0,
    )
    return leaving, successor
