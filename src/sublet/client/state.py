"""What a session saves, from the client's side: a tree of plain values and tensors, no pickle.

Rules of this file:
- A state is encoded here and decoded here, with limits; the studio keeps bytes.
- A save counts when the studio has answered. One that could not be sent raises, and the save before is
  untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sublet.client.http import Client
from sublet.core.errors import BadInput, NotFound, NothingSaved
from sublet.store.codec import TreeCodec

SAVE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudioSaved:
    version: int
    bytes_written: int


def put_state(client: Client, session_id: str, state: Any) -> StudioSaved:
    parts = [part.cast("B") if part.nbytes else memoryview(b"") for part in TreeCodec().encode(state)]
    said = client.ask(
        "PUT", f"/v1/sessions/{session_id}/state", body=parts, answer_seconds=SAVE_SECONDS
    ).json()
    try:
        return StudioSaved(version=int(said["version"]), bytes_written=int(said["bytes_written"]))
    except (KeyError, TypeError, ValueError):
        raise BadInput("the studio's answer to a save cannot be read") from None


def get_state(client: Client, session_id: str, version: int = 0) -> Any:
    """None when nothing was saved yet."""
    query = {"version": version} if version else None
    try:
        found = client.ask(
            "GET", f"/v1/sessions/{session_id}/state", query=query, answer_seconds=SAVE_SECONDS
        )
    except NothingSaved:
        return None
    except NotFound:
        if version:
            raise
        client.get(f"/v1/sessions/{session_id}")  # is it the session that is not there?
        return None
    return TreeCodec().decode(memoryview(bytearray(found.body)))


def get_checkpoint(client: Client, name: str) -> Any:
    found = client.ask("GET", f"/v1/checkpoints/{name}", answer_seconds=SAVE_SECONDS)
    return TreeCodec().decode(memoryview(bytearray(found.body)))


class StudioStore:
    """What a notebook keeps, kept by the studio. Implements `notebook.cells.keep.KeepStore`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def save(self, name: str, state: Any, *, expected_version: int, lease: Any) -> StudioSaved:
        """Save under the lease's session, which has this name; the studio knows which version is next."""
        return put_state(self._client, lease.session_id, state)

    def load(self, name: str) -> Any:
        return get_checkpoint(self._client, name)

    def close(self) -> None:
        """Nothing is open."""
