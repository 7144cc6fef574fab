"""Tokens as text and as records: what is one, when it is refused, what a rotation leaves of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput
from sublet.core.studio.token import (
    SECRET_BYTES,
    Scope,
    Token,
    check_digest,
    check_id,
    check_note,
    digest_of,
    judge,
    opens,
    parse_token,
    rotated,
    text_of,
)

ID, SECRET = "0123456789abcdef", "ab" * SECRET_BYTES
NOW = 1_000_000
TOKEN = Token(id=ID, tenant="ada", scope=Scope.USER, digest=digest_of(SECRET), created_at=NOW)


def test_a_secret_has_at_least_128_bits() -> None:
    assert SECRET_BYTES * 8 >= 128


def test_a_token_is_read_as_it_was_written() -> None:
    assert parse_token(text_of(ID, SECRET)) == (ID, SECRET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sublet",
        f"sublet_{ID}",
        f"sublet_{ID}_",
        f"sublet_{ID}_{SECRET[:-1]}",
        f"sublet_{ID}_{SECRET}0",
        f"sublet_{ID}_{SECRET}\n",
        f" sublet_{ID}_{SECRET}",
        f"Sublet_{ID}_{SECRET}",
        f"sublet_{ID.upper()}_{SECRET}",
        f"sublet_{ID}_{'é' * len(SECRET)}",
        f"sublet_{ID}_{'٣' * len(SECRET)}",
        f"sublet_../../etc/passwd_{SECRET}",
        f"sublet_' OR 1=1 --_{SECRET}",
    ],
)
def test_anything_else_is_not_a_token(text: str) -> None:
    assert parse_token(text) is None


@given(st.text(max_size=200))
def test_reading_a_token_never_fails(text: str) -> None:
    assert parse_token(text) is None
    assert not opens(text, TOKEN.digest)


def test_only_the_secret_opens_its_digest() -> None:
    assert opens(SECRET, TOKEN.digest)
    assert not opens(SECRET[:-1] + "c", TOKEN.digest)
    assert not opens(TOKEN.digest, TOKEN.digest)
    assert not opens("", TOKEN.digest)


@pytest.mark.parametrize(
    ("changes", "at", "why"),
    [
        ({}, NOW, ""),
        ({}, NOW * 10**9, ""),
        ({"expires_at": NOW + 5}, NOW + 4, ""),
        ({"expires_at": NOW + 5}, NOW + 5, "expired"),
        ({"revoked_at": NOW}, NOW, "revoked"),
        ({"revoked_at": NOW + 9}, NOW, "revoked"),  # at once, whatever a clock says
        ({"revoked_at": NOW, "expires_at": NOW + 5}, NOW + 6, "revoked"),
    ],
)
def test_when_a_token_is_refused(changes: dict[str, int], at: int, why: str) -> None:
    assert judge(replace(TOKEN, **changes), at) == why


def test_a_rotation_without_overlap_revokes_the_old_one_now() -> None:
    old, new = rotated(TOKEN, "f" * 16, digest_of("new"), NOW + 7, 0)
    assert judge(old, NOW + 7) == "revoked"
    assert (new.id, new.digest, new.created_at, new.expires_at) == ("f" * 16, digest_of("new"), NOW + 7, 0)
    assert (new.tenant, new.scope, new.note) == (old.tenant, old.scope, old.note)
    assert judge(new, NOW + 7) == ""


def test_an_overlap_ends_the_old_one_later_and_never_later_than_it_would_have() -> None:
    lasting, _ = rotated(TOKEN, "f" * 16, "d", NOW + 7, 10)
    assert (judge(lasting, NOW + 16), judge(lasting, NOW + 17)) == ("", "expired")
    short = replace(TOKEN, expires_at=NOW + 12)
    old, new = rotated(short, "f" * 16, "d", NOW + 7, 10)
    assert old.expires_at == NOW + 12
    assert new.expires_at == NOW + 7 + 12  # as long as the old one was meant to live


@pytest.mark.parametrize("text", ["", "x", ID + "0", ID.upper(), text_of(ID, SECRET)])
def test_an_id_is_checked_and_never_repeated(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_id(text)
    assert SECRET not in refused.value.message


def test_a_note_is_one_line_and_no_token() -> None:
    assert check_note("ada's laptop") == "ada's laptop"
    for bad in ("two\nlines", "\x1b[31m", "x" * 201, f"it is {text_of(ID, SECRET)}"):
        with pytest.raises(BadInput) as refused:
            check_note(bad)
        assert SECRET not in refused.value.message


def test_a_digest_is_a_sha256() -> None:
    check_digest(digest_of(SECRET))
    for bad in ("", "x" * 64, SECRET + "0"):
        with pytest.raises(BadInput):
            check_digest(bad)
