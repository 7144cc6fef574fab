"""Each cloud's documented protocol, against a server that answers as the cloud does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from sublet.notice_bus import aws, azure, gce
from sublet.ports.notices import NoticeSource, Surroundings
from tests.notice_bus.cloud import CLOCK, Asked, Cloud, Said, listening, seconds_left, serving
from tests.waiting import wait_until

GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.notice_bus.metadata.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("sublet.notice_bus.gce.FIRST_PAUSE_SECONDS", 0.01)


def around(**environment: str) -> Surroundings:
    return Surroundings(
        clock=CLOCK,
        environment=environment,
        grace_us=15_000_000,
        started_us=CLOCK.monotonic_us(),
        hostname="here",
    )


# --- Google ---


class Gce:
    """The two keys, with ETags and waiting, as the metadata server does."""

    def __init__(self) -> None:
        self.preempted, self.maintenance = "FALSE", "NONE"
        self.changed = threading.Condition()
        self.over = False

    def set(self, **values: str) -> None:
        with self.changed:
            self.__dict__.update(values)
            self.changed.notify_all()

    def answer(self, asked: Asked) -> Said:
        if asked.headers.get("metadata-flavor") != "Google":
            return Said(403, b"Missing required header")
        url = urlsplit(asked.path)
        if url.path == "/computeMetadata/v1/instance/maintenance-event":
            return Said(200, self.maintenance.encode(), GOOGLE | {"ETag": f"m-{self.maintenance}"})
        if url.path != "/computeMetadata/v1/instance/preempted":
            return Said(404, b"", GOOGLE)
        query = parse_qs(url.query)
        with self.changed:
            if "wait_for_change" in query:
                last = query.get("last_etag", [self.preempted])[0]
                self.changed.wait_for(
                    lambda: self.over or self.preempted != last, float(query["timeout_sec"][0])
                )
            return Said(200, self.preempted.encode(), GOOGLE | {"ETag": self.preempted})


def test_gce_preemption_is_heard_when_it_comes() -> None:
    google = Gce()
    with serving(google.answer) as cloud, listening(gce.GceSource(CLOCK, base=cloud.base)) as listener:
        wait_until(lambda: any("wait_for_change=true" in p and "last_etag=FALSE" in p for p in cloud.paths()))
        assert not listener.heard
        google.set(preempted="TRUE")
        notice = listener.first()
        assert notice.source == "gce"
        assert "spot" in notice.reason
        assert 25 < seconds_left(notice) <= 30
        time.sleep(0.2)
        assert len(listener.heard) == 1
        google.set(over=True)


def test_gce_a_change_between_two_questions_is_not_missed() -> None:
    """The ETag of the last answer goes with the next question, so the service answers at once."""
    google = Gce()
    changed = threading.Event()

    def answer(asked: Asked) -> Said:
        said = google.answer(asked)
        if "maintenance" not in asked.path and not changed.is_set():
            changed.set()
            google.preempted = "TRUE"  # after this answer was made, before the next question
        return said

    with serving(answer) as cloud, listening(gce.GceSource(CLOCK, base=cloud.base)) as listener:
        assert listener.first(5).source == "gce"
        google.set(over=True)


def test_gce_found_preempted_at_once_some_of_the_notice_is_over() -> None:
    google = Gce()
    google.preempted = "TRUE"
    with serving(google.answer) as cloud, listening(gce.GceSource(CLOCK, base=cloud.base)) as listener:
        assert seconds_left(listener.first()) <= 15
        google.set(over=True)


def test_gce_maintenance_that_stops_the_vm_is_a_notice_and_a_migration_is_not() -> None:
    google = Gce()
    google.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    with (
        serving(google.answer) as cloud,
        listening(gce.GceSource(CLOCK, base=cloud.base, wait_seconds=1)) as listener,
    ):
        wait_until(lambda: cloud.paths().count("/computeMetadata/v1/instance/maintenance-event") >= 2)
        assert not listener.heard
        google.set(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
        notice = listener.first()
        assert "maintenance" in notice.reason
        assert 50 < seconds_left(notice) <= 60
        google.set(over=True)


def test_gce_an_answer_without_its_flavor_is_somebody_elses() -> None:
    with (
        serving(lambda asked: Said(200, b"TRUE")) as cloud,
        listening(gce.GceSource(CLOCK, base=cloud.base)) as listener,
    ):
        wait_until(lambda: len(cloud.asked) >= 3)
        assert not listener.heard


def test_gce_is_where_the_firmware_or_a_variable_says(tmp_path: Path) -> None:
    assert not gce.GceSource(CLOCK, dmi=tmp_path).here()
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert gce.GceSource(CLOCK, dmi=tmp_path).here()
    assert gce.open_source(around(GCE_METADATA_HOST="127.0.0.1:9")).here()


# --- Amazon ---


class Imds:
    """IMDSv2 as documented; `version=1` has no token endpoint."""

    def __init__(self, *, refuses_tokens: int = 0, lifetime: int = 21_600) -> None:
        self.action: dict[str, str] | bytes | None = None
        self.rebalance: dict[str, str] | None = None
        self.refuses_tokens = refuses_tokens
        self.lifetime = lifetime
        self.valid: set[str] = set()
        self.given = 0
        self.date: float | None = None

    def answer(self, asked: Asked) -> Said:
        if asked.path == "/latest/api/token":
            if self.refuses_tokens:
                return Said(self.refuses_tokens)
            if asked.method != "PUT" or "x-aws-ec2-metadata-token-ttl-seconds" not in asked.headers:
                return Said(400)
            self.given += 1
            self.valid.add(f"token-{self.given}")
            ttl = {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": str(self.lifetime)}
            return Said(200, f"token-{self.given}".encode(), ttl)
        if not self.refuses_tokens and asked.headers.get("x-aws-ec2-metadata-token") not in self.valid:
            return Said(401)
        found = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(asked.path)
        if found is None:
            return Said(404, b"not found")
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        return Said(200, body, date=self.date)


def amazon(cloud: Cloud, **more: object) -> aws.AwsSource:
    return aws.AwsSource(CLOCK, base=cloud.base, look_seconds=0.05, **more)  # type: ignore[arg-type]


def in_two_minutes() -> str:
    return (datetime.now(UTC) + timedelta(seconds=120)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_aws_404_until_an_interruption_is_scheduled() -> None:
    imds = Imds()
    with serving(imds.answer) as cloud, listening(amazon(cloud)) as listener:
        wait_until(lambda: cloud.paths().count("/latest/meta-data/spot/instance-action") >= 3)
        assert not listener.heard
        assert imds.given == 1  # one token for all of them
        imds.action = {"action": "terminate", "time": in_two_minutes()}
        notice = listener.first()
        assert (notice.source, notice.reason) == ("aws", "Amazon takes this spot instance back (terminate)")
        assert 115 < seconds_left(notice) <= 120


def test_aws_a_token_is_renewed_at_half_its_life_and_when_it_is_refused() -> None:
    imds = Imds(lifetime=1)
    with serving(imds.answer) as cloud, listening(amazon(cloud, token_seconds=1)) as listener:
        wait_until(lambda: imds.given >= 2)
        assert not [
            a for a in cloud.asked if a.headers.get("x-aws-ec2-metadata-token") not in (*imds.valid, None)
        ]
        imds.lifetime = 21_600
        wait_until(lambda: imds.given >= 3)
        imds.valid.clear()  # as after a live migration: every token is forgotten
        imds.action = {"action": "stop", "time": in_two_minutes()}
        assert "(stop)" in listener.first().reason


@pytest.mark.parametrize("status", [403, 404, 405])
def test_aws_without_a_token_where_none_is_to_be_had(status: int) -> None:
    imds = Imds(refuses_tokens=status)
    imds.action = {"action": "terminate", "time": in_two_minutes()}
    with serving(imds.answer) as cloud, listening(amazon(cloud)) as listener:
        assert listener.first().source == "aws"
        assert all("x-aws-ec2-metadata-token" not in a.headers for a in cloud.asked if a.method == "GET")


def test_aws_a_token_that_never_arrives_as_in_a_container_behind_one_hop() -> None:
    imds = Imds(refuses_tokens=500)
    imds.action = {"action": "terminate", "time": in_two_minutes()}
    with serving(imds.answer) as cloud:
        cloud.answer = lambda asked: cloud.hang(asked) if asked.method == "PUT" else imds.answer(asked)
        with listening(amazon(cloud)) as listener:
            assert listener.first().source == "aws"


def test_aws_a_service_that_fails_is_not_asked_without_a_token() -> None:
    imds = Imds(refuses_tokens=500)
    with serving(imds.answer) as cloud, listening(amazon(cloud)) as listener:
        wait_until(lambda: len(cloud.asked) >= 3)
        assert {a.method for a in cloud.asked} == {"PUT"}
        assert not listener.heard


def test_aws_the_deadline_is_amazons_clock_and_not_ours() -> None:
    imds = Imds()
    there = time.time() - 3 * 3600  # theirs, three hours behind ours
    imds.date = there
    when = datetime.fromtimestamp(there + 120, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    imds.action = {"action": "terminate", "time": when}
    with serving(imds.answer) as cloud, listening(amazon(cloud)) as listener:
        assert 110 < seconds_left(listener.first()) <= 120


def test_aws_hibernation_begins_at_once() -> None:
    imds = Imds()
    imds.action = {"action": "hibernate", "time": in_two_minutes()}
    with serving(imds.answer) as cloud, listening(amazon(cloud)) as listener:
        assert seconds_left(listener.first()) <= 0


def test_aws_a_nearer_time_is_raised_too_and_one_taken_back_stays() -> None:
    imds = Imds()
    imds.action = {"action": "terminate", "time": in_two_minutes()}
    with serving(imds.answer) as cloud, listening(amazon(cloud)) as listener:
        assert seconds_left(listener.first()) > 100
        imds.action = {
            "action": "terminate",
            "time": (datetime.now(UTC) + timedelta(seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        wait_until(lambda: seconds_left(listener.nearest()) < 40)
        imds.action = None
        asked = len(cloud.asked)
        wait_until(lambda: len(cloud.asked) > asked + 4)  # and it goes on looking
        assert seconds_left(listener.nearest()) < 40


def test_aws_a_rebalance_recommendation_is_a_risk_and_no_notice() -> None:
    imds = Imds()
    with serving(imds.answer) as cloud:
        source = amazon(cloud)
        with listening(source) as listener:
            imds.rebalance = {"noticeTime": "2026-01-02T03:04:05Z"}
            wait_until(lambda: source.risk)
            assert "rebalance" in source.risk
            assert not listener.heard
            imds.rebalance = None
            wait_until(lambda: not source.risk)


def test_aws_is_where_the_firmware_or_a_variable_says_unless_it_is_switched_off(tmp_path: Path) -> None:
    assert not aws.AwsSource(CLOCK, dmi=tmp_path).here()
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert aws.AwsSource(CLOCK, dmi=tmp_path).here()
    assert not aws.AwsSource(CLOCK, dmi=tmp_path, disabled=True).here()
    named = around(AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9")
    assert aws.open_source(named).here()
    off = around(AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9", AWS_EC2_METADATA_DISABLED="true")
    assert not aws.open_source(off).here()


# --- Azure ---


class Events:
    def __init__(self, vm: str = "gpu-vm_3") -> None:
        self.vm = vm
        self.events: list[dict[str, object]] = []
        self.incarnation = 1
        self.started: list[str] = []

    def add(self, kind: str, resources: list[str], not_before: object, **more: object) -> None:
        self.incarnation += 1
        self.events = [
            *self.events,
            {
                "EventId": f"id-{len(self.events)}",
                "EventStatus": "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": resources,
                "NotBefore": not_before,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
            | more,
        ]

    def answer(self, asked: Asked) -> Said:
        if asked.headers.get("metadata") != "true":
            return Said(400, b'{"error": "Bad request. Required metadata header not specified"}')
        if asked.path.startswith("/metadata/instance/compute/name?"):
            return Said(200, self.vm.encode())
        if not asked.path.startswith("/metadata/scheduledevents?api-version="):
            return Said(404)
        if asked.method == "POST":
            self.started += [r["EventId"] for r in json.loads(asked.body)["StartRequests"]]
            return Said(200)
        document = {"DocumentIncarnation": self.incarnation, "Events": self.events}
        return Said(200, json.dumps(document).encode())


def microsoft(cloud: Cloud, **more: object) -> azure.AzureSource:
    given = {"hostname": "host", "grace_us": 15_000_000, "look_seconds": 0.05} | more
    return azure.AzureSource(CLOCK, base=cloud.base, **given)  # type: ignore[arg-type]


def rfc1123(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


def test_azure_only_events_that_name_this_vm_count() -> None:
    events = Events()
    events.add("Preempt", ["other-vm", "gpu-vm_33"], rfc1123(30))
    events.add("Freeze", ["gpu-vm_3"], rfc1123(30))
    with serving(events.answer) as cloud, listening(microsoft(cloud)) as listener:
        wait_until(lambda: len(cloud.asked) >= 4)
        assert not listener.heard
        events.add("Preempt", ["other-vm", "GPU-VM_3"], rfc1123(30))
        notice = listener.first()
        assert (notice.source, notice.reason) == ("azure", "Azure takes this spot VM back (Preempt)")
        assert 20 < seconds_left(notice) <= 30


@pytest.mark.parametrize("kind", ["Terminate", "Redeploy", "Reboot"])
def test_azure_everything_that_takes_the_memory(kind: str) -> None:
    events = Events()
    events.add(kind, ["gpu-vm_3"], rfc1123(60))
    with serving(events.answer) as cloud, listening(microsoft(cloud)) as listener:
        assert kind in listener.first().reason


@pytest.mark.parametrize(
    ("not_before", "status"), [("", "Scheduled"), (None, "Started"), (rfc1123(60), "Started")]
)
def test_azure_an_event_that_has_begun_leaves_no_time(not_before: object, status: str) -> None:
    events = Events()
    events.add("Preempt", ["gpu-vm_3"], not_before, EventStatus=status)
    with serving(events.answer) as cloud, listening(microsoft(cloud)) as listener:
        assert seconds_left(listener.first()) <= 0


def test_azure_an_event_days_ahead_is_held_back_until_it_is_near() -> None:
    events = Events()
    events.add("Redeploy", ["gpu-vm_3"], rfc1123(5 * 86_400))
    with serving(events.answer) as cloud, listening(microsoft(cloud)) as listener:
        wait_until(lambda: len(cloud.asked) >= 4)
        assert not listener.heard
        events.events[0]["NotBefore"] = rfc1123(100)
        assert 90 < seconds_left(listener.first()) <= 100


def test_azure_a_longer_grace_is_announced_earlier() -> None:
    events = Events()
    events.add("Redeploy", ["gpu-vm_3"], rfc1123(500))
    with serving(events.answer) as cloud, listening(microsoft(cloud, grace_us=600_000_000)) as listener:
        assert listener.first().source == "azure"


def test_azure_one_taken_back_stays_and_the_watch_goes_on() -> None:
    events = Events()
    events.add("Preempt", ["gpu-vm_3"], rfc1123(30))
    with serving(events.answer) as cloud, listening(microsoft(cloud)) as listener:
        listener.first()
        events.events = []
        asked = len(cloud.asked)
        wait_until(lambda: len(cloud.asked) > asked + 2)


def test_azure_nothing_is_approved_unless_asked_for() -> None:
    events = Events()
    events.add("Preempt", ["gpu-vm_3"], rfc1123(30))
    with serving(events.answer) as cloud, listening(microsoft(cloud)) as listener:
        listener.first()
    assert not events.started
    assert not [a for a in cloud.asked if a.method == "POST"]


def test_azure_approval_comes_with_leaving_and_only_for_events_that_name_nobody_else() -> None:
    events = Events()
    events.add("Preempt", ["gpu-vm_3", "other-vm"], rfc1123(30))
    events.add("Reboot", ["gpu-vm_3"], rfc1123(60))
    with serving(events.answer) as cloud:
        with listening(microsoft(cloud, acknowledge=True)) as listener:
            wait_until(lambda: len(listener.heard) >= 2)
            assert not events.started
        assert events.started == ["id-1"]


def test_azure_the_hosts_name_when_the_service_has_none() -> None:
    events = Events()
    events.add("Preempt", ["host"], rfc1123(30))

    def answer(asked: Asked) -> Said:
        return Said(404) if "compute/name" in asked.path else events.answer(asked)

    with serving(answer) as cloud, listening(microsoft(cloud)) as listener:
        assert listener.first().source == "azure"


def test_azure_is_where_the_firmware_says(tmp_path: Path) -> None:
    here = azure.AzureSource(CLOCK, hostname="h", grace_us=0, dmi=tmp_path)
    assert not here.here()
    (tmp_path / "chassis_asset_tag").write_text("7783-7084-3265-9085-8269-3286-77\n")
    assert here.here()


# --- whatever goes wrong ---

SOURCES: dict[str, Callable[[Cloud], NoticeSource]] = {
    "gce": lambda cloud: gce.GceSource(CLOCK, base=cloud.base, longest_pause_seconds=0.03),
    "aws": lambda cloud: amazon(cloud, longest_pause_seconds=0.03),
    "azure": lambda cloud: microsoft(cloud, longest_pause_seconds=0.03, first_seconds=0.3),
}


def _bad(name: str, cloud: Cloud) -> Callable[[Asked], Said]:
    return {
        "hangs, then goes": lambda asked: Said(500) if cloud.over.wait(0.15) else Said(raw=b""),
        "garbage": lambda asked: Said(raw=b"\x16\x03\x01\x00"),
        "not json": lambda asked: Said(200, b"<html>captive portal</html>", GOOGLE),
        "json of another kind": lambda asked: Said(200, b'[{"Events": 7}]', GOOGLE),
        "null": lambda asked: Said(200, b"null", GOOGLE),
        "nested without end": lambda asked: Said(200, b"[" * 500_000, GOOGLE),
        "redirect": lambda asked: Said(302, b"", {"Location": cloud.base + "/elsewhere"} | GOOGLE),
        "huge": lambda asked: Said(200, b'{"action": "' + b"x" * (2 << 20), GOOGLE),
        "teapot": lambda asked: Said(418),
        "unavailable": lambda asked: Said(503),
    }[name]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "bad",
    [
        "hangs, then goes",
        "garbage",
        "not json",
        "json of another kind",
        "null",
        "nested without end",
        "redirect",
        "huge",
        "teapot",
        "unavailable",
    ],
)
def test_whatever_is_answered_the_watch_lives_and_hears_the_notice_after_it(source: str, bad: str) -> None:
    google, imds, events = Gce(), Imds(), Events()
    good = {"gce": google.answer, "aws": imds.answer, "azure": events.answer}[source]
    with serving(lambda asked: Said(503)) as cloud:
        cloud.answer = _bad(bad, cloud)
        with listening(SOURCES[source](cloud)) as listener:
            wait_until(lambda: len(cloud.asked) >= 4)
            assert not listener.heard
            assert not [path for path in cloud.paths() if "elsewhere" in path]
            google.preempted = "TRUE"
            imds.action = {"action": "terminate", "time": in_two_minutes()}
            events.add("Preempt", ["gpu-vm_3"], rfc1123(30))
            cloud.answer = good
            assert listener.first().source == source
            google.set(over=True)


@pytest.mark.parametrize("source", SOURCES)
def test_nobody_there_is_survived_and_stopped_at_once(source: str) -> None:
    with serving(lambda asked: Said()) as cloud:
        pass
    with listening(SOURCES[source](cloud)) as listener:
        time.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert not listener.heard
