"""The store: old or new and never anything else (C6), whatever dies, fails or races on the way."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.checkpoint import CHUNK_BYTES, GROUP_BYTES, lay_out
from sublet.core.errors import (
    BadInput,
    Disconnected,
    Fenced,
    HeadMoved,
    LeaseLost,
    NotDurable,
    NotFound,
    QuorumNotReached,
    SubletError,
    Unsavable,
)
from sublet.core.progress.effect import Committed
from sublet.machine import failpoints
from sublet.machine.failpoints import FailpointHit
from sublet.store.arena import Arena
from sublet.store.save.packing import digest
from tests.store.rig import JOB, Shelf, saver

STORE_PLACES = [
    "after_chunk_write",
    "after_chunk_fsync",
    "after_publish",
    "between_replicas",
    "before_manifest",
    "after_quorum",
]
LEDGER_PLACES = [
    "before_begin", "after_lock", "after_fence_check", "after_cas", "after_effect", "before_commit", "after_commit_before_reply",
]  # fmt: skip


def a_state(fill: int) -> dict[str, Any]:
    """What `rig.CHILD` saves."""
    return {"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, fill, np.uint8)}


def filled(state: Any) -> int:
    """Which state it is; fails if it is none of them."""
    assert sorted(state) == ["a", "b"]
    assert (state["a"] == 1).all()
    assert state["a"].shape == (3 << 20,)
    (value,) = set(state["b"].tolist())
    return int(value)


# --- saving and loading --------------------------------------------------------------------------------------


def test_versions_and_history(shelf: Shelf) -> None:
    for number in range(1, 6):
        saved = shelf.save(a_state(number), number - 1, schema=f"s{number}")
        assert saved.version == number
        head = shelf.rig.ledger.head(JOB)
        assert head is not None
        assert (head.digest, head.step) == (saved.digest, number)
    assert filled(shelf.load()) == 5
    for number in range(1, 6):
        assert filled(shelf.load(version=number)) == number
    found = list(shelf.open().history(JOB))
    assert [(m.version, m.step, m.schema, m.name) for m in found] == [
        (n, n, f"s{n}", JOB) for n in (5, 4, 3, 2, 1)
    ]
    assert [m.parent for m in found] == [digest(m.to_bytes()) for m in found[1:]] + [""]
    assert {m.epoch for m in found} == {shelf.lease.key.epoch}
    for version in (0, 6, -1):
        with pytest.raises(NotFound):
            shelf.load(version=version)
    with pytest.raises(NotFound, match="nothing was saved"):
        shelf.open().load("team/other")


def test_history_ends_where_manifests_do(shelf: Shelf) -> None:
    for number in range(1, 4):
        shelf.save(a_state(number), number - 1)
    second = shelf.store.manifest(JOB, 2)
    for replica in shelf.replicas:
        replica.remove("manifest", digest(second.to_bytes()))
    assert [m.version for m in shelf.open().history(JOB)] == [3]
    assert filled(shelf.load()) == 3


def test_schema(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0, schema="v1")
    assert filled(shelf.load(schema="v1")) == filled(shelf.load()) == 1
    with pytest.raises(BadInput, match="v1"):
        shelf.load(schema="v2")


def test_a_wrong_version_says_which_is_right(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0)
    before = shelf.published()
    for wrong in (0, 2, 7, -1):
        with pytest.raises(HeadMoved) as caught:
            shelf.save(a_state(2), wrong)
        assert caught.value.version == 1
    assert shelf.published() == before
    assert filled(shelf.load()) == 1


def test_the_head_moving_under_a_save(shelf: Shelf) -> None:
    """C6, S3: both saw version 0; the one that commits second is refused by the ledger, not by its own look at the head."""
    other = shelf.open()

    def meanwhile() -> None:
        failpoints.disarm()
        other.save(JOB, a_state(8), expected_version=0, lease=shelf.lease)

    failpoints.arm("after_quorum", meanwhile)
    with pytest.raises(HeadMoved) as caught:
        shelf.save(
            a_state(2), 0, step=2
        )  # the next one after what happened meanwhile: only the version is wrong
    assert caught.value.version == 1
    assert shelf.version == 1
    assert filled(shelf.load()) == 8
    assert shelf.save(a_state(2), 1).version == 2
    assert filled(shelf.load()) == 2


def test_two_processes_race_for_one_version(shelf: Shelf) -> None:
    """S3: exactly one wins, the other is told the version."""
    for version in range(3):
        racers = [saver(shelf, 10 * version + n, version) for n in (1, 2)]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = [racer.communicate(timeout=60) for racer in racers]
        won = [n for n, racer in zip((1, 2), racers, strict=True) if racer.returncode == 0]
        assert len(won) == 1, said
        assert "HeadMoved" in "".join(err for _, err in said)
        assert shelf.version == version + 1
        assert filled(shelf.load()) == 10 * version + won[0]


def test_loading_has_its_own_memory(shelf: Shelf) -> None:
    state = {"n": np.arange(10), "t": torch.zeros(1 << 19)}
    shelf.save(state, 0)
    store = shelf.open()
    one, other = store.load(JOB), store.load(JOB)
    one["n"][0] = 77
    one["t"][0] = 77
    assert (other["n"][0], other["t"][0], state["n"][0], state["t"][0]) == (0, 0, 0, 0)
    saved = store.save(JOB, one, expected_version=1, lease=shelf.lease)
    assert saved.version == 2
    one["n"][1] = 78
    del store
    gc.collect()
    assert one["n"][1] == 78
    assert shelf.load()["n"].tolist() == [77, *range(1, 10)]


def test_a_fork_does_not_share_what_was_loaded(shelf: Shelf) -> None:
    """What was loaded is ordinary memory: a forked data loader's writes are its own."""
    shelf.save({"n": np.zeros(10), "t": torch.zeros(10)}, 0)
    state = shelf.load()
    child = os.fork()
    if child == 0:
        state["n"][:] = 1
        state["t"][:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not state["n"].any()
    assert not state["t"].any()


def test_loads_leave_no_descriptors(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0)
    store = shelf.open()
    store.load(JOB)
    before = arenas()
    states = [store.load(JOB) for _ in range(10)]
    assert arenas() == before
    assert all(filled(s) == 1 for s in states)


def test_a_state_without_memory(shelf: Shelf) -> None:
    for version, state in enumerate([None, {}, {"step": 3}, [1, [2.5]], np.zeros(0), b""]):
        saved = shelf.save(state, version)
        assert (saved.bytes_written, saved.bytes_shared) == (0, 0)
        found = shelf.load()
        assert type(found) is type(state)
        assert np.array_equal(found, state) if isinstance(state, np.ndarray) else found == state


# --- in place ------------------------------------------------------------------------------------------------


def test_into_restores_in_place(shelf: Shelf) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "n": np.arange(5),
        "f": np.float64(2.5),
        "step": 4,
        "l": [1, torch.ones(2)],
    }
    shelf.save(state, 0)
    other = torch.nn.Linear(3, 3)
    target: Any = {
        **state,
        "model": other.state_dict(),
        "n": np.zeros(5, np.int64),
        "f": np.float64(0),
        "step": 0,
        "l": [0, torch.zeros(2)],
    }
    kept, array = target["l"][1], target["n"]
    assert shelf.load(into=target) is target
    assert torch.equal(other.weight, model.weight)
    assert target["n"] is array
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert (target["step"], target["f"], target["l"][0]) == (4, 2.5, 1)
    assert kept.tolist() == [1, 1]
    one = torch.zeros(3, requires_grad=True)
    shelf.save(torch.ones(3), 1)
    shelf.load(into=one)
    assert one.tolist() == [1, 1, 1]


READONLY = np.zeros(4)
READONLY.setflags(write=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"z": torch.zeros(4, dtype=torch.float64)}, {"z": torch.zeros(5)}, {"z": np.zeros(4, np.float32)}, {"y": torch.zeros(4)},
        {"z": torch.zeros(4), "more": 1}, [torch.zeros(4)], {"z": {"k": 1}}, {"z": [1]},
        {"n": np.zeros(3)}, {"n": READONLY}, {"n": np.zeros(4, ">f8")}, {"n": torch.zeros(4, dtype=torch.float64)}, {"l": [1]}, {"l": [torch.zeros(1), 1]},
        {"l": {0: 1}}, {"i": torch.zeros(())},
    ],
    ids=lambda w: str(w)[:40],
)  # fmt: skip
def test_into_something_else_changes_nothing(shelf: Shelf, wrong: Any) -> None:
    """`BadInput` promises that nothing was changed: also not what came before the part that does not fit."""
    state = {"a": torch.ones(2), "z": torch.ones(4), "n": np.ones(4), "l": [1, 2], "i": 7}
    shelf.save(state, 0)
    target: Any = wrong
    first = torch.zeros(2)
    if isinstance(wrong, dict):
        target = {"a": first, "z": torch.zeros(4), "n": np.zeros(4), "l": [0, 0], "i": 0, **wrong}
    with pytest.raises(BadInput, match="state"):
        shelf.load(into=target)
    assert not first.any()
    if isinstance(wrong, dict):
        assert target["i"] is wrong.get("i", target["i"])
        assert target["l"] == [0, 0] or "l" in wrong


@pytest.mark.parametrize("target", [(torch.zeros(1),), 5, "text", np.float64(1)], ids=str)
def test_into_what_cannot_be_changed(shelf: Shelf, target: Any) -> None:
    shelf.save([torch.ones(1)], 0)
    with pytest.raises(BadInput, match="in place"):
        shelf.load(into=target)


# --- incremental ---------------------------------------------------------------------------------------------


def test_exactly_the_changed_chunks_are_written(shelf: Shelf) -> None:
    rng = random.Random(5)
    sizes = [CHUNK_BYTES + 5000, 2 * GROUP_BYTES, 100, 70_000, 0, GROUP_BYTES]
    arrays = [np.frombuffer(bytearray(rng.randbytes(n)), np.uint8) for n in sizes]
    layout = lay_out(sizes)
    total = sum(c.size for c in layout.chunks)
    saved = shelf.save(arrays, 0)
    assert (saved.bytes_written, saved.bytes_shared) == (total, 0)
    saved = shelf.save(arrays, 1)
    assert (saved.bytes_written, saved.bytes_shared) == (0, total)
    for version in range(2, 9):
        edits = [(n, rng.randrange(sizes[n])) for n in rng.sample([0, 1, 2, 3, 5], rng.choice([1, 2]))]
        for number, at in edits:
            arrays[number][at] ^= 255
        places = [layout.storages[n].offset + at for n, at in edits]
        expected = sum(c.size for c in layout.chunks if any(c.offset <= p < c.end for p in places))
        # This process compares with its arena, a new one with the digests of the parent: the same comes of it.
        store = shelf.store if version % 2 else shelf.open()
        before = {p.name for p in shelf.files("packs")}
        saved = store.save(JOB, arrays, expected_version=version, lease=shelf.lease)
        assert (saved.bytes_written, saved.bytes_shared) == (expected, total - expected)
        (pack,) = {p.name for p in shelf.files("packs")} - before
        size = (shelf.folders[0] / "packs" / pack).stat().st_size
        assert expected <= size < expected + 4096 * len(edits)
        found = shelf.load()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(arrays, found, strict=True))


def test_another_shape_is_another_layout(shelf: Shelf) -> None:
    """The arena of the old one is let go, and nothing of it is believed of the new."""
    before = arenas()
    for version, size in enumerate([1000, 2_000_000, 1000, 5_000_000, 999]):
        state = {"x": np.full(size, version, np.uint8)}
        shelf.save(state, version)
        assert np.array_equal(shelf.load()["x"], state["x"])
    assert arenas() == before + 2, "one arena: its descriptor, and the map's own"
    shelf.store.close()
    assert arenas() == before, "a closed store holds no memory"
    shelf.save({"x": np.zeros(5)}, 5)  # and may be used again
    with shelf.open() as store:
        store.save(JOB, {"x": np.zeros(6)}, expected_version=6, lease=shelf.lease)
        assert arenas() == before + 4
    assert arenas() == before + 2


def test_another_cut_of_the_same_size(shelf: Shelf) -> None:
    one = {"x": np.full(2 * GROUP_BYTES, 1, np.uint8)}
    two = {"x": np.full(GROUP_BYTES, 2, np.uint8), "y": np.full(GROUP_BYTES, 3, np.uint8)}
    for version, state in enumerate([one, two, one]):
        shelf.save(state, version)
        found = shelf.load()
        assert all(np.array_equal(found[k], state[k]) for k in state)


def arenas() -> int:
    gc.collect()
    held = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held += "sublet-arena" in os.readlink(f"/proc/self/fd/{fd}")
    return held


def test_a_new_process_shares_with_the_parent(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0)
    racer = saver(shelf, 2, 1)
    _, err = racer.communicate("go\n", timeout=60)
    assert racer.returncode == 0, err
    first, second = shelf.store.manifest(JOB, 1), shelf.store.manifest(JOB, 2)
    assert len(shelf.files("packs")) == 6
    assert second.chunks[0] == first.chunks[0]
    assert second.chunks[1].pack != first.chunks[1].pack
    assert sum(p.stat().st_size for p in shelf.folders[0].glob("packs/*")) < (3 << 20) + 9000


def test_two_names_do_not_meet(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0)
    shelf.store.save("team/second", a_state(2), expected_version=0, lease=shelf.lease)
    shelf.save(a_state(3), 1)
    assert filled(shelf.load()) == 3
    assert filled(shelf.open().load("team/second")) == 2


def test_a_save_goes_on_when_the_one_before_is_lost(shelf: Shelf) -> None:
    """A damaged past must not keep the present from being saved, nor be leaned on."""
    shelf.save(a_state(1), 0)
    for path in shelf.published():
        path.unlink()
    assert shelf.save(a_state(1), 1).bytes_written > 3 << 20
    assert filled(shelf.load()) == 1
    for path in shelf.files("manifests"):
        path.write_bytes(b"bad")
    store = shelf.open()
    assert store.save(JOB, a_state(4), expected_version=2, lease=shelf.lease).version == 3
    assert filled(shelf.load()) == 4


def test_an_interrupted_copy_is_not_believed(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: Ctrl-C in the middle of the copy leaves new bytes in the arena; the next save must not take them for stored ones."""
    shelf.save(a_state(1), 0)
    real = Arena.take

    def interrupted(self: Arena, *args: Any, **kwargs: Any) -> list[bool]:
        real(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Arena, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shelf.save(a_state(2), 1)
    monkeypatch.setattr(Arena, "take", real)
    assert filled(shelf.load()) == 1
    shelf.save(a_state(2), 1)
    assert filled(shelf.load()) == 2


def test_no_memory_for_a_new_arena(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.save(a_state(1), 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
        with pytest.raises(OSError, match="no memory"):
            shelf.save({"other": np.zeros(5)}, 1)
    assert shelf.save(a_state(2), 1).version == 2
    assert filled(shelf.load()) == 2


def test_a_state_whose_manifest_could_not_be_read_is_not_saved(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C6: a save that returned is one that loads."""
    shelf.save(a_state(1), 0)
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST_BYTES", 10_000)
    with pytest.raises(Unsavable):
        shelf.save({"numbers": list(range(10_000))}, 1)
    monkeypatch.undo()
    with pytest.raises(Unsavable):
        shelf.save(a_state(1), 1, schema="x" * 5000)
    with pytest.raises(Unsavable):
        shelf.save({"a": np.zeros(3, [(f"field{i}", "<f8") for i in range(500)])}, 1)
    with pytest.raises(Unsavable, match="state"):
        shelf.save({"a": object()}, 1)
    assert shelf.version == 1
    assert filled(shelf.load()) == 1


# --- dying and failing ---------------------------------------------------------------------------------------


def places() -> list[str]:
    """Every place, and the later passes of those that are passed several times in one save."""
    more = [
        "after_chunk_write=X@2",
        "after_chunk_fsync=X@3",
        "after_publish=X@2",
        "after_publish=X@4",
        "after_publish=X@6",
        "between_replicas=X@2",
        "between_replicas=X@3",
    ]
    return [f"{p}=X@1" for p in STORE_PLACES + LEDGER_PLACES] + more


@pytest.mark.parametrize("place", places())
def test_killed(shelf: Shelf, place: str) -> None:
    """C6: kill -9 anywhere in a save. Old or new, and the next save works."""
    shelf.save(a_state(1), 0)
    racer = saver(shelf, 2, 1, place.replace("X", "kill"))
    out, err = racer.communicate("go\n", timeout=60)
    assert racer.returncode == -signal.SIGKILL, f"{place} was not passed: {out}{err}"
    happened = place.startswith("after_commit_before_reply")
    assert shelf.version == 1 + happened
    assert filled(shelf.load()) == 1 + happened
    assert filled(shelf.load(version=1)) == 1
    racer = saver(shelf, 3, 1 + happened)
    _, err = racer.communicate("go\n", timeout=60)
    assert racer.returncode == 0, err
    assert filled(shelf.load()) == 3
    assert shelf.rig.faults() == []


@pytest.mark.parametrize("place", ["before_manifest", "after_publish", "after_fence_check"])
def test_killed_in_the_first_save(shelf: Shelf, place: str) -> None:
    racer = saver(shelf, 1, 0, f"{place}=kill")
    racer.communicate("go\n", timeout=60)
    assert racer.returncode == -signal.SIGKILL
    with pytest.raises(NotFound):
        shelf.load()
    shelf.save(a_state(1), 0)
    assert filled(shelf.load()) == 1


@pytest.mark.parametrize("place", places())
def test_raised(shelf: Shelf, place: str) -> None:
    """C6 within one process: what the slot believes stored after a failure is stored."""
    shelf.save(a_state(1), 0)
    name, _, nth = place.partition("=X@")
    failpoints.arm(name, "raise", nth=int(nth))
    with pytest.raises(FailpointHit):
        shelf.save(a_state(2), 1)
    failpoints.disarm()
    happened = name == "after_commit_before_reply"
    assert shelf.version == 1 + happened
    assert filled(shelf.load()) == 1 + happened
    assert shelf.save(a_state(2), 1 + happened).version == 2 + happened
    assert filled(shelf.load()) == 2
    assert shelf.save(a_state(3), 2 + happened).version == 3 + happened
    assert filled(shelf.load()) == 3
    assert shelf.files("drafts") == []


def test_the_head_moves_last(shelf: Shelf) -> None:
    """C1: when the ledger is asked, a quorum has the manifest and every chunk of it under their names."""
    seen: list[int] = []

    def look() -> None:
        if not seen:
            seen.append(len(shelf.files("manifests")))
            seen.append(len(shelf.files("packs")))
            assert shelf.rig.sql("SELECT count(*) FROM head") == [(0,)]

    failpoints.arm("after_quorum", look)
    shelf.save(a_state(1), 0)
    assert seen == [3, 3]


def test_the_chunks_come_before_the_manifest(shelf: Shelf) -> None:
    """C1: no manifest on any replica refers to a pack that is not on a quorum yet."""
    seen: list[tuple[int, int]] = []
    failpoints.arm(
        "after_publish", lambda: seen.append((len(shelf.files("packs")), len(shelf.files("manifests"))))
    )
    shelf.save(a_state(1), 0)
    marks = [(0, 0)] * 3  # whose replicas they are
    assert seen == [*marks, (1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)]


@pytest.mark.parametrize("how", ["released", "expired", "revoked"])
def test_a_lease_lost_during_a_save_commits_nothing(shelf: Shelf, how: str) -> None:
    """S2: the fence is in the transaction that moves the head."""
    shelf.save(a_state(1), 0)
    before = shelf.rig.ledger.head(JOB)

    def lose() -> None:
        if how == "released":
            shelf.rig.release(shelf.answer)
        elif how == "expired":
            shelf.rig.advance(3_600_000_000)
        else:
            shelf.rig.sql("UPDATE lease SET epoch = epoch + 1 WHERE id = 'holder'")

    failpoints.arm("after_quorum", lose)
    with pytest.raises((Fenced, LeaseLost)):
        shelf.save(a_state(2), 1)
    assert shelf.rig.ledger.head(JOB) == before
    assert filled(shelf.load()) == 1


def test_a_lost_lease_is_asked_first(shelf: Shelf) -> None:
    class Lost:
        key = shelf.lease.key

        def check(self) -> None:
            raise LeaseLost

    with pytest.raises(LeaseLost):
        shelf.save(a_state(1), 0, lease=Lost())
    assert shelf.published() == []


class Cut:
    """A ledger whose connection breaks under a commit."""

    def __init__(self, ledger: Any, commit: Callable[..., Any], broken: int = 0) -> None:
        self._ledger, self._commit, self.broken = ledger, commit, broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def commit(self, *args: Any) -> Any:
        return self._commit(self._ledger, *args)

    def effect(self, key: str) -> Any:
        if self.broken:
            self.broken -= 1
            raise Disconnected
        return self._ledger.effect(key)


def happened_then_cut(ledger: Any, *args: Any) -> Committed:
    ledger.commit(*args)
    raise Disconnected


def cut_before(_: Any, *__: Any) -> Committed:
    raise Disconnected


def test_a_commit_of_unknown_outcome_is_asked_for(shelf: Shelf) -> None:
    """S5: it happened, and the connection broke before the answer."""
    ledger: Any = shelf.rig.ledger
    for version, broken in enumerate([0, 3]):
        shelf.store._ledger = lambda broken=broken: Cut(ledger, happened_then_cut, broken)  # type: ignore[misc]
        assert shelf.save(a_state(version), version).version == version + 1
    for broken in (0, 1, 99):
        shelf.store._ledger = lambda broken=broken: Cut(ledger, cut_before, broken)  # type: ignore[misc]
        with pytest.raises(Disconnected):
            shelf.save(a_state(9), 2)
    assert shelf.version == 2
    shelf.store._ledger = lambda: ledger
    assert shelf.save(a_state(9), 2).version == 3
    assert filled(shelf.load()) == 9


def test_errors_are_ours(shelf: Shelf) -> None:
    """A replica whose folders turn into something else fails in our words, not in the operating system's."""
    shelf.save(a_state(1), 0)
    for number in (0, 1):
        for name in ("packs", "manifests", "drafts"):
            subprocess.run(["rm", "-rf", str(shelf.folders[number] / name)], check=True)
            (shelf.folders[number] / name).write_text("a file")
    with pytest.raises(QuorumNotReached) as caught:
        shelf.save(a_state(2), 1)
    assert isinstance(caught.value, SubletError)
    assert filled(shelf.load()) == 1


# --- what a save may refer to --------------------------------------------------------------------------------


def packs_of(shelf: Shelf) -> set[str]:
    return set(next(iter(shelf.open().history(JOB))).packs)


def test_a_save_refers_to_its_parent_or_to_what_it_wrote(shelf: Shelf) -> None:
    """C5: another holder replaced the state meanwhile, so what this one knew is no longer needed by any head: a sweep may have begun to
    delete it although it is still there."""
    mine = {"a": np.full(3 << 20, 1, np.uint8)}
    theirs = {"a": np.full(3 << 20, 2, np.uint8)}
    shelf.save(mine, 0)
    old = packs_of(shelf)
    shelf.open().save(JOB, theirs, expected_version=1, lease=shelf.lease)
    between = packs_of(shelf)
    saved = shelf.save(mine, 2)
    assert saved.bytes_shared == 0
    assert not packs_of(shelf) & (old | between)
    assert shelf.save(mine, 3).bytes_written == 0


def test_what_a_failed_save_wrote_is_used_by_the_next_while_it_is_young(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000]
    monkeypatch.setattr("sublet.store.checkpoints._now_us", lambda: clock[0])
    mine = {"a": np.full(3 << 20, 1, np.uint8)}
    failpoints.arm("before_manifest", "raise")
    with pytest.raises(FailpointHit):
        shelf.save(mine, 0)
    failpoints.disarm()
    clock[0] += checkpoint.LONGEST_SAVE_US - 1
    assert shelf.save(mine, 0).bytes_written == 0
    mine["a"][:] = 2
    failpoints.arm("before_manifest", "raise")
    with pytest.raises(FailpointHit):
        shelf.save(mine, 1)
    failpoints.disarm()
    clock[0] += checkpoint.LONGEST_SAVE_US
    assert shelf.save(mine, 1).bytes_shared == 0


def test_a_save_that_takes_too_long_is_given_up(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote first may be old enough to be swept by now."""
    clock = [1_000]
    monkeypatch.setattr("sublet.store.checkpoints._now_us", lambda: clock[0])
    failpoints.arm("after_quorum", lambda: clock.__setitem__(0, clock[0] + checkpoint.LONGEST_SAVE_US + 1))
    with pytest.raises(NotDurable, match="longer than 6 hours"):
        shelf.save(a_state(1), 0)
    failpoints.disarm()
    assert shelf.version == 0
    assert shelf.save(a_state(1), 0).version == 1


def test_no_two_saves_write_the_same_manifest(shelf: Shelf) -> None:
    failpoints.arm("after_quorum", "raise")
    for _ in range(2):
        with pytest.raises(FailpointHit):
            shelf.save(a_state(1), 0)
    failpoints.disarm()
    assert len({p.name for p in shelf.files("manifests")}) == 2
