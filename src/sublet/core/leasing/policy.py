"""The operator's knobs, in one record, each with its unit and why it has the value it has."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from sublet.core.errors import BadInput
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.values import DAY_US, HOUR_US, MINUTE_US, SECOND_US, parse_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    grace_us: int = parse_duration(DEFAULT_GRACE)
    idle_after_us: int = (
        5 * SECOND_US
    )  # shorter than any human pause, longer than the gap between two cells of a script
    min_run_us: int = MINUTE_US  # restoring costs about a minute; preempting sooner only burns it
    max_min_run_factor: int = 8  # each preemption doubles a victim's protected time, up to this
    neutral_work_us: int = 5 * MINUTE_US  # a job that never committed is judged as if it last did so then
    hold_cap_us: int = 30 * MINUTE_US  # interactive leases, while somebody waits
    strict_hold: bool = False  # apply the hold cap even when nobody waits
    cooldown_us: int = 2 * MINUTE_US  # after a hold cap the same tenant goes behind the others
    claim_us: int = 15 * SECOND_US  # a waiter that does not take up its grant by then has gone
    waiter_silence_us: int = 30 * SECOND_US  # a waiter that did not look for so long has gone
    offer_hold_us: int = 20 * SECOND_US  # time to read an offer and press a key
    backfill_patience_us: int = 30 * SECOND_US  # after this, devices are kept for the first that does not fit
    gang_patience_us: int = 4 * HOUR_US  # the same for several, below interactive: kept, they work for nobody
    promote_after_us: int = 30 * MINUTE_US  # waiting this long moves a request up one tier, so none starves
    batch_promote_after_us: int = 2 * HOUR_US  # the same below interactive, where nobody sits and waits
    aging_per_1000: int = 1000  # a second waited forgives this many thousandths of a GPU-second used
    half_life_us: int = DAY_US  # use of a day ago weighs half
    waitlist_max: int = 10_000
    tenant_waiting_max: int = 100
    tenant_blocks_max: int = 1 << 24  # of 4 KiB, in all of a tenant's block leases: 64 GiB; 0 is no limit
    host_silence_us: int = 30 * SECOND_US  # a host whose warden is silent this long has lost its devices
    host_gone_us: int = 10 * MINUTE_US  # one silent this long is given up: its ended leases go back, unproven

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (field.name == "strict_hold") is not isinstance(value, bool):
                kind = "true or false" if field.name == "strict_hold" else "a number"
                raise BadInput(f"policy {field.name} must be {kind}, not {value!r}")
            if not isinstance(value, int) or value < 0:
                raise BadInput(f"policy {field.name} must be a whole number and not negative, not {value!r}")
        if self.half_life_us < HOUR_US:
            raise BadInput("policy half_life_us must be at least an hour")

    def rises_after_us(self, tier_rank: int) -> int:
        """How long a request of this tier waits before it moves up one."""
        return self.batch_promote_after_us if tier_rank else self.promote_after_us

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Policy:
        """Knobs this version does not know are ignored, ones the text does not have keep their default."""
        known = {field.name for field in fields(cls)}
        return cls(**{k: v for k, v in json.loads(text or "{}").items() if k in known})

    @classmethod
    def from_table(cls, table: dict[str, object]) -> Policy:
        """From `[policy]` of sublet.toml: `grace = "30s"`, `strict_hold = true`, `waitlist_max = 50`."""
        values: dict[str, int | bool] = {}
        known = {field.name for field in fields(cls)}
        for key, value in table.items():
            if f"{key}_us" in known:
                if not isinstance(value, (str, int, float)):
                    raise BadInput(f"policy {key} must be a duration such as 30s")
                values[f"{key}_us"] = parse_duration(value, what=f"policy {key}")
            elif key in known and isinstance(value, int):
                values[key] = value
            else:
                names = ", ".join(sorted(name.removesuffix("_us") for name in known))
                raise BadInput(f"policy {key!r} is unknown: use one of {names}")
        return cls(**values)  # type: ignore[arg-type]
