"""Kubernetes, Slurm, a time limit, the notice file; and which of all sources are here."""

from __future__ import annotations

import importlib
import json
import os
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.errors import BadInput, Misconfigured
from sublet.core.notice import Notice
from sublet.notice_bus import kubernetes, notice_file, slurm, wall_time
from sublet.notice_bus.notice_file import read_notice, write_notice
from sublet.ports.notices import NoticeSource, Surroundings
from sublet.settings import load_settings
from sublet.testing.clock import VirtualClock
from tests.conftest import need, repository
from tests.notice_bus.cloud import CLOCK, Asked, Said, listening, seconds_left, serving
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.notice_bus.metadata.FIRST_PAUSE_SECONDS", 0.01)


def around(**environment: str) -> Surroundings:
    return Surroundings(
        clock=CLOCK,
        environment=environment,
        grace_us=15_000_000,
        started_us=CLOCK.monotonic_us(),
        hostname="pod-7",
    )


# --- Kubernetes ---


class Cluster:
    def __init__(self, token: str = "first") -> None:
        self.token = token
        self.metadata: dict[str, object] = {"name": "pod-7", "namespace": "lab"}
        self.allowed = True
        self.date: float | None = None

    def answer(self, asked: Asked) -> Said:
        if asked.headers.get("authorization") != f"Bearer {self.token}":
            return Said(401)
        if not self.allowed:
            return Said(403, b'{"kind": "Status", "reason": "Forbidden"}')
        if asked.path != "/api/v1/namespaces/lab/pods/pod-7":
            return Said(404)
        body = json.dumps({"kind": "Pod", "apiVersion": "v1", "metadata": self.metadata}).encode()
        return Said(200, body, date=self.date)

    def delete(self, grace: int, at: float | None = None) -> None:
        ends = datetime.fromtimestamp((at or time.time()) + grace, UTC)
        self.metadata |= {
            "deletionTimestamp": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "deletionGracePeriodSeconds": grace,
        }


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("lab")
    return tmp_path


def kube(base: str, account: Path) -> kubernetes.KubernetesSource:
    return kubernetes.KubernetesSource(
        CLOCK, base=base, pod="pod-7", account=account, look_seconds=0.05, longest_pause_seconds=0.03
    )


def test_kubernetes_deletion_is_a_notice_until_the_grace_is_over(account: Path) -> None:
    cluster = Cluster()
    with serving(cluster.answer) as api, listening(kube(api.base, account)) as listener:
        wait_until(lambda: len(api.asked) >= 3)
        assert not listener.heard
        cluster.delete(grace=25)
        notice = listener.first()
        assert (notice.source, notice.reason) == ("kubernetes", "Kubernetes deletes this pod (pod-7)")
        assert 20 < seconds_left(notice) <= 25


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_kubernetes_clocks_that_differ(account: Path, skew: int) -> None:
    cluster = Cluster()
    cluster.date = time.time() + skew
    cluster.delete(grace=25, at=cluster.date)
    with serving(cluster.answer) as api, listening(kube(api.base, account)) as listener:
        assert 20 < seconds_left(listener.first()) <= 25


def test_kubernetes_without_a_date_the_grace_bounds_it(account: Path) -> None:
    cluster = Cluster()
    cluster.date = -1
    cluster.delete(grace=25, at=time.time() + 3600)
    with serving(cluster.answer) as api, listening(kube(api.base, account)) as listener:
        assert 20 < seconds_left(listener.first()) <= 25


def test_kubernetes_a_token_that_was_replaced_is_read_again(account: Path) -> None:
    cluster = Cluster()
    with serving(cluster.answer) as api, listening(kube(api.base, account)) as listener:
        wait_until(lambda: api.asked)
        cluster.token = "second"
        wait_until(lambda: len(api.asked) >= 3)
        cluster.delete(grace=25)
        (account / "token").write_text("second\n")
        assert listener.first().source == "kubernetes"


def test_kubernetes_an_account_that_may_not_read_its_pod_is_survived(account: Path) -> None:
    cluster = Cluster()
    cluster.allowed = False
    cluster.delete(grace=25)
    with serving(cluster.answer) as api, listening(kube(api.base, account)) as listener:
        wait_until(lambda: len(api.asked) >= 3)
        assert not listener.heard
        (account / "token").unlink()  # and so is one that has gone
        time.sleep(0.2)
        (account / "token").write_text("first")
        cluster.allowed = True
        assert listener.first().source == "kubernetes"


def test_kubernetes_only_the_clusters_own_authority_is_trusted(account: Path, tmp_path: Path) -> None:
    need(os.path.exists("/usr/bin/openssl"), "openssl")
    for name in ("ca", "other"):
        subprocess.run(
            [
                *(
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "rsa:2048",
                    "-nodes",
                    "-days",
                    "2",
                    "-subj",
                    "/CN=api",
                ),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.crt"),
            ],
            check=True,
            capture_output=True,
        )
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(tmp_path / "ca.crt", tmp_path / "ca.key")
    cluster = Cluster()
    cluster.delete(grace=25)
    own = (account / "ca.crt").read_bytes()
    (account / "ca.crt").write_bytes((tmp_path / "other.crt").read_bytes())
    with serving(cluster.answer, trust) as api, listening(kube(api.base, account)) as listener:
        time.sleep(0.3)
        assert not listener.heard
        assert not api.asked  # not even the token went out
        (account / "ca.crt").write_bytes(own)
        assert listener.first().source == "kubernetes"


def test_kubernetes_is_where_a_service_account_is(account: Path) -> None:
    assert kube("https://127.0.0.1:1", account).here()
    assert not kube("", account).here()
    (account / "token").unlink()
    assert not kube("https://127.0.0.1:1", account).here()
    made = kubernetes.open_source(around(KUBERNETES_SERVICE_HOST="fd00::1", KUBERNETES_SERVICE_PORT="6443"))
    assert (made._base, made._pod) == ("https://[fd00::1]:6443", "pod-7")


# --- Slurm ---


def squeue(tmp_path: Path, says: str, code: int = 0) -> str:
    """A `squeue` that notes what it was asked."""
    path = tmp_path / "squeue"
    beside = tmp_path / "squeue.new"
    beside.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nprintf "%s\\n" "{says}"\nexit {code}\n')
    beside.chmod(beside.stat().st_mode | stat.S_IXUSR)
    os.replace(beside, path)
    return str(path)


def local(seconds: float) -> str:
    return (datetime.now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


def job(squeue: str, end_time: str = "", grace: float = 5.0) -> slurm.SlurmSource:
    return slurm.SlurmSource(
        CLOCK, job="4711", end_time=end_time, grace_us=round(grace * 1e6), squeue=squeue, look_seconds=0.05
    )


def test_slurm_the_end_is_announced_a_grace_before_it(tmp_path: Path) -> None:
    end = int(time.time()) + 7
    with listening(job("/no/such/squeue", str(end))) as listener:
        time.sleep(0.3)
        assert not listener.heard or time.time() >= end - 5.05
        notice = listener.first()
        assert notice.source == "slurm"
        assert "4711" in notice.reason
        assert time.time() >= end - 5.05
        assert abs(seconds_left(notice) - (end - time.time())) < 3


def test_slurm_without_the_variable_the_controller_is_asked(tmp_path: Path) -> None:
    with listening(job(squeue(tmp_path, local(4)))) as listener:
        assert seconds_left(listener.first()) < 5
    assert (tmp_path / "asked").read_text().splitlines()[0] == "-h -j 4711 -o %e"


def test_slurm_a_limit_that_was_extended_is_not_announced(tmp_path: Path) -> None:
    path = squeue(tmp_path, local(3600))
    with listening(job(path, str(int(time.time()) + 2))) as listener:
        wait_until((tmp_path / "asked").exists)
        time.sleep(0.5)
        assert not listener.heard
        assert (
            len((tmp_path / "asked").read_text().splitlines()) == 1
        )  # nor is the controller asked again and again


@pytest.mark.parametrize("says", ["N/A", "", "Unknown", "slurm_load_jobs error: Invalid job id"])
def test_slurm_a_controller_that_knows_no_end(tmp_path: Path, says: str) -> None:
    with listening(job(squeue(tmp_path, says, 1))) as listener:
        wait_until((tmp_path / "asked").exists)
        time.sleep(0.2)
        assert not listener.heard
    end = int(time.time()) + 3
    with listening(job(squeue(tmp_path, says, 1), str(end))) as listener:
        assert seconds_left(listener.first()) < 5  # then the variable must do


def test_slurm_is_where_a_job_is() -> None:
    assert slurm.open_source(around(SLURM_JOB_ID="1", SLURM_JOB_END_TIME="rubbish")).here()
    assert not slurm.open_source(around()).here()


# --- a time limit ---


def test_a_time_limit_is_announced_a_grace_before_its_end() -> None:
    began = CLOCK.monotonic_us()
    source = wall_time.WallTimeSource(CLOCK, started_us=began, limit_us=1_300_000, grace_us=1_000_000)
    with listening(source) as listener:
        notice = listener.first()
        assert CLOCK.monotonic_us() >= began + 300_000
    assert notice == Notice(
        source="wall_time", reason="the time limit of 1.3s is reached", deadline_us=began + 1_300_000
    )
    assert not wall_time.open_source(around()).here()


# --- the notice file ---


def file_source(path: Path, started_us: int = 0) -> notice_file.NoticeFileSource:
    return notice_file.NoticeFileSource(CLOCK, str(path), started_us=started_us, look_seconds=0.02)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    now_us = CLOCK.monotonic_us()
    notice = Notice(
        source="lease", reason="preempted: a «batch» job\nneeds it", deadline_us=now_us + 14_500_000
    )
    write_notice(path, notice, now_us)
    assert read_notice(path, CLOCK) == notice
    found = json.loads(path.read_text())
    assert set(found) == {"source", "reason", "deadline", "deadline_monotonic_us", "seconds_left"}
    assert found["seconds_left"] == 14.5
    left = datetime.fromisoformat(found["deadline"]).timestamp() - time.time()
    assert 12 < left <= 14.6
    assert [p.name for p in tmp_path.iterdir()] == ["notice"]


def test_the_file_is_heard_when_it_comes_and_when_it_comes_nearer(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    with listening(file_source(path)) as listener:
        time.sleep(0.1)
        assert not listener.heard
        now_us = CLOCK.monotonic_us()
        far = Notice(source="lease", reason="hold cap", deadline_us=now_us + 60_000_000)
        write_notice(path, far, now_us)
        assert listener.first() == far
        near = Notice(source="aws", reason="spot", deadline_us=now_us + 20_000_000)
        write_notice(path, near, now_us)
        wait_until(lambda: listener.nearest() == near)
        path.unlink()
        time.sleep(0.1)
        write_notice(path, near, now_us)  # the same again after it had gone
        wait_until(lambda: len(listener.heard) == 3)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    stop = threading.Event()
    now_us = CLOCK.monotonic_us()
    notices = [Notice(source="x", reason=str(n) * 3000, deadline_us=now_us + n) for n in range(1, 5)]
    write_notice(path, notices[0], now_us)

    def write() -> None:
        while not stop.is_set():
            for notice in notices:
                write_notice(path, notice, now_us)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            assert read_notice(path, CLOCK) in notices
    finally:
        stop.set()
        for writer in writers:
            writer.join()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"source": "x"}', '{"deadline_monotonic_us": null}', "[" * 60_000, "\x00" * 10],
)
def test_a_file_that_is_no_notice_is_survived(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notice"
    path.write_text(text)
    assert read_notice(path, CLOCK) is None
    with listening(file_source(path)) as listener:
        time.sleep(0.06)
        now_us = CLOCK.monotonic_us()
        write_notice(path, Notice(source="x", reason="y", deadline_us=now_us + 1), now_us)
        assert listener.first().source == "x"


def test_a_huge_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text(
        json.dumps({"source": "x" * (1 << 17), "reason": "", "deadline_monotonic_us": 1, "seconds_left": 1})
    )
    assert read_notice(path, CLOCK) is None


def test_a_file_of_another_boot_goes_by_the_calendar(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    write_notice(path, Notice(source="x", reason="y", deadline_us=10**15 + 10_000_000), 10**15)
    notice = read_notice(path, CLOCK)
    assert notice is not None
    assert 8 < seconds_left(notice) <= 10
    late = VirtualClock(start_us=(round(time.time()) + 3600) * 1_000_000)
    notice = read_notice(path, late)
    assert notice is not None
    assert notice.deadline_us == late.monotonic_us()


def test_a_notice_that_was_over_before_this_process_began_was_an_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    now_us = CLOCK.monotonic_us()
    write_notice(path, Notice(source="x", reason="y", deadline_us=now_us - 5_000_000), now_us - 9_000_000)
    with listening(file_source(path, started_us=now_us)) as listener:
        time.sleep(0.1)
        assert not listener.heard


def test_the_file_is_where_its_variable_is(tmp_path: Path) -> None:
    assert notice_file.open_source(around(SUBLET_NOTICE_FILE=str(tmp_path / "none yet"))).here()
    assert not notice_file.open_source(around()).here()


# --- which are here ---


def built_in() -> dict[str, str]:
    table = tomllib.loads(repository("pyproject.toml").read_text())
    return dict(table["project"]["entry-points"]["sublet.notices"])


def loaded(target: str) -> Callable[[Surroundings], NoticeSource]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


KNOWN = {name: loaded(target) for name, target in built_in().items()}


def test_every_entry_point_leads_to_a_source_of_that_name() -> None:
    assert len(KNOWN) == 7
    for name, opened in KNOWN.items():
        source = opened(around())
        assert source.name == name
        assert source.risk == ""
        assert isinstance(source.here(), bool)


def sources(**settings: str) -> list[str]:
    environment = {"SUBLET_NOTICE_FILE": "/x", "SLURM_JOB_ID": "1", "GCE_METADATA_HOST": "127.0.0.1:1"}
    found = wiring.notice_sources(
        load_settings(**settings), grace_us=15_000_000, environment=environment, known=KNOWN
    )
    return [source.name for source in found]


def test_auto_finds_who_is_here_and_asks_nobody_else() -> None:
    began = time.monotonic()
    always = {
        name for name, opened in KNOWN.items() if opened(around()).here()
    }  # this machine may be a cloud's
    assert set(sources()) - always == {"gce", "notice_file", "slurm"} - always
    assert "wall_time" in sources(time_limit="2h")
    assert time.monotonic() - began < 20


def test_none_is_none_and_a_list_is_taken_at_its_word() -> None:
    assert sources(notices="none") == []
    assert sources(notices="azure, slurm") == [
        "azure",
        "slurm",
    ]  # asked for by name: not asked whether it is here


def test_a_name_nobody_has_is_refused() -> None:
    with pytest.raises(Misconfigured, match="no notice named 'gcp'"):
        wiring.notice_sources(load_settings(notices="gcp"), grace_us=1)


def test_a_time_limit_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="time limit"):
        sources(time_limit="soon")


def test_a_source_that_hangs_or_breaks_is_left_out() -> None:
    over = threading.Event()

    class Hangs:
        name, risk = "hangs", ""

        def here(self) -> bool:
            return over.wait(20)

        def watch(self, raise_notice: object, stop: object) -> None: ...

    def broken(_: Surroundings) -> NoticeSource:
        raise ImportError("no such extra")

    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="no notices from broken: ImportError"):
        found = wiring.notice_sources(
            load_settings(),
            grace_us=1,
            environment={"SLURM_JOB_ID": "1"},
            known={"hangs": lambda _: Hangs(), "broken": broken, "slurm": KNOWN["slurm"]},
        )
    over.set()
    assert [source.name for source in found] == ["slurm"]
    assert time.monotonic() - began < 20


def test_when_a_process_began() -> None:
    code = "import time; time.sleep(0.3); from sublet import wiring; print(wiring.CLOCK.monotonic_us() - wiring._started_us())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 280_000 < int(done.stdout) < 60_000_000
