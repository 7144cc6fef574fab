"""Where exactly a text file is being read, and how it treats the ends of lines: what CPython keeps in C.

Python says neither. `tell` is switched off while lines are read with `for line in file`, and how `newline`
was given is in no attribute. Both are in the structure of `io.TextIOWrapper`, which has been the same in
CPython 3.11, 3.12 and 3.13. So reading lines costs what it always does, and files that a library opened
are described too.

Rules of this file:
- The structure is believed only after files of known state were found in it, once per process.
- All of it is taken and put: the text that was read ahead, the decoder's and encoder's own states, the
  place behind. Nothing is decoded twice, so this is exact for every encoding, end of line and chunk.
  (`tell` and `seek` are not: with ISO-2022-JP a file that is sent to where it is ends the process.)
"""

from __future__ import annotations

import ctypes
import functools
import io
from dataclasses import dataclass
from typing import Any


class _Wrapper(ctypes.Structure):
    """`textio` in Modules/_io/textio.c."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("ok", ctypes.c_int),
        ("detached", ctypes.c_int),
        ("chunk_size", ctypes.c_ssize_t),
        ("buffer", ctypes.c_void_p),
        ("encoding", ctypes.c_void_p),
        ("encoder", ctypes.c_void_p),
        ("decoder", ctypes.c_void_p),
        ("readnl", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("writenl", ctypes.c_void_p),
        ("line_buffering", ctypes.c_bool),
        ("write_through", ctypes.c_bool),
        ("readuniversal", ctypes.c_bool),
        ("readtranslate", ctypes.c_bool),
        ("writetranslate", ctypes.c_bool),
        ("seekable", ctypes.c_bool),
        ("has_read1", ctypes.c_bool),
        ("telling", ctypes.c_bool),
        ("finalizing", ctypes.c_bool),
        ("encodefunc", ctypes.c_void_p),
        ("encoding_start_of_stream", ctypes.c_bool),
        ("decoded_chars", ctypes.c_void_p),
        ("decoded_chars_used", ctypes.c_ssize_t),
        ("pending_bytes", ctypes.c_void_p),
        ("pending_bytes_count", ctypes.c_ssize_t),
        ("snapshot", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlace:
    """Where a text file is, between its buffer and whoever reads and writes text."""

    chars: str | None  # decoded, of which so many were given out:
    used: int
    snapshot: tuple[int, bytes] | None  # what `tell` counts from
    telling: bool
    at_start: bool  # the encoder will write a byte order mark
    decoder: tuple[bytes, int] | None
    encoder: Any
    newlines: Any


def _structure(file: Any) -> _Wrapper:
    return _Wrapper.from_address(id(file))


def _object(pointer: int | None) -> Any:
    return None if not pointer else ctypes.cast(pointer, ctypes.py_object).value


@functools.cache
def is_known() -> bool:
    """Whether this Python has the structure that is described here."""
    for newline in (None, "", "\n", "\r\n"):
        raw = io.BytesIO(b"one\r\ntwo\r\nthree")
        file: Any = io.TextIOWrapper(raw, "utf-16" if newline == "\n" else "utf-8", "replace", newline)
        if newline != "\n":
            next(file)
        s = _structure(file)
        plain = (s.ok, s.detached, s.chunk_size, s.buffer) == (1, 0, file._CHUNK_SIZE, id(raw))
        named = (_object(s.encoding), _object(s.errors)) == (file.encoding, file.errors)
        if not (plain and named and s.telling == (newline == "\n") and newline_of(file) == newline):
            return False
        if newline != "\n" and not _reads_ahead(file, s):
            return False
        file.detach()
        if not s.detached:
            return False
    return True


def _reads_ahead(file: Any, s: _Wrapper) -> bool:
    text, rest = _object(s.decoded_chars), b"two\r\nthree".decode()
    rest = rest if not s.readtranslate else rest.replace("\r\n", "\n")
    return isinstance(text, str) and text[s.decoded_chars_used :] == rest and s.snapshot is None


def newline_of(file: Any) -> str | None:
    """As it was given to `open`."""
    s = _structure(file)
    if s.readuniversal:
        return None if s.readtranslate else ""
    return str(_object(s.readnl))


def flush(file: Any) -> None:
    """A flush switches `tell` on, even where it cannot know the place."""
    telling = _structure(file).telling
    file.flush()
    _structure(file).telling = telling


def take_place(file: Any) -> TextPlace:
    s = _structure(file)
    decoder, encoder = _object(s.decoder), _object(s.encoder)
    return TextPlace(
        chars=_object(s.decoded_chars),
        used=s.decoded_chars_used,
        snapshot=_object(s.snapshot),
        telling=s.telling,
        at_start=s.encoding_start_of_stream,
        decoder=decoder.getstate() if decoder is not None else None,
        encoder=encoder.getstate() if encoder is not None else None,
        newlines=file.newlines,
    )


def put_place(file: Any, place: TextPlace) -> None:
    """Into a file that was begun just now, whose buffer is where it was."""
    s = _structure(file)
    if s.decoded_chars or s.snapshot or s.pending_bytes:
        raise ValueError("it was used before")
    decoder, encoder = _object(s.decoder), _object(s.encoder)
    if decoder is not None and place.decoder is not None:
        _show_newlines(decoder, file.encoding, place.newlines)
        decoder.setstate(place.decoder)
    if encoder is not None and place.encoder is not None:
        encoder.setstate(place.encoder)
    s.decoded_chars, s.decoded_chars_used = _owned(place.chars), place.used
    s.snapshot = _owned(place.snapshot)
    s.telling, s.encoding_start_of_stream = place.telling, place.at_start


def _owned(value: Any) -> int | None:
    if value is None:
        return None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return id(value)


#: What makes a decoder see an end of line of each kind, which `file.newlines` then tells.
_SEEN = {"\r": "\rx", "\n": "\n", "\r\n": "\r\n"}


def _show_newlines(decoder: Any, encoding: str, newlines: Any) -> None:
    kinds = (newlines,) if isinstance(newlines, str) else newlines or ()
    decoder.decode("".join(_SEEN[kind] for kind in kinds).encode(encoding))
