"""An OpenCL that is installed and can run nothing: an older PoCL beside a newer processor, which its compiler does not know."""

from __future__ import annotations

import pytest

from sublet.core.errors import BadInput
from sublet.devices.opencl import OpenClDriver, _installed
from tests.conftest import need


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> OpenClDriver:
    """PoCL's compiler refuses whatever it is given."""
    need(_installed(), "pyopencl with PoCL")
    monkeypatch.setenv("POCL_EXTRA_BUILD_FLAGS", "-no-such-flag")
    monkeypatch.setenv("POCL_KERNEL_CACHE", "0")
    return OpenClDriver()


def test_auto_passes_it_over_and_keeps_why(broken: OpenClDriver) -> None:
    assert broken.probe("auto", "h") == []
    assert broken.passed_over()
    assert all("builds nothing here" in words for words in broken.passed_over())


@pytest.mark.parametrize("spec", ["all", "0"])
def test_who_asks_for_it_is_told_why_and_what_to_do(broken: OpenClDriver, spec: str) -> None:
    with pytest.raises(BadInput, match=r"PoCL.* builds nothing here") as refused:
        broken.probe(spec, "h")
    assert "SUBLET_DEVICES=host" in refused.value.remedy


def test_one_processor_is_one_device_whichever_installations_show_it() -> None:
    """L2: memory that is granted twice is promised twice."""
    need(_installed(), "pyopencl with PoCL")
    driver = OpenClDriver()
    found = driver.probe("all", "h")
    shown_by = {d["platform"] for d in driver._seen or [] if d["cpu"] and not d["unusable"]}
    assert found
    assert len(shown_by) == 1
