"""What a request for a GPU may say, in the words people write.

Rules of this file:
- One record for every surface: the library, the client of a studio, `%%gpu`, `sublet run`, `sublet work` and
  `sublet.train`.
- The words are kept as they were written. `request` reads and checks them, so every surface refuses the same
  things.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.leasing.lease import Request, parse_tier
from sublet.core.scheduling.device import parse_exclusivity
from sublet.core.scheduling.spread import Spread, parse_spread
from sublet.core.values import check_has_unit, check_job, parse_duration, parse_size, parse_size_range

DEFAULT_VRAM = "1GiB"
DEFAULT_TTL = "5m"

Size = str | int
Duration = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What `sublet.gpu` and everything that leases a GPU takes."""

    vram: Size = DEFAULT_VRAM  # per device; a range such as 8GB..16GB takes what is free
    ttl: Duration = DEFAULT_TTL
    count: int = 1
    exclusivity: str = "shared"
    tier: str = "interactive"
    wait: Duration | None = None  # None: as long as it takes; 0: now or never
    least: Size | None = None  # a smaller slice, down to this, is taken rather than waited for
    tenant: str | None = None  # None: the one the settings name
    job: str = ""
    hold_cap: Duration | None = None
    holder: str | None = None  # 'process', 'worker' or 'name'; None: what suits the surroundings
    spread: str = "no"

    @classmethod
    def take_from(cls, words: dict[str, Any]) -> GpuOptions:
        """The options that are among these words, which are removed from them."""
        return cls(**{name: words.pop(name) for name in cls.__slots__ if name in words})

    @property
    def spreads(self) -> bool:
        """Whether the devices may be of several hosts."""
        return parse_spread(self.spread) is Spread.OK

    def request(self, *, tenant: str, host: str = "", wants_offers: bool = False) -> Request:
        """The checked request. `tenant` counts where none was named; `host` unless it may be spread over
        several."""
        check_has_unit(self.vram, what="vram")
        if self.least is not None:
            check_has_unit(self.least, what="least")
        span = parse_size_range(self.vram, what="vram")
        least_bytes = parse_size(self.least, what="least") if self.least is not None else 0
        if span.least != span.most:
            least_bytes = least_bytes or span.least
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise BadInput(f"count {self.count!r} must be a whole number")
        gang = self.spreads and self.count > 1
        return Request(
            tenant=self.tenant or tenant,
            vram_bytes=span.most,
            ttl_us=parse_duration(self.ttl, what="ttl"),
            count=self.count,
            least_bytes=least_bytes,
            wants_offers=wants_offers,
            exclusivity=parse_exclusivity(self.exclusivity),
            tier=parse_tier(self.tier),
            wait_us=None if self.wait is None else parse_duration(self.wait, what="wait"),
            hold_cap_us=None if self.hold_cap is None else parse_duration(self.hold_cap, what="hold_cap"),
            host="" if gang else host,
            job=check_job(self.job) if self.job else "",
            spread=Spread.OK if gang else Spread.NO,
        )


#: What runs and queue workers ask for unless told otherwise.
BATCH_GPU = GpuOptions(tier="batch")
