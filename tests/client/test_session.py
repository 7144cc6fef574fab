"""A stay in a studio that outlives its GPUs, and what a studio tells of itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import sublet
from sublet.core.errors import BadInput, Forbidden, LeaseLost, NotFound, QuotaReached, Stale, Unauthorized
from sublet.core.leasing.tenancy import Tenant
from tests.client.conftest import House
from tests.homes import wait_until


@pytest.fixture(scope="module")
def studio(shared: House) -> sublet.Studio:
    return shared.connect()


def test_run_waits_for_the_gpu_and_code_stays(
    studio: sublet.Studio, capsys: pytest.CaptureFixture[str]
) -> None:
    with studio.session(vram="1GiB", name="my stay") as session:
        assert session.run(len, "abc") == 3
        session.run_code("x = 20\nprint('x is', x)")
        session.run_code("x + 1")
        assert session.status == "active"
        assert session.name == "my stay"
        assert session.devices
        assert studio.find(session.id).vram_bytes == 1 << 30
    assert capsys.readouterr().out == "x is 20\n21\n"
    assert session.facts.status == "ended"
    with pytest.raises(LeaseLost):
        session.run(len, "")


def test_saved_in_one_session_and_loaded_in_the_next(studio: sublet.Studio) -> None:
    numpy = pytest.importorskip("numpy")
    state = {"step": 7, "weights": numpy.arange(1000, dtype=numpy.float32)}
    with studio.session(vram="1GiB", checkpoint="trial") as session:
        assert session.saved() is None
        session.wait_until_active()
        first = session.save(state)
        second = session.save({**state, "step": 8})
        assert (first.version, second.version) == (1, 2)
        assert first.bytes_written > 4000
        assert session.saved(version=1)["step"] == 7
    with studio.session(vram="1GiB", checkpoint="trial") as session:
        session.wait_until_active()
        found = session.saved()
        assert found["step"] == 8
        assert numpy.array_equal(found["weights"], state["weights"])
        session.run_code("import sublet\nsublet.save({'step': sublet.saved()['step'] + 1})")
        assert session.saved()["step"] == 9
    assert studio.checkpoint("trial")["step"] == 9
    assert "trial" in {row["name"] for row in studio.checkpoints()}
    with pytest.raises(NotFound):
        studio.checkpoint("never")


def test_what_cannot_be_saved_is_told(studio: sublet.Studio) -> None:
    with studio.session(vram="1GiB", checkpoint="odd") as session:
        session.wait_until_active()
        with pytest.raises(sublet.Unsavable):
            session.save({"lock": threading.Lock()})
        assert session.saved() is None


def test_suspended_and_resumed(house: House) -> None:
    studio = house.connect()
    session = studio.session(vram="1GiB", checkpoint="kept").wait_until_active()
    session.run_code("x = 1")
    session.save({"x": 1})
    first = session.lease_id
    house.revoke(first, detail="ada needs it")
    wait_until(lambda: session.status == "suspended")
    with pytest.raises(LeaseLost, match="ada needs it"):
        session.run(len, "")
    with pytest.raises(LeaseLost, match="ada needs it"):
        session.check()
    session.resume().wait_until_active()
    assert session.lease_id != first
    assert session.saved() == {"x": 1}
    with pytest.raises(sublet.CallFailed, match="NameError"):
        session.run_code("x")
    session.end()
    session.end()
    with pytest.raises(Stale):
        session.resume()


def test_an_offer_by_hand(house: House) -> None:
    ann, bob = house.connect("ann"), house.connect("bob")
    with ann.gpu(vram="8GiB", ttl="1m"):
        session = bob.session(vram="16GiB", offers=True)
        wait_until(lambda: session.status == "offered")
        assert session.offer is not None
        assert session.offer.vram_bytes == 8 << 30
        session.accept()
        session.wait_until_active()
        assert session.vram_bytes == 8 << 30
        session.end()


def test_a_session_idle_too_long_is_given_back(house: House) -> None:
    session = house.connect().session(vram="1GiB", ttl="5s", warm="1s").wait_until_active()
    wait_until(lambda: session.status == "suspended")
    session.end()


def test_another_process_goes_on_with_it(house: House) -> None:
    session = house.connect().session(vram="1GiB").wait_until_active()
    session.run_code("x = 41")
    child = house.home.start(
        """
        import sublet, sys
        sublet.connect(sys.argv[1], sys.argv[2]).find(sys.argv[3]).run_code("x + 1")
        """,
        house.url,
        house.token(),
        session.id,
    )
    assert child.stdout is not None
    assert child.stdout.read() == "42\n"
    session.end()


def test_quotas_are_refused_with_what_to_do(house: House) -> None:
    studio = house.connect("carl")
    house.ledger.set_tenant("carl", max_sessions=1, actor="test")
    session = studio.session(vram="1GiB")
    with pytest.raises(QuotaReached) as caught:
        studio.session(vram="1GiB")
    assert caught.value.remedy
    session.end()
    house.ledger.set_tenant("carl", max_leases=1, actor="test")
    assert Tenant(name="carl").max_leases == 0


def test_what_a_studio_tells(studio: sublet.Studio) -> None:
    assert studio.me()["tenant"] == "ann"
    assert studio.tenant == "ann"
    assert len(studio.devices()) == 2
    with studio.session(vram="1GiB") as session:
        session.run(len, "")
        assert session.lease_id in {row["id"] for row in studio.leases()}
        found = studio.look_lease(session.lease_id)
        assert found.lease.granted_at <= found.at
        assert session.id in {s.id for s in studio.sessions()}
    assert session.id not in {s.id for s in studio.sessions()}
    assert session.id in {s.id for s in studio.sessions(open=False)}
    assert isinstance(studio.waitlist(), list)
    wait_until(lambda: studio.look_lease(session.lease_id).lease.ended_at)
    assert studio.usage(by="session")


def test_another_tenant_s_are_not_there(shared: House, studio: sublet.Studio) -> None:
    other = shared.connect("bob")
    with studio.session(vram="1GiB", checkpoint="mine") as session:
        session.wait_until_active()
        session.save({"x": 1})
        for attempt in (
            lambda: other.find(session.id),
            lambda: other.look_lease(session.lease_id),
            lambda: other.checkpoint("mine"),
        ):
            with pytest.raises(NotFound):
                attempt()
        assert not other.sessions()
        assert not other.leases()


def test_tokens_that_are_over(house: House) -> None:
    studio = house.connect()
    token_id = house.token().split("_")[1]
    house.ledger.revoke_token(token_id, actor="test")
    with pytest.raises(sublet.SubletError) as caught:
        studio.me()
    assert isinstance(caught.value, Unauthorized)
    assert caught.value.remedy
    assert issubclass(Forbidden, Unauthorized)


def test_on_gpu_of_a_studio(studio: sublet.Studio) -> None:
    @studio.on_gpu(vram="1GiB", ttl="1m")
    def square(x: int) -> Any:
        import os

        return x * x, os.getpid()

    assert square(3)[0] == 9
    assert square(4)[1] == square(5)[1]
    assert [value for value, _ in square.map([1, 2, 3])] == [1, 4, 9]
    square.release()
    with pytest.raises(BadInput):
        studio.on_gpu(colour="red")(len)
