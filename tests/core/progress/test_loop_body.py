"""What the body of a loop carries from step to step, by its text."""

from __future__ import annotations

import pytest

from sublet.core.progress.loop_body import body_around

CARRIED = {
    "total += loss": {"total"},
    "best = min(best, loss)": {"best"},
    "x = loss\ny = x + 1": set(),
    "if step % 10 == 0:\n    last = loss\nprint(last)": {"last"},
    "if loss:\n    a = 1\nelse:\n    a = 2\nprint(a)": set(),
    "for part in loss:\n    found = part\nprint(found)": {"found"},
    "try:\n    a = f()\nexcept E:\n    pass\nprint(a)": {"a"},
    "try:\n    a = f()\nexcept E:\n    a = 0\nprint(a)": set(),
    "now = time.time()\nprint(now - then)\nthen = now": {"then"},
    "print(time.time() - then)\nthen = time.time()": set(),
    "h, c = cell(x, h, c)": {"h", "c"},
    "losses = [loss for loss in losses]": {"losses"},
    "x = [x for x in range(3)]": set(),
    "state = update(state)": {"state"},
    "f = lambda a: a + held\nheld = f(1)": {"held"},
    "match loss:\n    case 0:\n        a = 1\n    case _:\n        a = 2\nprint(a)": set(),
    "while more:\n    more = f()": {"more"},
    "losses.append(loss)": set(),
    "seen: int = seen + 1": {"seen"},
    "print(step)": set(),
    "with open(p) as file:\n    text = file.read()\nprint(text)": set(),
}


@pytest.mark.parametrize("body", CARRIED, ids=lambda body: body.replace("\n", "; "))
def test_what_a_body_carries(body: str) -> None:
    inside = "".join(f"    {line}\n" for line in body.splitlines())
    found = body_around("before = 1\nfor step in run.steps(9):\n" + inside, 2)
    assert found is not None
    assert found.carried == CARRIED[body]


def test_of_two_loops_the_inner_one() -> None:
    text = "for epoch in range(3):\n    a += 1\n    for step in steps:\n        b += 1\n"
    inner, outer = body_around(text, 3), body_around(text, 1)
    assert inner is not None
    assert outer is not None
    assert inner.carried == {"b"}
    assert outer.carried == {"a", "b"}
    assert body_around("a = 1\n", 1) is None
    assert body_around("no text (", 1) is None
