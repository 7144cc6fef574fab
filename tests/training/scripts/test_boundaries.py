"""Which loops train, and where a step of them ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sublet.core.errors import BadInput
from sublet.training.scripts.boundaries import NAME, imported_names, uses_sublet_train, with_boundaries

FOUND = {
    "backward and step": ("for x in data:\n    loss.backward()\n    optim.step()\n", [1]),
    "only backward": ("while True:\n    loss.backward()\n", [1]),
    "the innermost": (
        "for e in r:\n    for x in data:\n        loss.backward()\n        optim.step()\n",
        [2],
    ),
    "not the one inside the step": (
        "for x in data:\n    loss.backward()\n    for p in ps:\n        p.data -= 0.1 * p.grad\n    optim.step()\n",
        [1],
    ),
    "in a function that it calls": (
        "def step(x):\n    loss.backward()\n    optim.step()\nfor x in data:\n    step(x)\n",
        [4],
    ),
    "two of them": (
        "for x in a:\n    l.backward()\n    o.step()\nfor x in b:\n    l.backward()\n    o.step()\n",
        [1, 4],
    ),
    "a descent": ("for x in data:\n    w -= 0.1 * g\n", [1]),
    "a descent written out": ("for x in data:\n    w = w - 0.1 * g\n", [1]),
    "partial_fit": ("for x in data:\n    model.partial_fit(x)\n", [1]),
    "a state that is carried, with JAX": ("import jax\nfor x in data:\n    state = step(state, x)\n", [2]),
    "a state that is carried, without": ("for x in data:\n    state = step(state, x)\n", []),
    "an update in place, with JAX": (
        "from flax import nnx\n@nnx.jit\ndef fit(model, o, x):\n    loss, grads = f(model, x)\n    o.update(model, grads)\n"
        "for x in data:\n    fit(model, o, x)\n",
        [6],
    ),
    "metrics that are updated": ("import jax\nfor x in data:\n    metrics.update(loss=loss)\n", []),
    "nothing that trains": ("for x in data:\n    print(x)\n", []),
    "over parameters only": ("for p, g in zip(ps, gs):\n    p -= 0.1 * g\n", []),
}


@pytest.mark.parametrize("name", FOUND)
def test_training_loops_are_found(name: str) -> None:
    text, lines = FOUND[name]
    assert [loop.line for loop in with_boundaries(text, "train.py").loops] == lines


REFUSED = {
    "a generator": (
        "def f():\n    for x in data:\n        l.backward()\n        o.step()\n        yield x\n",
        "line 2: the training loop is inside the generator f",
    ),
    "asynchronous code": (
        "async def f():\n    for x in data:\n        l.backward()\n        o.step()\n",
        "line 2: the training loop is inside asynchronous code",
    ),
    "the body of a class": (
        "class A:\n    for x in data:\n        l.backward()\n        o.step()\n",
        "line 2: the training loop stands in the body of a class",
    ),
    "no program": ("for x in\n", "is no Python program"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_entered_again_is_refused_with_its_line(name: str) -> None:
    text, words = REFUSED[name]
    with pytest.raises(BadInput, match=words):
        with_boundaries(text, "train.py")


def test_a_loop_can_be_named() -> None:
    text = "for x in data:\n    print(x)\nfor y in data:\n    print(y)\n"
    assert [loop.line for loop in with_boundaries(text, "train.py", line=3).loops] == [3]
    with pytest.raises(BadInput, match="line 2 is no loop; its loops begin in lines 1, 3"):
        with_boundaries(text, "train.py", line=2)


def calls_of(text: str, line: int = 1) -> str:
    said: list[str] = []
    marks = SimpleNamespace(
        **{name: lambda name=name: said.append(name[0]) for name in ("begin", "step", "after")}
    )
    exec(compile(with_boundaries(text, "t.py", line=line).tree, "t.py", "exec"), {NAME: marks, "said": said})
    return "".join(said)


ENDS = {
    "each turn": ("for x in range(3):\n    said.append('.')\n", "b.s.s.sa"),
    "continue": ("for x in range(3):\n    if x == 1:\n        continue\n    said.append('.')\n", "b.ss.sa"),
    "break": ("for x in range(3):\n    if x == 1:\n        break\n    said.append('.')\n", "b.ssa"),
    "not those of a loop inside": ("for x in range(2):\n    for y in range(2):\n        break\n", "bssa"),
    "but of the else of one": (
        "for x in range(2):\n    for y in ():\n        pass\n    else:\n        continue\n    said.append('.')\n",
        "bssa",
    ),
    "behind all loops around it": (
        "for e in range(2):\n    for x in range(1):\n        said.append('.')\n    said.append('|')\n",
        "b.s|b.s|a",
    ),
    "in a try": (
        "for x in range(2):\n    try:\n        continue\n    finally:\n        said.append('.')\n",
        "bs.s.a",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_step_ends_where_a_turn_ends(name: str) -> None:
    text, said = ENDS[name]
    assert calls_of(text, line=2 if "around" in name else 1) == said


def test_marks_stand_on_lines_of_the_loop() -> None:
    text = "data = [1]\nfor x in data:\n    a = 1\n    b = (1,\n         2)\nprint(b)\n"
    tree = with_boundaries(text, "t.py", line=2).tree
    lines = [node.lineno for node in tree.body]
    assert lines == sorted(lines)
    assert set(lines) <= {1, 2, 5, 6}


def test_who_resumes_by_itself_is_known() -> None:
    tree = with_boundaries("import sublet\n\nrun = sublet.train('x')\n", "t.py").tree
    assert uses_sublet_train(tree) == 3
    assert uses_sublet_train(with_boundaries("train('x')\n", "t.py").tree) is None
    assert imported_names(tree) == {"sublet"}
