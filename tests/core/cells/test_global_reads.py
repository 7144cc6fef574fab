"""What a function reads, for whoever sends it somewhere."""

from __future__ import annotations

from typing import Any

from sublet.core.cells.global_reads import names_of_code


def test_globals_are_found_wherever_the_code_reads_them() -> None:
    space: dict[str, Any] = {}
    exec(
        "def f(x):\n"
        "    class Inner:\n"
        "        field = in_class\n"
        "        def method(self): return in_method\n"
        "    local = 1\n"
        "    def nested(): return [in_comprehension for _ in local]\n"
        "    return lambda: in_lambda + x.attribute + (lambda: deep)()\n",
        space,
    )
    found = names_of_code(space["f"].__code__)
    assert {"in_class", "in_method", "in_comprehension", "in_lambda", "deep"} <= set(found)
    assert not {"x", "local", "attribute", "field"} & set(found)
    assert list(found) == sorted(set(found))
