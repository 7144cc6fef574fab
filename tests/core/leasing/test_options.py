"""The words people write when they ask for a GPU, and the request they become."""

from __future__ import annotations

import inspect

import pytest

import sublet
from sublet.client.studio import Studio
from sublet.core.errors import BadInput
from sublet.core.leasing.lease import Request
from sublet.core.leasing.options import GpuOptions
from sublet.core.scheduling.spread import Spread

GIB = 1 << 30


def test_the_defaults_are_one_shared_gigabyte_for_five_minutes() -> None:
    assert GpuOptions().request(tenant="t", host="h") == Request(
        tenant="t", vram_bytes=GIB, ttl_us=300_000_000, host="h"
    )


def test_a_range_is_its_most_and_takes_its_least() -> None:
    request = GpuOptions(vram="1GiB..2GiB").request(tenant="t")
    assert (request.vram_bytes, request.least_bytes) == (2 * GIB, GIB)


def test_only_several_devices_are_spread_and_then_no_host_is_named() -> None:
    several = GpuOptions(count=2, spread="ok").request(tenant="t", host="h")
    assert (several.spread, several.host) == (Spread.OK, "")
    one = GpuOptions(spread="ok").request(tenant="t", host="h")
    assert (one.spread, one.host) == (Spread.NO, "h")


def test_a_named_tenant_counts_before_the_one_of_the_settings() -> None:
    assert GpuOptions(tenant="ann").request(tenant="t").tenant == "ann"


@pytest.mark.parametrize(
    "bad", [{"count": True}, {"count": 1.5}, {"tier": "gold"}, {"spread": "maybe"}, {"job": "../x"}]
)
def test_what_is_wrong_is_told_before_anything_is_asked_for(bad: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        GpuOptions(**bad).request(tenant="t")  # type: ignore[arg-type]


def test_the_options_are_taken_out_of_other_words() -> None:
    words = {"vram": "2GiB", "grace": "5s", "tenant": None}
    assert GpuOptions.take_from(words) == GpuOptions(vram="2GiB")
    assert words == {"grace": "5s"}


def test_every_surface_takes_the_same_options_with_the_same_defaults() -> None:
    fields = {name: field.default for name, field in GpuOptions.__dataclass_fields__.items()}
    local = inspect.signature(sublet.gpu).parameters
    assert {name: local[name].default for name in fields} == fields
    remote = inspect.signature(Studio.gpu).parameters
    del fields["spread"]  # a studio's leases are of one machine
    assert {name: remote[name].default for name in fields} == fields


@pytest.mark.parametrize("words", [{"vram": "8"}, {"vram": 8}, {"vram": "8..16"}, {"least": "8"}])
def test_a_bare_number_of_a_few_bytes_is_refused_with_what_was_meant(words: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="8 is 8 bytes") as refused:
        GpuOptions(**words).request(tenant="t")  # type: ignore[arg-type]
    assert "8GiB" in refused.value.remedy
    assert GpuOptions(vram=1 << 20).request(tenant="t").vram_bytes == 1 << 20
