"""Calls that share a trip: one whose caller was told that it did not happen does not happen later."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.core.errors import Refused
from sublet.functions import on_gpu
from sublet.processes.worker.warm_calls import OnGpu, Warm


class OneLease:
    """Runs the calls here."""

    status = "active"

    def keep_warm(self) -> None: ...

    def run_many(self, function: Any, calls: list[Any]) -> list[tuple[bool, Any]]:
        return [(True, function(*args, **kwargs)) for args, kwargs in calls]


def test_a_refused_call_is_not_taken_along_by_the_next() -> None:
    refusals = [Refused("full")]
    ran: list[int] = []

    def acquire(ttl_us: int) -> Any:
        if refusals:
            raise refusals.pop()
        return OneLease()

    warm = Warm(acquire)
    work = OnGpu(ran.append, lambda: warm, lambda *_: 1, batch=4)
    with pytest.raises(Refused):
        work(1)
    work(2)
    assert ran == [2]


def test_disabled_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """defaults < sublet.toml < environment, for this setting as for all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUBLET_DISABLE", raising=False)
    (tmp_path / "sublet.toml").write_text('disable = "1"\n')
    on_gpu._disabled_by_file.cache_clear()
    try:
        assert sublet.on_gpu(vram="1GiB")(os.getpid)() == os.getpid()
        monkeypatch.setenv("SUBLET_DISABLE", "0")
        assert not on_gpu.disabled()
    finally:
        on_gpu._disabled_by_file.cache_clear()
