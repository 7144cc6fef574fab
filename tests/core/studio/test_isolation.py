"""I1, the rules alone: which containment two tenants need between them, and what is said where it is missing."""

from __future__ import annotations

import pytest

from sublet.core.errors import BadInput, NotIsolated
from sublet.core.studio.isolation import (
    HIDDEN_HOME,
    NEEDED,
    NOT_CHECKED,
    OWN_UID,
    SAME_UID,
    HostIsolation,
    IsolationMode,
    admission,
    missing,
    parse_mode,
    words_of,
)
from sublet.core.studio.worker_limits import (
    MEMORY_LEAST,
    Enforcer,
    LimitInForce,
    Resource,
    WorkerLimits,
    bounds,
    in_words,
    parse_limits,
)

LIMITS = WorkerLimits(processes=4096, memory_bytes=8 << 30, cpu_weight=100)
BY_GROUP = [LimitInForce(resource=resource, amount=amount) for resource, amount in LIMITS.wanted().items()]
#: A worker that has all of it.
WHOLE = ("cgroup", "pid namespace", HIDDEN_HOME, OWN_UID, *in_words(LIMITS, BY_GROUP))


def names(words: tuple[str, ...]) -> list[str]:
    return [boundary.name for boundary in missing(words)]


def test_with_everything_in_force_nothing_is_missing() -> None:
    assert names(WHOLE) == []
    assert HostIsolation(mode=IsolationMode.REQUIRED, words=WHOLE).admits_others
    assert admission(IsolationMode.REQUIRED, ", ".join(WHOLE)) is None


@pytest.mark.parametrize(
    ("without", "name"),
    [
        (OWN_UID, "own uid"),
        (HIDDEN_HOME, "hidden home"),
        ("4096 processes by cgroup", "limited processes"),
        ("memory 8GiB by cgroup", "limited memory"),
    ],
)
def test_each_row_of_the_table_counts_alone(without: str, name: str) -> None:
    assert without in WHOLE
    left = tuple(word for word in WHOLE if word != without)
    assert names(left) == [name]
    host = HostIsolation(mode=IsolationMode.REQUIRED, words=left)
    assert not host.separates
    assert not host.admits_others
    assert name in host.summary
    assert host.advice[0].startswith(f"no {name}: ")
    assert name in str(admission(IsolationMode.REQUIRED, ", ".join(left)))


def test_nothing_is_in_force_that_no_worker_reported() -> None:
    assert [boundary.name for boundary in NOT_CHECKED.missing] == [boundary.name for boundary in NEEDED]
    assert not NOT_CHECKED.admits_others
    assert names(("subreaper", SAME_UID)) == [boundary.name for boundary in NEEDED]


def test_a_container_without_namespaces_admits_one_tenant() -> None:
    host = HostIsolation(mode=IsolationMode.REQUIRED, words=("subreaper", SAME_UID, "memory not limited"))
    assert host.summary.startswith("one tenant only: ")
    refused = admission(IsolationMode.REQUIRED, "subreaper, same uid")
    assert isinstance(refused, NotIsolated)
    assert "nothing was started" in refused.message
    assert "--isolation none" in refused.remedy


def test_none_by_name_admits_everybody_and_says_what_that_means() -> None:
    host = HostIsolation(mode=IsolationMode.NONE, words=("subreaper", SAME_UID))
    assert host.admits_others
    assert not host.separates
    assert "NOT kept apart" in host.summary
    assert admission(IsolationMode.NONE, "subreaper, same uid") is None


def test_where_sessions_run_elsewhere_nothing_is_claimed_and_each_worker_is_judged() -> None:
    host = HostIsolation(mode=IsolationMode.REQUIRED, elsewhere=True)
    assert host.admits_others
    assert not host.separates
    assert "each session is checked" in host.summary


def test_a_host_on_which_no_worker_starts_admits_nobody_else() -> None:
    host = HostIsolation(
        mode=IsolationMode.REQUIRED, refused="the kernel does not allow it", remedy="do this"
    )
    assert not host.admits_others
    assert "the kernel does not allow it" in host.summary
    assert host.advice == ["do this"]


def test_a_limit_of_each_process_alone_does_not_bound_a_worker_that_starts_many() -> None:
    kept = [
        LimitInForce(resource=Resource.PROCESSES, amount=4096, by=Enforcer.RLIMIT),
        LimitInForce(resource=Resource.MEMORY, amount=8 << 30, by=Enforcer.RLIMIT),
    ]
    words = in_words(LIMITS, kept)
    assert words == [
        "4096 processes by rlimit",
        "memory 8GiB of each process by rlimit",
        "cpu not limited",
    ]
    assert bounds(Resource.PROCESSES, words)
    assert not bounds(Resource.MEMORY, words)


def test_a_limit_that_nothing_enforces_is_said_and_does_not_count() -> None:
    words = in_words(LIMITS, [])
    assert words == ["processes not limited", "memory not limited", "cpu not limited"]
    assert not any(bounds(resource, words) for resource in (Resource.PROCESSES, Resource.MEMORY))


def test_words_survive_the_way_into_a_receipt_and_back() -> None:
    assert tuple(words_of(", ".join(WHOLE))) == WHOLE


@pytest.mark.parametrize("text", ["off", "no", "trusted", "required,none"])
def test_only_two_words_name_a_mode(text: str) -> None:
    with pytest.raises(BadInput, match="required or none"):
        parse_mode(text)


def test_a_mode_that_is_empty_is_required() -> None:
    assert parse_mode("") is IsolationMode.REQUIRED
    assert parse_mode(" None ") is IsolationMode.NONE


def test_limits_are_read_from_settings() -> None:
    found = parse_limits(memory="50%", processes="512", cpu_weight="100", machine_bytes=64 << 30)
    assert found == WorkerLimits(memory_bytes=32 << 30, processes=512, cpu_weight=100)
    assert (
        parse_limits(memory="1%", processes="64", cpu_weight="1", machine_bytes=1 << 30).memory_bytes
        == MEMORY_LEAST
    )
    assert (
        parse_limits(memory="2GiB", processes="64", cpu_weight="1", machine_bytes=1).memory_bytes == 2 << 30
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "0%"},
        {"memory": "101%"},
        {"memory": "much"},
        {"memory": "1MiB"},
        {"processes": "0"},
        {"processes": "1"},
        {"processes": "-5"},
        {"cpu_weight": "10001"},
        {"cpu_weight": "0.5"},
    ],
)
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        parse_limits(
            **{"memory": "50%", "processes": "4096", "cpu_weight": "100", **wrong}, machine_bytes=64 << 30
        )
