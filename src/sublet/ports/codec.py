"""A codec: how a Durable's value becomes bytes and comes back.

Rules of this port:
- Its id is stored with the bytes, and what was written by one codec is never given to another.
- `decode` gets bytes whose digest was verified, and still believes none of them: it raises `Damaged` for what it cannot read, checks
  sizes before it allocates, and runs no code from them (C7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Codec(Protocol):
    @property
    def id(self) -> str:
        """1 to 32 plain characters, another one for every incompatible format."""

    def encode(self, value: Any) -> Sequence[memoryview]:
        """Called by `checkpoint()`: the bytes, in parts. They are copied before it returns, so they may be the value's own memory."""

    def decode(self, data: memoryview) -> Any:
        """Called by `restore()`: the value. The memory is writable and belongs to it from now on."""
