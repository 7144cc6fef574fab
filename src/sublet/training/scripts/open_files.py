"""File objects that a script holds open, as part of a captured state.

    described = describe(file)       # plain data: which file, how, and where in it
    put_back(file, described)        # in another process: the same object goes on from there
    file = reopened(described)       # or a new one

`put_back` comes after `FileHistory.undo`, which puts back what is in the files.

Rules of this file:
- Nothing is truncated, and nothing is written: what a file object had buffered by chance is dropped.
- What is in Python's write buffers when it is described is flushed, so that it is in the file and nowhere
  else.
- A file that was being read must be as it was then: its size and time are compared.
- What cannot go on from a name and a place (a pipe, a compressor) is Unsavable, in words.
- Every layer is begun again by its own `__init__`: `file`, `file.buffer` and `file.buffer.raw` stay what
  they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
import sys
from dataclasses import asdict
from typing import Any

from sublet.core.errors import Stale, Unsavable
from sublet.training.scripts.files import text_state
from sublet.training.scripts.files.descriptors import path_of_descriptor

_PLAIN = (str, bytes, int, float, bool, type(None))
_BUFFERED = {cls.__name__: cls for cls in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom)}
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_SYNC | os.O_DSYNC | os.O_NOATIME | os.O_DIRECT
#: Attributes that `open` and the objects themselves set.
_OWN_ATTRIBUTES = ("name", "mode", "__IOBase_closed")


def describe(file: Any) -> dict[str, Any]:
    """What `put_back` needs, in plain data. Raises Unsavable."""
    if isinstance(file, io.StringIO | io.BytesIO):
        return _describe_memory(file)
    if isinstance(file, io.TextIOWrapper):
        return _describe_text(file)
    if type(file).__name__ in _BUFFERED and isinstance(file, tuple(_BUFFERED.values())):
        return _describe_buffered(file)
    if isinstance(file, io.FileIO):
        return _describe_raw(file)
    raise Unsavable(_why_not(file))


def put_back(file: Any, described: dict[str, Any]) -> None:
    """The same object, as it was described."""
    kind = described["kind"]
    if kind == "standard":
        return
    if kind == "memory":
        if described["closed"]:
            file.close()
        else:
            file.__setstate__(tuple(described["state"]))
    elif described["closed"]:
        abandon(file)
        _put_attributes_of_layers(file, described)
    elif kind == "text":
        _put_text(file, described)
    elif kind == "buffered":
        _put_buffered(file, described)
    else:
        _put_raw(file, described)


def reopened(described: dict[str, Any]) -> Any:
    """A new object, as it was described."""
    kind = described["kind"]
    if described.get("subclass"):
        raise Unsavable(f"a file of the class {described['subclass']} can only be put back where it is")
    if kind == "standard":
        stream = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[described["fd"]]
        layer: Any = stream if described["layer"] == "text" else getattr(stream, "buffer", None)
        return layer if described["layer"] != "raw" else getattr(layer, "raw", None)
    if kind == "memory":
        file: Any = io.StringIO() if described["text"] else io.BytesIO()
    else:
        file = _of_nothing(described)
    put_back(file, described)
    return file


def abandon(file: Any) -> None:
    """Close it, and drop what is in its buffers: it belongs to a past that has been undone."""
    if isinstance(file, io.StringIO | io.BytesIO):
        file.close()
        return
    raw, name = _raw_of(file), None
    with contextlib.suppress(AttributeError):
        name = raw.name
    _begin_raw(raw, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), raw.mode, name)
    if isinstance(file, io.TextIOWrapper):
        _begin_buffered(file.buffer, raw, io.DEFAULT_BUFFER_SIZE)
        io.TextIOWrapper.__init__(file, file.buffer, encoding=file.encoding, errors=file.errors)
    elif file is not raw:
        _begin_buffered(file, raw, io.DEFAULT_BUFFER_SIZE)
    file.close()


# --- described ----------------------------------------------------------------------------------------------


def _describe_memory(file: Any) -> dict[str, Any]:
    text = isinstance(file, io.StringIO)
    described: dict[str, Any] = {"kind": "memory", "text": text, "closed": file.closed}
    if not file.closed:
        *state, attributes = file.__getstate__()
        if attributes:
            raise Unsavable(f"a {type(file).__name__} has attributes of its own: {', '.join(attributes)}")
        described["state"] = [*state, None]
    return described | _attributes(file)


def _describe_text(file: Any) -> dict[str, Any]:
    if not text_state.is_known():
        raise Unsavable(f"text files of Python {sys.version.split()[0]} cannot be looked into")
    try:
        closed, buffer = file.closed, file.buffer
    except ValueError as e:
        raise Unsavable(f"a text file is open without its buffer: {e}") from e
    if not closed and buffer.writable():
        text_state.flush(file)
    inner = describe(buffer)
    if inner["kind"] == "standard":
        return {**inner, "layer": "text"}
    described = {
        "kind": "text",
        "buffer": inner,
        "encoding": file.encoding,
        "errors": file.errors,
        "newline": text_state.newline_of(file),
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "chunk": file._CHUNK_SIZE,
        "closed": closed,
        "place": None if closed else asdict(text_state.take_place(file)),
    }
    return described | _attributes(file)


def _describe_buffered(file: Any) -> dict[str, Any]:
    if not file.closed and file.writable():
        file.flush()
    inner = describe(file.raw)
    if inner["kind"] == "standard":
        return {**inner, "layer": "buffered"}
    described = {
        "kind": "buffered",
        "class": type(file).__name__,
        "raw": inner,
        "size": file.__sizeof__() - type(file).__basicsize__,
        "closed": file.closed,
        "at": 0 if file.closed else file.tell(),
    }
    return described | _attributes(file)


def _describe_raw(file: io.FileIO) -> dict[str, Any]:
    described: dict[str, Any] = {"kind": "raw", "mode": file.mode, "closed": file.closed}
    if file.closed:
        return described | _attributes(file)
    fd = file.fileno()
    if fd <= 2:
        return {"kind": "standard", "fd": fd, "layer": "raw"}
    info = os.fstat(fd)
    shown = getattr(file, "name", fd)
    if stat.S_ISREG(info.st_mode):
        path = path_of_descriptor(fd)
        if not path:
            raise Unsavable(f"{shown} is open, but was removed or replaced: nothing could be opened again")
    elif stat.S_ISCHR(info.st_mode) and os.path.realpath(f"/proc/self/fd/{fd}") == os.devnull:
        path = os.devnull
    else:
        raise Unsavable(f"{shown} is {_what_it_is(fd, info)}, which cannot be opened again where it was")
    if not file.closefd:
        raise Unsavable(f"{shown} is open on a descriptor that is somebody else's (closefd=False)")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & _KEPT_FLAGS
    described |= {
        "path": path,
        "flags": flags,
        "at": os.lseek(fd, 0, os.SEEK_CUR) if path != os.devnull else 0,
        "inheritable": os.get_inheritable(fd),
        # When a file was written last differs each time that the same is written to it.
        "looks": [info.st_size, info.st_mtime_ns if _is_only_read(flags) else 0],
    }
    return described | _attributes(file)


def _is_only_read(flags: int) -> bool:
    return flags & os.O_ACCMODE == os.O_RDONLY


def _attributes(file: Any) -> dict[str, Any]:
    """What the program may have set, and which class it is."""
    found = {key: value for key, value in getattr(file, "__dict__", {}).items() if key != "__IOBase_closed"}
    for key, value in found.items():
        if not isinstance(value, _PLAIN) and key not in _OWN_ATTRIBUTES:
            raise Unsavable(f"the attribute {key} of an open file is no plain value")
    exact = type(file).__module__ in ("_io", "io")
    name = found.get("name")
    if isinstance(name, os.PathLike):
        found["name"] = os.fspath(name)
    return {"attributes": found, "subclass": "" if exact else type(file).__qualname__}


def _what_it_is(fd: int, info: os.stat_result) -> str:
    if os.isatty(fd):
        return "a terminal"
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"))
    return next((words for test, words in kinds if test(info.st_mode)), "no file")


def _why_not(file: Any) -> str:
    module, name = type(file).__module__, type(file).__qualname__
    if module in ("gzip", "bz2", "lzma", "zipfile", "tarfile", "_compression"):
        return f"a {module}.{name} is open: where it is in what it compresses cannot be taken up again"
    if isinstance(file, io.BufferedRWPair):
        return "a pair of pipes or sockets is open, which cannot be opened again where it was"
    return f"an open {module}.{name} cannot be opened again where it was"


# --- put back -----------------------------------------------------------------------------------------------


def _put_raw(file: io.FileIO, described: dict[str, Any]) -> None:
    path, flags = described["path"], described["flags"]
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as e:
        raise Stale(f"{path} was open at this step and cannot be opened: {e.strerror}") from e
    info = os.fstat(fd)
    size, mtime_ns = described["looks"]
    changed = info.st_size != size or (_is_only_read(flags) and info.st_mtime_ns != mtime_ns)
    if path != os.devnull and changed:
        os.close(fd)
        raise Stale(
            f"{path} was open at this step with {size} bytes, and was changed since",
            remedy="put the file back as it was, or start the job anew under another name",
        )
    _begin_raw(file, fd, described["mode"], None)
    os.set_inheritable(fd, described["inheritable"])
    _put_attributes(file, described)
    if path != os.devnull:
        file.seek(described["at"])
    # A history that watches learns how the file is written from now on.
    sys.audit("sublet.file_put_back", path, described["mode"])


def _put_buffered(file: Any, described: dict[str, Any]) -> None:
    _put_raw(file.raw, described["raw"])
    _begin_buffered(file, file.raw, described["size"])
    _put_attributes(file, described)
    if described["raw"]["path"] != os.devnull:
        file.seek(described["at"])


def _put_text(file: Any, described: dict[str, Any]) -> None:
    inner = described["buffer"]
    if inner["kind"] == "buffered":
        _put_buffered(file.buffer, inner)
    else:
        _put_raw(_raw_of(file), inner)
    io.TextIOWrapper.__init__(
        file,
        file.buffer,
        encoding=described["encoding"],
        errors=described["errors"],
        newline=described["newline"],
        line_buffering=described["line_buffering"],
        write_through=described["write_through"],
    )
    file._CHUNK_SIZE = described["chunk"]
    _put_attributes(file, described)
    text_state.put_place(file, text_state.TextPlace(**described["place"]))


def _of_nothing(described: dict[str, Any]) -> Any:
    """Open, and of the right kind."""
    inner = described
    while inner["kind"] != "raw":
        inner = inner["raw" if inner["kind"] == "buffered" else "buffer"]
    raw = io.FileIO(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), inner["mode"])
    if described["kind"] == "raw":
        return raw
    of_text = described["kind"] == "text"
    outer = described["buffer"] if of_text else described
    buffer: Any = _BUFFERED[outer["class"]](raw) if outer["kind"] == "buffered" else raw
    return io.TextIOWrapper(buffer, encoding=described["encoding"]) if of_text else buffer


def _raw_of(file: Any) -> Any:
    if isinstance(file, io.TextIOWrapper):
        file = file.buffer
    return file if isinstance(file, io.FileIO) else file.raw


def _begin_raw(raw: Any, fd: int, mode: str, name: Any) -> None:
    """It closes what it had open. With a descriptor it neither truncates nor creates."""
    if raw.mode != mode:  # its own __init__ does not take back what it was allowed before
        os.close(fd)
        raise Unsavable(f"{raw.name} is open in mode {raw.mode} now, and was in mode {mode}")
    io.FileIO.__init__(raw, fd, mode, closefd=True)
    vars(raw).pop("__IOBase_closed", None)
    if name is not None:
        raw.name = name


def _begin_buffered(file: Any, raw: Any, size: int) -> None:
    kind = next(cls for cls in _BUFFERED.values() if isinstance(file, cls))
    kind.__init__(file, raw, size or io.DEFAULT_BUFFER_SIZE)
    vars(file).pop("__IOBase_closed", None)


def _put_attributes(file: Any, described: dict[str, Any]) -> None:
    for key, value in described["attributes"].items():
        setattr(file, key, value)


def _put_attributes_of_layers(file: Any, described: dict[str, Any]) -> None:
    _put_attributes(file, described)
    for layer in ("buffer", "raw"):
        if layer in described:
            _put_attributes_of_layers(getattr(file, layer), described[layer])
