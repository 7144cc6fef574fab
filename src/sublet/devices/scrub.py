"""Overwriting the free memory of a device, through any open Context.

Rules of this file:
- Every piece is held until the last one is there: a piece freed early would be handed out again, and the same
  pages overwritten twice while others keep what their last owner wrote.
- Pieces are whole powers of two, but for the last: a device rounds odd sizes up to its grain, and what it
  adds is not overwritten.
- Less free memory than asked for is an answer, not an error; memory that does not read as zero afterwards is
  a fault.
- `Context.alloc` is what overwrites: it gives zeroed memory. What it gave is read back here, not believed.
"""

from __future__ import annotations

import contextlib

from sublet.core.errors import DeviceFault, OutOfMemory
from sublet.core.values import format_size
from sublet.ports.device import Context, RawBuffer

PIECE_BYTES = 64 << 20
#: The smallest piece that is asked for: devices hand memory out in larger grains.
LEAST_BYTES = 256
SAMPLE_BYTES = 4096


def overwrite_free(context: Context, size: int) -> int:
    """Overwrite up to `size` bytes, and return how many there were."""
    pieces: list[tuple[RawBuffer, int]] = []
    done, piece = 0, PIECE_BYTES
    with contextlib.ExitStack() as held:
        while done < size:
            wanted = min(piece, size - done)
            try:
                buffer = context.alloc(wanted)
            except OutOfMemory:
                piece //= 2
                if piece < LEAST_BYTES:
                    break
                continue
            held.callback(context.free, buffer)
            pieces.append((buffer, wanted))
            done += wanted
        for buffer, wanted in pieces:
            _read_back(context, buffer, wanted)
    return done


def _read_back(context: Context, buffer: RawBuffer, size: int) -> None:
    """Check the beginning, the middle and the end of one piece."""
    length = min(SAMPLE_BYTES, size)
    for offset in sorted({0, (size - length) // 2, size - length}):
        if context.read(buffer, offset, length).strip(b"\0"):
            raise DeviceFault(
                "memory was overwritten with zeros and does not read so, "
                f"in {format_size(length)} of {format_size(size)}",
                remedy="withhold the device with 'sublet quarantine set': "
                "what it keeps may be read by the next lease",
            )
