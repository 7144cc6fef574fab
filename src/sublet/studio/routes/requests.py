"""What requests may contain: closed schemas that refuse unknown fields and wrong types.

Rules of this file:
- No body says who the caller is, what it may do or what it costs: token, operator and ledger decide that.
- Texts are bounded and printable. Sizes and durations are parsed as everywhere else (`core.values`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from sublet.core.leasing.lease import Request, Tier, parse_tier
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.scheduling.device import Exclusivity, parse_exclusivity
from sublet.core.studio.session import job_of
from sublet.core.values import check_name, parse_duration, parse_size, parse_size_range

MOST = 1 << 53  # what JSON's numbers carry exactly everywhere


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("printable characters only")
    return text


Line = Annotated[StrictStr, Field(max_length=500), AfterValidator(_printable)]
Word = Annotated[StrictStr, Field(max_length=64), AfterValidator(_printable)]
Count = Annotated[StrictInt, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(ge=0, le=366 * 86_400, allow_inf_nan=False, strict=True)]
#: '8GB' or a number of bytes
Size = Word | Annotated[StrictInt, Field(ge=1, le=MOST)]
#: '5m' or a number of seconds
Duration = Word | Annotated[StrictInt, Field(ge=0, le=366 * 86_400)] | Seconds


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenSession(StrictBody):
    """What a session requests, now and each time it is resumed."""

    vram: Size
    least: Size | None = None
    ttl: Duration = "5m"
    warm: Duration | None = None
    tier: Word = Tier.INTERACTIVE.value
    count: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    exclusivity: Word = Exclusivity.SHARED.value
    wait: Duration | None = None
    hold_cap: Duration | None = None
    offers: StrictBool = False
    name: Annotated[StrictStr, Field(max_length=80), AfterValidator(_printable)] = ""
    checkpoint: Word = ""
    id: Word | None = None

    def request(self, tenant: str, session_id: str, host: str) -> Request:
        size = parse_size_range(self.vram, what="vram")
        least = parse_size(self.least, what="least") if self.least is not None else 0
        if self.checkpoint:
            check_name(self.checkpoint, what="checkpoint")
        return Request(
            tenant=tenant,
            vram_bytes=size.most,
            least_bytes=least or (size.least if size.least < size.most else 0),
            ttl_us=parse_duration(self.ttl, what="ttl"),
            count=self.count,
            wants_offers=self.offers,
            exclusivity=parse_exclusivity(self.exclusivity),
            tier=parse_tier(self.tier),
            wait_us=None if self.wait is None else parse_duration(self.wait, what="wait"),
            hold_cap_us=None if self.hold_cap is None else parse_duration(self.hold_cap, what="hold_cap"),
            host=host,
            job=job_of(tenant, session_id, self.checkpoint),
        )

    def warm_us(self) -> int:
        return parse_duration(self.ttl if self.warm is None else self.warm, what="warm")


class RunCode(StrictBody):
    code: Annotated[StrictStr, Field(max_length=1_000_000)]
    call: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None


class Interrupt(StrictBody):
    call: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None


class RevokeLease(StrictBody):
    reason: Line = "an operator took it back"
    grace: Duration = DEFAULT_GRACE


class DeviceNote(StrictBody):
    note: Line = ""


class TenantChange(StrictBody):
    """Sizes and times are numbers or texts such as '32GB' and '2h'; 0 means no limit."""

    weight: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    max_leases: Count | None = None
    max_vram_bytes: Count | Word | None = None
    max_waiting: Count | None = None
    max_sessions: Count | None = None
    max_storage_bytes: Count | Word | None = None
    gpu_seconds_per_day: Count | Seconds | Word | None = None

    def changes(self) -> dict[str, int | None]:
        return {
            "weight": self.weight,
            "max_leases": self.max_leases,
            "max_vram_bytes": _limit(self.max_vram_bytes, "max_vram_bytes"),
            "max_waiting": self.max_waiting,
            "max_sessions": self.max_sessions,
            "max_storage_bytes": _limit(self.max_storage_bytes, "max_storage_bytes"),
            "gpu_us_per_day": None
            if self.gpu_seconds_per_day is None
            else parse_duration(self.gpu_seconds_per_day, what="gpu_seconds_per_day"),
        }


class NewTenant(TenantChange):
    name: Word
    returning: StrictBool = False


def _limit(value: int | str | None, what: str) -> int | None:
    return value if value is None or value == 0 else 0 if value == "0" else parse_size(value, what=what)


class SetPrice(StrictBody):
    device_class: Annotated[StrictStr, Field(min_length=1, max_length=200), AfterValidator(_printable)]
    tier: Word = ""
    per_gpu_hour: Word
