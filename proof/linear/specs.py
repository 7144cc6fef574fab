"""What each object does when it is used by one at a time.

Rules of this file:
- A state is small and hashable. Nothing here knows how the ledger does it.
- An operation whose answer is unknown does what it would have done, if it could.
"""

from __future__ import annotations

from typing import Any

from proof.linear.checker import UNKNOWN, WRONG


def head(version: Any, kind: str, argument: Any, answer: Any) -> Any:
    """A job's version. commit(expected) -> ok N | moved N | done N (its step was somebody's before); read -> N."""
    if kind == "read":
        return version if answer in (UNKNOWN, version) else WRONG
    expected = argument
    if answer == UNKNOWN:
        return version + 1 if version == expected else version
    how, number = answer
    if how == "ok":
        return number if version == expected and number == expected + 1 else WRONG
    if how == "moved":
        return version if version != expected and number == version else WRONG
    return version if version > expected and number == expected + 1 else WRONG


def effect(owner: Any, kind: str, argument: Any, answer: Any) -> Any:
    """Who completed it, '' nobody. commit(lease) -> ok | done | not; read -> owner."""
    if kind == "read":
        return owner if answer in (UNKNOWN, owner) else WRONG
    if answer == UNKNOWN:
        return owner or argument
    if answer == "ok":
        return argument if not owner else WRONG
    if answer == "done":
        return owner if owner else WRONG
    return owner  # refused by the head's rule: nothing is said about the effect


def lock(holder: Any, kind: str, argument: Any, answer: Any) -> Any:
    """A device that one holds alone. acquire(lease) -> granted | refused; release(lease) -> yes | no; renew(lease), look(lease) -> held | over."""
    if kind == "acquire":
        if answer == UNKNOWN:
            return holder or argument
        if answer == "granted":
            return argument if not holder else WRONG
        return holder if holder else WRONG
    if kind == "release":
        if answer == UNKNOWN:
            return "" if holder == argument else holder
        if answer == "yes":
            return "" if holder == argument else WRONG
        return holder if holder != argument else WRONG
    if answer == UNKNOWN:
        return holder
    return holder if (answer == "held") == (holder == argument) else WRONG


SPECS = {"head": (0, head), "effect": ("", effect), "lock": ("", lock)}
