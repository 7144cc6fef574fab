"""The store goes away in the middle of a training, for a while, and comes back (C1, C6, S3).

A real S3 server: frozen, killed and started again on its files, or answering 503. Training goes on meanwhile, which is waited for as a
fact: steps are done and counted during the outage. The user reads one line that the store is away and one that it is back. In the end the
state is bit for bit that of an undisturbed run, and at every commit every pack of the new head was readable on a quorum.

`make proof` holds each outage for 20 seconds with the limits a user has; here it lasts until the line was said.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.store.checkpoints import CheckpointStore
from tests.homes import Home
from tests.store.servers import Proxy, Seaweed, Server, moto
from tests.training.processes import wait_for
from tests.training.rig import calm_walk, check_walk, ended, forked, has_ended, looking, tell, walk

#: How long the store is away at least; `make proof` asks for 20.
SECONDS = float(os.environ.get("SUBLET_OUTAGE_SECONDS", "0"))
STEPS = 40
OUT_AT, FAR, BACK_AT = 8, 24, 30
LARGE = 160_000  # eight bytes each: more than a megabyte is written by another process


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    made = Seaweed(tmp_path_factory.mktemp("weed"))
    made.start()
    yield made
    made.go_on()
    made.kill()


@pytest.fixture(scope="module")
def quiet() -> Iterator[Server]:
    """One that nothing happens to."""
    with moto("checkpoints", "bucket-b", "bucket-c") as server:
        yield server


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not SECONDS:
        monkeypatch.setenv("SUBLET_BUCKET_TIMEOUT", "1")
        monkeypatch.setenv("SUBLET_BUCKET_PATIENCE", "2")


class Outage:
    """What a test and its child tell each other, and what the child said to its user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid = 0

    def tell(self, what: str) -> None:
        (self.folder / what).touch()

    def told(self, what: str) -> bool:
        return (self.folder / what).exists()

    def reached(self, step: int) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "step").read_text()) >= step
        return False

    def said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "said").read_text()
        return ""

    def wait(self, fact: Any) -> None:
        wait_for(lambda: fact() or has_ended(self.pid), 180, self.said)
        assert not has_ended(self.pid) or fact(), self.said()


def readable(store: CheckpointStore, packs: set[str]) -> None:
    """C1, asked of the replicas themselves at the moment of the commit. One that does not answer proves nothing."""
    for pack in packs:
        having, silent = [], 0
        for replica in store.replicas:
            try:
                if replica.has_pack(pack):
                    having.append(replica.name)
            except OSError:
                silent += 1
        if not silent and not store._replicas.enough(having):
            os.write(2, f"C1 broken: pack {pack} is on {having}\n".encode())
            os._exit(9)


def trains(outage: Outage, size: int = 64, **options: Any) -> None:
    """In the child."""
    sys.stderr = (outage.folder / "said").open("w", buffering=1)
    commit = CheckpointStore._commit

    def checked(self: CheckpointStore, ledger: Any, lease: Any, manifest: Any, *rest: Any) -> int:
        readable(self, set(manifest.packs))
        return commit(self, ledger, lease, manifest, *rest)

    CheckpointStore._commit = checked  # type: ignore[method-assign]

    def on_step(run: Any, step: Any) -> None:
        (outage.folder / "step").write_text(str(step.number))
        gate = {OUT_AT: "out", BACK_AT: "back"}.get(step.number)
        while gate is not None and not outage.told(gate) and run.notice is None:
            time.sleep(0.01)

    options.setdefault("every", 2)
    options.setdefault("ttl", "60s")
    walk("job", STEPS, pause=0.02, on_step=on_step, progress=True, size=size, **options)


def lasts(outage: Outage) -> None:
    """Until training went on without its store, the user was told, and the time is over."""
    began = time.monotonic()
    outage.wait(lambda: outage.reached(FAR))
    outage.wait(lambda: "is away" in outage.said())
    time.sleep(max(0.0, SECONDS - (time.monotonic() - began)))


def told_once(said: str) -> None:
    assert said.count("is away") == 1, said
    assert said.count("is back after") == 1, said
    assert said.index("is away") < said.index("is back after")


@contextlib.contextmanager
def failing(kind: str, weed: Seaweed) -> Iterator[None]:
    if kind == "frozen":
        weed.freeze()
        yield
        weed.go_on()
    else:
        weed.kill()
        yield
        weed.start()


@pytest.mark.parametrize(("kind", "size"), [("frozen", LARGE), ("killed", 64)])
def test_training_goes_on_and_saves_catch_up(
    sqlite_home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weed: Seaweed,
    limits: None,
    kind: str,
    size: int,
) -> None:
    calm = calm_walk(STEPS, size)
    for key, value in weed.server.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SUBLET_STORE", weed.server.url())
    outage = Outage(tmp_path)
    outage.pid = forked(lambda: trains(outage, size))
    outage.wait(lambda: outage.reached(OUT_AT))
    outage.wait(lambda: _committed("job") > 0)
    with failing(kind, weed):
        outage.tell("out")
        lasts(outage)
        before = _committed("job")
        shown = _ps()
    outage.tell("back")
    assert ended(outage.pid, 180) == 0, outage.said()
    told_once(outage.said())
    assert "saves wait" in shown
    assert before < FAR, "nothing was committed that could not have been saved"
    check_walk("job", calm, STEPS)
    _every_version_is_whole("job")


def test_a_server_that_refuses(
    sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Server, limits: None
) -> None:
    calm = calm_walk(STEPS)
    with Proxy(quiet) as proxy:
        for key, value in proxy.server.environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("SUBLET_STORE", proxy.server.url())
        outage = Outage(tmp_path)
        outage.pid = forked(lambda: trains(outage))
        outage.wait(lambda: outage.reached(OUT_AT))
        proxy.faults = lambda _: "503"
        outage.tell("out")
        lasts(outage)
        proxy.faults = lambda _: None
        outage.tell("back")
        assert ended(outage.pid, 180) == 0, outage.said()
        told_once(outage.said())
        check_walk("job", calm, STEPS)
        _every_version_is_whole("job")


@pytest.mark.parametrize("replicas", [2, 3])
def test_one_of_several_is_out(
    sqlite_home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quiet: Server,
    limits: None,
    replicas: int,
) -> None:
    """Saves go on with the others: one of two where that was asked for by name, two of three by themselves. It catches up by itself."""
    calm = calm_walk(STEPS)
    with Proxy(quiet) as proxy:
        proxy.server.bucket = "checkpoints"
        others = [Server("s3", quiet.address, f"bucket-{n}") for n in "bc"[: replicas - 1]]
        for server in (proxy.server, *others):
            for key, value in server.own_environment.items():
                monkeypatch.setenv(key, value)
        urls = [f"{s.url()}@{place}" for s, place in zip((proxy.server, *others), "abc", strict=False)]
        policy = ReplicaPolicy(
            replicas=replicas, domains=tuple("abc"[:replicas]), write_quorum=1, single_node=True
        ) if replicas == 2 else None  # fmt: skip

        def opened() -> CheckpointStore:
            return sublet.checkpoints(*urls, policy=policy)

        outage = Outage(tmp_path)

        def work() -> None:
            with opened() as store:
                trains(outage, store=store)
                assert store.catch_up(60), store.behind()

        outage.pid = forked(work)
        outage.wait(lambda: outage.reached(OUT_AT))
        proxy.faults = lambda _: "503"
        outage.tell("out")
        outage.wait(lambda: outage.reached(FAR))
        outage.wait(lambda: _committed("job") >= FAR - 4)  # saves go on
        outage.wait(lambda: "is away" in outage.said())
        assert "saves go on with the other replicas" in outage.said()
        proxy.faults = lambda _: None
        outage.tell("back")
        assert ended(outage.pid, 180) == 0, outage.said()
        monkeypatch.setenv("SUBLET_STORE", urls[0].rpartition("@")[0])  # it alone, which was out
        check_walk("job", calm, STEPS)


def test_told_to_leave_while_the_store_is_away(
    sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weed: Seaweed
) -> None:
    """C6: it leaves before its deadline, whatever a save waits for; what was committed stays, and the user reads what was not saved."""
    calm = calm_walk(STEPS, LARGE)
    for key, value in weed.server.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SUBLET_STORE", weed.server.url())  # with a user's limits: a request may take a minute
    outage = Outage(tmp_path)
    outage.pid = forked(lambda: trains(outage, LARGE, grace="4s"))
    outage.wait(lambda: outage.reached(OUT_AT))
    outage.wait(lambda: _committed("job") > 0)
    weed.freeze()
    try:
        outage.tell("out")
        outage.wait(lambda: outage.reached(FAR))
        tell(outage.pid, signal.SIGTERM)
        assert ended(outage.pid, 50) == 85, outage.said()  # less than one request may take
    finally:
        weed.go_on()
    said, committed = outage.said(), _committed("job")
    assert f"Step {committed} is committed; steps {committed + 1} to " in said
    assert "not saved, and will be done again" in said
    outage.tell("back")
    outage.pid = forked(lambda: trains(outage, LARGE))
    assert ended(outage.pid, 180) == 0, outage.said()
    check_walk("job", calm, STEPS)
    _every_version_is_whole("job")


def _committed(job: str) -> int:
    with looking() as ledger:
        head = ledger.head(job)
        return head.step if head is not None else 0


def _ps() -> str:
    from click.testing import CliRunner

    from sublet.cli.leases.listings import ps

    shown = CliRunner().invoke(ps, ["--json"])
    assert shown.exit_code == 0, shown.output
    return shown.output


def _every_version_is_whole(job: str) -> None:
    with sublet.checkpoints() as store:
        assert {what for _, _, what in store.verify(job)} == {"good"}
        for manifest in store.history(job):
            assert store.load(job, version=manifest.version) is not None
