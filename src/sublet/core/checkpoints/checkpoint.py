"""Checkpoints: how a state lies in memory and in packs, what a manifest says, and how many replicas must
agree.

Rules of this file:
- A state is laid out as one run of bytes, the *arena*: storages one after the other, cut into chunks that
  never straddle two large ones. The same shapes always give the same layout, so an unchanged tensor is an
  unchanged chunk.
- A manifest is canonical JSON and is named by its digest. Whatever is read from one is checked before
  anything is allocated (C7).
- A policy is validated when it is made: a quorum that could lose a confirmed save is refused unless one node
  is asked for by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import BadInput, Damaged, InvariantBroken, Unsavable

CHUNK_BYTES = 8 << 20
#: Small storages share a chunk: hundreds of tiny writes cost more than they carry.
GROUP_BYTES = 1 << 20
#: The alignment that direct I/O requires of addresses and offsets.
ALIGN = 4096
SMALL_ALIGN = 64
MAX_DEPTH = 100
MAX_MANIFEST_BYTES = 32 << 20
#: The memory that reading one may take: a few bytes of JSON become a hundred, so the bytes say too little.
MAX_MANIFEST_MEMORY = 256 << 20
MAX_STATE_BYTES = 1 << 46
MAX_PARTS = 1 << 20
FORMAT = 1
#: Stands for a manifest's digest, and names the mark of the ledger a replica belongs to. No digest is this.
MARK = "0" * 64
#: A save that takes longer is given up: what it wrote may be swept from twice this age on (C5).
LONGEST_SAVE_US = 6 * 3600 * 1_000_000


def aligned(offset: int, to: int) -> int:
    return (offset + to - 1) // to * to


# --- layout -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteSpan:
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Layout:
    storages: tuple[ByteSpan, ...]
    chunks: tuple[ByteSpan, ...]
    size: int


def lay_out(sizes: Sequence[int]) -> Layout:
    """Decide where each storage lies in the arena, and where chunks are cut. Every chunk is aligned for
    direct I/O."""
    storages: list[ByteSpan] = [ByteSpan(0, 0)] * len(sizes)
    chunks: list[ByteSpan] = []
    end = 0
    for number, size in enumerate(sizes):
        if size < GROUP_BYTES:
            continue
        storages[number] = ByteSpan(end, size)
        for start in range(0, size, CHUNK_BYTES):
            chunks.append(ByteSpan(end + start, min(CHUNK_BYTES, size - start)))
        end = aligned(end + size, ALIGN)
    group = end
    for number, size in enumerate(sizes):
        if size >= GROUP_BYTES:
            continue
        if end + size - group > GROUP_BYTES and end > group:
            chunks.append(ByteSpan(group, end - group))
            group = end = aligned(end, ALIGN)
        storages[number] = ByteSpan(end, size)
        end = aligned(end + size, SMALL_ALIGN)
    if end > group:
        chunks.append(ByteSpan(group, end - group))
    return Layout(tuple(storages), tuple(chunks), aligned(end, ALIGN))


# --- manifest -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    framework: str  # 'torch', 'parameter', 'numpy', 'scalar', 'jax'
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # in elements; None: contiguous, and the whole storage
    offset: int  # in elements
    storage: int
    grad: bool = False


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Bytes of the arena, and where a pack has them."""

    span: ByteSpan
    digest: str
    pack: str
    at: int  # offset in the pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    name: str
    version: int
    step: int
    schema: str
    policy: str  # digest of the replica policy
    parent: str  # digest of the manifest before, '' for the first
    epoch: int
    attempt: str  # random: no two saves ever write the same manifest, so one that was swept never comes back
    tree: Any
    tensors: tuple[TensorEntry, ...]
    storages: tuple[ByteSpan, ...]
    chunks: tuple[ChunkEntry, ...]
    size: int  # of the arena
    tenant: str = ""  # whose job it is: a lost ledger is rebuilt from this

    @property
    def stored_bytes(self) -> int:
        """How many bytes its chunks hold of the state."""
        return sum(c.span.size for c in self.chunks)

    def added_bytes(self, before: Collection[str]) -> int:
        """How many of those bytes are in packs that the state before did not need."""
        return sum(c.span.size for c in self.chunks if c.pack not in before)

    def to_bytes(self) -> bytes:
        packs = sorted({c.pack for c in self.chunks})
        index = {pack: i for i, pack in enumerate(packs)}
        body = {
            "format": FORMAT,
            "name": self.name,
            "tenant": self.tenant,
            "version": self.version,
            "step": self.step,
            "schema": self.schema,
            "policy": self.policy,
            "parent": self.parent,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "size": self.size,
            "packs": packs,
            "chunks": [[c.span.offset, c.span.size, c.digest, index[c.pack], c.at] for c in self.chunks],
            "storages": [[s.offset, s.size] for s in self.storages],
            "tensors": tensor_rows(self.tensors),
            "tree": self.tree,
        }
        return json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()

    @property
    def bytes(self) -> int:
        """The size of the state: what its chunks hold together."""
        return sum(c.span.size for c in self.chunks)

    def tensor_paths(self) -> list[tuple[str, int]]:
        """Where in the tree each tensor is, for listings."""
        found: list[tuple[str, int]] = []
        pending: list[tuple[str, Any]] = [("", self.tree)]
        while pending:
            path, value = pending.pop()
            if isinstance(value, list):
                pending += [
                    (f"{path}.{n}" if path else str(n), v) for n, v in reversed(list(enumerate(value)))
                ]
            elif isinstance(value, dict) and "$tensor" in value:
                found.append((path or "state", int(value["$tensor"])))
            elif isinstance(value, dict):
                for key, member in reversed(list(value.items())):
                    if key in ("$dict", "$ordered"):
                        pending += [(f"{path}.{k}" if path else str(k), v) for k, v in reversed(member)]
                    else:
                        pending.append(
                            (path if key.startswith("$") else f"{path}.{key}" if path else key, member)
                        )
        return found

    @property
    def packs(self) -> tuple[str, ...]:
        return tuple(sorted({c.pack for c in self.chunks}))


def manifest_bytes(manifest: Manifest) -> bytes:
    """The stored form. Raises `Unsavable` if it could not be read again: a save that returned must load
    (C6)."""
    data = manifest.to_bytes()
    try:
        again = read_manifest(data)
    except Damaged as e:
        raise Unsavable(
            f"the state is too large, too deep or too long for a manifest: {e.message}",
            remedy="put long lists of numbers into one array, and long texts into bytes",
        ) from e
    if again != manifest:
        raise InvariantBroken("a manifest does not read back as what was written")
    return data


def read_manifest(data: bytes) -> Manifest:
    """Raises `Damaged` unless every value is of the right type, in range, and inside what it claims to lie
    in."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise Damaged(f"a manifest of {len(data)} bytes is larger than any this version writes")
    if memory_to_read(data) > MAX_MANIFEST_MEMORY:
        raise Damaged("a manifest of so many parts is larger than any this version writes")
    try:
        # As text: bytes would let it choose an encoding. Ours are ASCII, whatever is in them.
        body = json.loads(data.decode("ascii"))
        return _read(body)
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, BadInput) as e:
        raise Damaged(f"the manifest is not one of ours: {type(e).__name__}: {str(e)[:200]}") from e


def memory_to_read(data: bytes) -> int:
    """The most bytes that `read_manifest` allocates for this data, found by counting what begins a value
    (C7)."""
    parts = 104 * data.count(b"[") + 136 * data.count(b"{") + 48 * data.count(b",") + 64 * data.count(b":")
    # One escaped character makes its whole text four times as wide, and there are two of it for a moment.
    return parts + 32 * data.count(b'"') + len(data) * (10 if b"\\u" in data else 2)


def _read(body: Any) -> Manifest:
    if not isinstance(body, dict) or body["format"] != FORMAT:
        raise Damaged(
            "the manifest has a format this version does not know", remedy="upgrade sublet on this machine"
        )
    size = _number(body["size"], MAX_STATE_BYTES)
    packs = [_hex(p) for p in _list(body["packs"])]
    chunks = []
    end = 0
    for offset, length, digest, pack, at in _list(body["chunks"]):
        span = ByteSpan(_number(offset, size), _number(length, CHUNK_BYTES, least=1))
        if span.offset < end or span.end > size:
            raise Damaged("the manifest's chunks overlap, or lie outside the state")
        if span.offset - end >= ALIGN:
            raise Damaged("the manifest's chunks lie further apart than any this version writes")
        end = span.end
        place = _number(at, MAX_STATE_BYTES)
        chunks.append(ChunkEntry(span, _hex(digest), packs[_number(pack, len(packs) - 1)], place))
    storages = []
    for offset, length in _list(body["storages"]):
        span = ByteSpan(_number(offset, size), _number(length, size))
        if span.end > size:
            raise Damaged("the manifest has a storage outside the state")
        storages.append(span)
    if size - end >= ALIGN:
        raise Damaged("the manifest claims a state larger than its chunks")
    _check_covered(storages, chunks)
    return Manifest(
        name=_text(body["name"]),
        tenant=_text(body["tenant"]),
        version=_number(body["version"], 1 << 62),
        step=_number(body["step"], 1 << 62),
        schema=_text(body["schema"]),
        policy=_text(body["policy"]),
        parent=_hex(body["parent"]) if body["parent"] != "" else "",
        epoch=_number(body["epoch"], 1 << 62),
        attempt=_text(body["attempt"]),
        tree=body["tree"],
        tensors=read_tensors(body["tensors"], len(storages)),
        storages=tuple(storages),
        chunks=tuple(chunks),
        size=size,
    )


def _check_covered(storages: Sequence[ByteSpan], chunks: Sequence[ChunkEntry]) -> None:
    """Every byte of every storage is in a chunk: what is not read would be somebody else's memory."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk.span.offset:
            runs[-1][1] = chunk.span.end
        else:
            runs.append([chunk.span.offset, chunk.span.end])
    at = end = 0
    for span in sorted((s for s in storages if s.size), key=lambda s: s.offset):
        if span.offset < end:
            raise Damaged("the manifest has storages that overlap")
        end = span.end
        while at < len(runs) and runs[at][1] <= span.offset:
            at += 1
        if at == len(runs) or not (runs[at][0] <= span.offset and span.end <= runs[at][1]):
            raise Damaged("the manifest has a storage that no chunk holds")


def tensor_rows(tensors: Sequence[TensorEntry]) -> list[Any]:
    """The stored form of tensors."""
    return [[t.framework, t.dtype, t.shape, t.stride, t.offset, t.storage, int(t.grad)] for t in tensors]


def read_tensors(rows: Any, storages: int) -> tuple[TensorEntry, ...]:
    """Read and check stored tensors. Raises `Damaged`, or an error that `read_manifest` turns into it."""
    return tuple(_tensor(t, storages) for t in _list(rows))


def _tensor(row: Any, storages: int) -> TensorEntry:
    framework, dtype, shape, stride, offset, storage, grad = row
    if framework not in ("torch", "parameter", "numpy", "scalar", "jax"):
        raise Damaged(f"the manifest has a tensor of {_shown(framework)}")
    dims = tuple(_number(n, MAX_STATE_BYTES) for n in _list(shape, most=64))
    steps = None if stride is None else tuple(_number(n, MAX_STATE_BYTES) for n in _list(stride, most=64))
    if steps is not None and len(steps) != len(dims):
        raise Damaged("the manifest has a tensor whose strides do not fit its shape")
    return TensorEntry(
        framework=framework,
        dtype=_text(dtype),
        shape=dims,
        stride=steps,
        offset=_number(offset, MAX_STATE_BYTES),
        storage=_number(storage, storages - 1),
        grad=bool(_number(grad, 1)),
    )


def _number(value: Any, most: int, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Damaged(f"the manifest has {_shown(value)} where a number from {least} to {most} belongs")
    return value


_DIGEST = re.compile(r"[0-9a-f]{64}").fullmatch


def _shown(value: Any) -> str:
    """A short form: the value may be the whole manifest."""
    return (
        repr(value[:40]) if type(value) is str else str(value) if type(value) is int else type(value).__name__
    )


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 4096:
        raise Damaged("the manifest has something else where a text belongs")
    return value


def _hex(value: Any) -> str:
    if type(value) is not str or not _DIGEST(value):
        raise Damaged("the manifest has something else where a digest belongs")
    return value


def _list(value: Any, *, most: int = MAX_PARTS) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise Damaged("the manifest has something else where a list belongs")
    return value


def content_digest(manifest: Manifest) -> str:
    """The digest of the state alone: the same for two saves of one state, whoever saved it and into which
    packs."""
    body = {
        "tree": manifest.tree,
        "tensors": tensor_rows(manifest.tensors),
        "storages": [[s.offset, s.size] for s in manifest.storages],
        "chunks": [[c.span.offset, c.span.size, c.digest] for c in manifest.chunks],
    }
    text = json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


# --- replicas -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """How many copies, and how many must confirm before a save counts."""

    replicas: int = 1
    write_quorum: int = 0  # 0: a majority
    read_quorum: int = 0  # 0: enough to meet every write quorum
    domains: tuple[str, ...] = ()  # what fails together; empty: each replica by itself
    placement: str = (
        "near"  # whom a read asks first: 'near', those on this machine; 'listed', as they are named
    )
    single_node: bool = False  # asked for by name: copies that may all be lost at once

    def __post_init__(self) -> None:
        n = self.replicas
        if self.placement not in ("near", "listed"):
            raise BadInput(f"placement must be 'near' or 'listed', not {self.placement!r}")
        if not 1 <= n <= 16:
            raise BadInput(f"replicas must be 1 to 16, not {n}")
        write = self.write_quorum or n // 2 + 1
        read = self.read_quorum or n - write + 1
        if not (1 <= write <= n and 1 <= read <= n):
            raise BadInput(f"quorums of {write} to write and {read} to read do not fit {n} replicas")
        if not self.single_node:
            if 2 * write <= n:
                raise BadInput(
                    f"a write quorum of {write} of {n} is no majority: two writers could both believe they "
                    "saved",
                    remedy=f"use at least {n // 2 + 1}, or single_node=True if losing the node may lose the "
                    "state",
                )
            if read + write <= n:
                raise BadInput(
                    f"reading {read} and writing {write} of {n} need not meet: a confirmed save could be "
                    "overlooked",
                    remedy=f"read at least {n - write + 1}",
                )
        if self.domains and len(self.domains) != n:
            raise BadInput(f"{len(self.domains)} domains are named for {n} replicas")
        if self.domains and not self.single_node and len(set(self.domains)) < write:
            raise BadInput(
                f"{n} replicas lie in {len(set(self.domains))} failure domains, the write quorum is {write}",
                remedy="spread them, or say single_node=True",
            )
        object.__setattr__(self, "write_quorum", write)
        object.__setattr__(self, "read_quorum", read)

    def to_text(self) -> str:
        body = {
            "replicas": self.replicas,
            "write_quorum": self.write_quorum,
            "read_quorum": self.read_quorum,
            "domains": list(self.domains),
            "placement": self.placement,
            "single_node": self.single_node,
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """Replicas that do not answer, and what that means for saves."""

    replicas: tuple[str, ...]
    why: str
    saves_wait: bool  # those that are left are no quorum

    @property
    def reason(self) -> str:
        names = ", ".join(self.replicas)
        if self.saves_wait:
            return f"store {names} is away ({self.why}): saves wait for it, training goes on"
        return (
            f"store {names} is away ({self.why}): saves go on with the other replicas, and it catches up "
            "when it is back"
        )


def away_of(policy: ReplicaPolicy, silent: dict[str, str], domains: dict[str, str]) -> Away | None:
    """Built from what each silent replica said last."""
    if not silent:
        return None
    left = [name for name in domains if name not in silent]
    names = tuple(sorted(silent))
    whys = sorted(set(silent.values()))
    return Away(replicas=names, why="; ".join(whys), saves_wait=missing_for_quorum(policy, left, domains) > 0)


def missing_for_quorum(policy: ReplicaPolicy, confirmed: Sequence[str], domains: dict[str, str]) -> int:
    """How many more distinct failure domains must confirm (C1); at 0 the save counts."""
    reached = {domains[name] for name in confirmed} if not policy.single_node else set(confirmed)
    return max(0, policy.write_quorum - len(reached))
