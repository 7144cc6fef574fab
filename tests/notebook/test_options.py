"""The verbs of `%gpu` are named in one place, and each can be called and is explained."""

from __future__ import annotations

import pytest

from sublet.notebook.options import LINE_HELP, VERBS
from sublet.notebook.panel import GpuPanel

#: What `magics.py` does by itself, and then has drawn.
DONE = {"release": "released", "restore": "restored"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_a_method_and_a_line_of_help(verb: str) -> None:
    assert callable(getattr(GpuPanel, DONE.get(verb, verb)))
    assert f"\n  {verb} " in LINE_HELP
    assert verb in LINE_HELP.splitlines()[0]
