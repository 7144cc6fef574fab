"""`sublet.lease()` and `sublet.keep()`: in a leased worker what they say, elsewhere what they are for."""

from __future__ import annotations

import mmap
import pickle
import sys
import time
import types

import pytest

import sublet
from sublet.core.errors import BadInput, LeaseLost
from sublet.leases import current, sessions
from sublet.machine import lease_environment
from sublet.notebook.cells.variable_sync import LateModule, module_or_late
from tests.homes import Home

# --- elsewhere ------------------------------------------------------------------------------------------------------


def test_without_a_lease_it_says_where_it_belongs() -> None:
    with pytest.raises(BadInput) as caught:
        sublet.lease()
    assert "%%gpu" in caught.value.remedy
    assert "sublet.gpu" in caught.value.remedy


def test_keep_does_nothing_in_a_plain_script() -> None:
    assert sublet.keep() is False


def test_keep_does_nothing_in_a_notebook_whose_cell_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sublet.notebook.cells import inside_cell

    assert sublet.keep() is False
    monkeypatch.setattr(inside_cell, "_keeping", inside_cell._CellKeeping((), 0))
    assert sublet.keep() is False


def test_outside_a_session_there_is_no_state_to_save() -> None:
    for ask in (lambda: sublet.save({"a": 1}), sublet.saved):
        with pytest.raises(BadInput) as caught:
            ask()
        assert "studio.session" in caught.value.remedy


# --- in a leased worker ------------------------------------------------------------------------------------------------


def look() -> dict[str, object]:
    lease = sublet.lease()
    return {
        "id": lease.id,
        "epoch": lease.epoch,
        "left": lease.seconds_left,
        "text": repr(lease),
        "devices": lease.devices,
        "vram": lease.vram_bytes,
        "kept": sublet.keep(),
    }


def test_code_under_a_lease_knows_it(sqlite_home: Home) -> None:
    with sublet.gpu(vram="1GiB", ttl="1m", holder="worker") as lease:
        found = lease.run(look)
    assert (found["id"], found["epoch"], found["kept"]) == (lease.id, lease.epoch, False)
    assert 0 < found["left"] <= 60
    assert lease.id in found["text"]


def open_and_launch(openings: tuple[object, ...]) -> tuple[object, ...]:
    current.set_openings(openings)  # type: ignore[arg-type]
    lease = sublet.lease()
    before = lease_environment.launches()
    with lease.open() as gpu:
        buffer = gpu.alloc(16)
        gpu.write(buffer, b"0123456789abcdef")
        read = bytes(gpu.read(buffer))
    refused = []
    for device in (1, -1):
        try:
            lease.open(device)
        except BadInput as e:
            refused.append(e.message)
    return lease.devices, lease.vram_bytes, read, refused, lease_environment.launches() - before, repr(lease)


def test_it_opens_its_own_devices_and_no_others(sqlite_home: Home) -> None:
    with sublet.gpu(vram="1GiB", ttl="1m", holder="worker") as lease:
        openings = tuple(sessions.opening_of(sqlite_home.settings, lease, n, 1_000_000) for n in range(1))
        devices, vram, read, refused, launches, text = lease.run(open_and_launch, openings)
    assert devices == tuple(lease.devices)
    assert vram == lease.vram_bytes
    assert read == b"0123456789abcdef"
    assert refused == ["device 1 is not one of this lease's 1", "device -1 is not one of this lease's 1"]
    assert launches == 0
    assert devices[0] in text


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_warning_does_not_touch_the_deadline_nor_the_steps() -> None:
    page = mmap.mmap(-1, lease_environment.PAGE_BYTES)
    process_lease = lease_environment.ProcessLease("lease-1", 3, page)
    lease_environment.write_deadline(page, time.monotonic_ns() // 1000 + 30_000_000)
    lease_environment.write_steps(page, 2**40, 2**41)
    assert not process_lease.warned
    lease_environment.write_warned(page)
    assert process_lease.warned
    assert 29 < process_lease.seconds_left <= 30
    assert lease_environment.read_steps(page) == (2**40, 2**41)
    process_lease.check()
    lease_environment.write_deadline(page, 1)
    assert process_lease.warned
    with pytest.raises(LeaseLost, match="lease-1"):
        process_lease.check()
    with pytest.raises(LeaseLost, match="commit there"):
        _ = process_lease.key


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lease_environment.launches()
    lease_environment.launched()
    lease_environment.launched()
    assert lease_environment.launches() == before + 2
    monkeypatch.setattr(lease_environment, "_launches", before)


# --- modules a cell imported ------------------------------------------------------------------------------------------


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)


def test_a_module_is_imported_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    forget("colorsys", monkeypatch)
    late = module_or_late("colorsys")
    assert isinstance(late, types.ModuleType)
    assert "imported here when it is first used" in repr(late)
    assert late.__name__ == "colorsys"
    assert not hasattr(late, "__wrapped__")  # what looks at every variable does not import it
    assert "colorsys" not in sys.modules
    assert late.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    assert "colorsys" in sys.modules
    assert "hsv_to_rgb" in dir(late)
    assert late.__file__.endswith("colorsys.py")
    with pytest.raises(AttributeError):
        _ = late.no_such_name
    assert module_or_late("colorsys") is sys.modules["colorsys"]


def test_a_late_module_travels_as_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    forget("colorsys", monkeypatch)
    late = LateModule("colorsys")
    assert pickle.loads(pickle.dumps(late)) is sys.modules["colorsys"]


def test_a_late_module_that_is_not_installed_here_says_so_when_used() -> None:
    late = module_or_late("no_such_module_anywhere")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        _ = late.anything


def test_what_is_stored_in_a_late_module_is_stored_in_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.backends.cudnn.benchmark = True`, one level up."""
    forget("colorsys", monkeypatch)
    late = module_or_late("colorsys")
    late.ONE_THIRD = 5
    import colorsys

    assert colorsys.ONE_THIRD == 5
    del late.ONE_THIRD
    assert not hasattr(colorsys, "ONE_THIRD")
