"""What may happen to an item, as pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput, NotJson, StaleDelivery, TooLarge
from sublet.core.queues.items import (
    BACKOFF_CEILING_US,
    MOST_BYTES,
    MOST_ERROR,
    SLOT_US,
    ItemFacts,
    ItemState,
    Nack,
    NewItem,
    QueueTerms,
    Tempo,
    check_draft,
    counted,
    decide_loss,
    decide_nack,
    from_text,
    has_it,
    in_turn,
    per_second,
    refusal,
    shortened,
    to_text,
)
from sublet.core.runs.requeue import backoff

NOW = 1_000_000_000
SECOND = 1_000_000


def leased(**over: object) -> ItemFacts:
    return ItemFacts(**{"id": 7, "state": ItemState.LEASED, "delivery": 3, "owner": 5, "place": 100, **over})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("item", "mine"),
    [
        (leased(), True),
        (leased(owner=6), False),
        (leased(delivery=4), False),
        (leased(delivery=2), False),
        (leased(state=ItemState.READY), False),
        (leased(state=ItemState.DONE), False),
        (leased(state=ItemState.DEAD), False),
        (None, False),
    ],
)
def test_only_the_consumer_with_the_newest_delivery_has_it(item: ItemFacts | None, mine: bool) -> None:
    assert has_it(item, 5, 3) is mine


def test_a_refusal_says_what_became_of_the_item() -> None:
    for item, words in [
        (None, "purged"),
        (leased(owner=6, delivery=4), "handed out again as delivery 4"),
        (leased(state=ItemState.DONE, owner=6, delivery=4), "somebody else completed it"),
        (leased(state=ItemState.DEAD), "dead-letter"),
        (leased(state=ItemState.READY), "waits to be handed out again"),
    ]:
        refused = refusal(item, 5, 3)
        assert isinstance(refused, StaleDelivery)
        assert words in str(refused)
    assert refusal(leased(state=ItemState.DONE), 5, 3) is None, "an answer that was lost is given again"


def test_giving_up_keeps_the_place_and_counts_nothing() -> None:
    back = decide_nack(leased(failures=2), Nack(item=7, delivery=3, failed=False), QueueTerms(tries=3), NOW)
    assert (back.state, back.place, back.failures, back.visible_at) == (ItemState.READY, 100, 2, NOW)
    later = decide_nack(leased(), Nack(item=7, delivery=3, failed=False, delay_us=SECOND), QueueTerms(), NOW)
    assert (later.state, later.place, later.visible_at) == (ItemState.DELAYED, NOW + SECOND, NOW + SECOND)


def test_failing_counts_waits_and_ends() -> None:
    terms = QueueTerms(tries=3, backoff_us=SECOND)
    nack = Nack(item=7, delivery=3, failed=True)
    first = decide_nack(leased(), nack, terms, NOW)
    assert (first.state, first.failures) == (ItemState.DELAYED, 1)
    assert NOW + SECOND // 2 <= first.visible_at == first.place <= NOW + SECOND
    last = decide_nack(leased(failures=2), nack, terms, NOW)
    assert (last.state, last.failures, last.why) == (ItemState.DEAD, 3, "it failed 3 times")


def test_a_lost_worker_is_no_failure() -> None:
    back = decide_loss(leased(failures=2, losses=1), QueueTerms(tries=3, losses=3), NOW)
    assert (back.state, back.failures, back.losses, back.place) == (ItemState.READY, 2, 2, 100)
    assert decide_loss(leased(losses=2), QueueTerms(losses=3), NOW).state is ItemState.DEAD


@given(st.integers(1, 200), st.integers(0, 10**9), st.integers(0, 3600 * SECOND))
def test_a_backoff_is_bounded_and_grows(failures: int, seed: int, base: int) -> None:
    pause = backoff(failures, seed, base, BACKOFF_CEILING_US)
    ceiling = max(base, BACKOFF_CEILING_US)
    whole = min(base << min(failures - 1, 20), ceiling)
    assert whole // 2 <= pause <= whole


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_texts_come_back_and_hold_nothing_a_database_refuses(value: object) -> None:
    text = to_text(value, what="it")
    assert from_text(text) == value
    assert text.isascii()
    assert "\x00" not in text


def test_what_is_not_json_or_too_large_says_so() -> None:
    for wrong in (object(), {1, 2}, b"x", {(1, 2): 3}):
        with pytest.raises(NotJson, match="it cannot be written as JSON"):
            to_text(wrong, what="it")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotJson):
        to_text(loop, what="it")
    assert len(to_text("x" * (MOST_BYTES - 2), what="it")) == MOST_BYTES
    with pytest.raises(TooLarge):
        to_text("x" * (MOST_BYTES - 1), what="it")
    assert math.isnan(from_text(to_text(math.nan, what="it")))


def test_the_end_of_a_long_error_is_kept() -> None:
    assert shortened("a\x00b\udce9") == "a\\0b\\udce9"
    kept = shortened("x" * 100_000 + "ValueError: here")
    assert len(kept) == MOST_ERROR
    assert kept.endswith("ValueError: here")


@pytest.mark.parametrize(
    "wrong",
    [{"priority": 10**7}, {"delay_us": -1}, {"key": "a\nb"}, {"key": "x" * 513}],
)
def test_drafts_nobody_means_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        check_draft(NewItem(body="1", **wrong))  # type: ignore[arg-type]


def test_queues_are_asked_in_turn() -> None:
    queues = ["a", "b", "c"]
    assert in_turn(queues, "") == ["a", "b", "c"]
    assert in_turn(queues, "a") == ["b", "c", "a"]
    assert in_turn(queues, "c") == ["a", "b", "c"]
    assert in_turn(queues, "gone") == ["a", "b", "c"]


def test_a_queue_that_always_has_work_gets_no_more_than_its_turn() -> None:
    work = {"busy": 1000, "small": 10, "empty": 0}
    served, order = "", []
    for _ in range(40):
        served = next(q for q in in_turn(list(work), served) if work[q])
        work[served] -= 1
        order.append(served)
    assert order[:20] == ["busy", "small"] * 10
    assert set(order[20:]) == {"busy"}


@given(st.lists(st.tuples(st.integers(0, 3 * SLOT_US), st.integers(1, 50)), max_size=30))
def test_the_rate_counts_what_was_done_in_the_last_slots_length(done: list[tuple[int, int]]) -> None:
    tempo, now = Tempo(), NOW
    events = []
    for pause, count in done:
        now += pause
        tempo = counted(tempo, now, count)
        events.append((now, count))
    within = sum(c for at, c in events if at > now - SLOT_US)
    in_two = sum(c for at, c in events if at // SLOT_US >= now // SLOT_US - 1)
    rate = per_second(tempo, now) * SLOT_US / SECOND
    assert rate <= in_two + 1e-9
    this_slot = sum(c for at, c in events if at // SLOT_US == now // SLOT_US)
    assert rate >= this_slot - 1e-9
    assert within <= in_two
