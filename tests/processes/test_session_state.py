"""`sublet.save()` and `sublet.saved()` inside a session: bytes to whoever holds the lease, and back, bit for
bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import sublet
from sublet.ports.worker import Part
from sublet.processes.worker.local import LocalWorker
from sublet.store.codec import TreeCodec
from tests.processes.test_sealed import Heard, run, shipped


class Shelf:
    """Answers as a session host does: keeps the bytes, opens nothing."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.refuse: dict[str, str] = {}

    def __call__(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        if self.refuse:
            return False, [json.dumps(self.refuse).encode()]
        if head == {"ask": "save"}:
            (whole,) = parts
            self.kept.append(bytes(whole))
            return True, [json.dumps({"version": len(self.kept), "bytes_written": len(whole)}).encode()]
        assert head == {"ask": "load"}
        return True, self.kept[-1:]


def test_source_saves_and_finds_its_state_again(worker: LocalWorker) -> None:
    shelf = Shelf()
    fine, told = run(worker, "import sublet\nassert sublet.saved() is None", sink=Heard(shelf))
    assert fine, told
    source = """
        import numpy as np
        state = {"step": 3, "weights": np.arange(100_000, dtype="f4"), "note": "ü", "deep": {"a": [1, None, 2.5]}}
        assert sublet.save(state) == 1
        state["step"] = 4
        assert sublet.save(state) == 2
        found = sublet.saved()
        assert found["step"] == 4 and found["deep"] == {"a": [1, None, 2.5]} and found["note"] == "ü"
        assert (found["weights"] == state["weights"]).all() and found["weights"].dtype == np.float32
        found["weights"][0] = 7
    """
    fine, told = run(worker, source, sink=Heard(shelf))
    assert fine, told
    assert TreeCodec().decode(memoryview(bytearray(shelf.kept[-1])))["step"] == 4


def save_and_load(n: int) -> tuple[int, Any]:
    version = sublet.save({"n": np.full(n, 9)})
    found = sublet.saved()
    assert found is not None
    return version, int(found["n"].sum())


def test_a_function_sent_as_a_pickle_saves_too(worker: LocalWorker) -> None:
    assert shipped(worker, save_and_load, 1000, sink=Heard(Shelf())) == (True, (1, 9000))


@pytest.mark.parametrize("code", ["quota_reached", "lease_lost", "disconnected"])
def test_a_refusal_is_raised_as_what_it_is(worker: LocalWorker, code: str) -> None:
    shelf = Shelf()
    shelf.refuse = {"code": code, "message": "the words", "remedy": "the way out"}
    source = f"""
        import sublet
        from sublet.core.errors import error_by_code
        try:
            sublet.save({{"a": 1}})
        except error_by_code({code!r}) as e:
            print(type(e).__name__, e.message, e.remedy, sep=", ")
    """
    sink = Heard(shelf)
    fine, told = run(worker, source, sink=sink)
    assert fine, told
    assert sink.of("stdout").strip().endswith("the words, the way out")
    shelf.refuse = {"no code": "x"}
    assert run(worker, "sublet.saved()", sink=Heard(shelf))[1]["kind"] == "BadInput"


@pytest.mark.parametrize("state", ["7", "[1]", "{1: 2}", "{'f': open('/dev/null')}", "{'a': object()}"])
def test_what_is_no_state_is_refused_and_nobody_is_asked(worker: LocalWorker, state: str) -> None:
    shelf = Shelf()
    fine, told = run(worker, f"import sublet\nsublet.save({state})", sink=Heard(shelf))
    assert (fine, shelf.kept) == (False, [])
    assert told["kind"] in ("BadInput", "Unsavable")


def test_only_the_thread_of_the_call_may_save(worker: LocalWorker) -> None:
    source = """
        import sublet, threading
        said = []
        def elsewhere():
            try:
                sublet.save({})
            except sublet.BadInput as e:
                said.append(e.message)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "only the thread" in said[0]
    """
    fine, told = run(worker, source, sink=Heard(Shelf()))
    assert fine, told


def test_an_ordinary_call_has_no_session(worker: LocalWorker) -> None:
    with pytest.raises(sublet.BadInput, match="session"):
        worker.call(sublet.save, ({"a": 1},), {})
