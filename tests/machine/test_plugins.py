"""What is installed is read once, and read again for a name that is not known."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from sublet.machine import plugins


def test_read_once_and_again_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [EntryPoint("dir", "a:b", "sublet.stores"), EntryPoint("aws", "a:b", "sublet.notices")]
    reads: list[int] = []

    def read() -> EntryPoints:
        reads.append(1)
        return EntryPoints(here)

    monkeypatch.setattr(plugins, "entry_points", read)
    monkeypatch.setattr(plugins, "_read", None)
    assert plugins.installed("sublet.stores").names == {"dir"}
    assert plugins.installed("sublet.stores", "dir").names == {"dir"}
    assert plugins.installed("sublet.notices").names == {"aws"}
    assert len(reads) == 1
    here.append(EntryPoint("mine", "a:b", "sublet.stores"))
    assert plugins.installed("sublet.stores", "dir").names == {"dir"}
    assert plugins.installed("sublet.stores", "mine").names == {"dir", "mine"}
    assert len(reads) == 2
