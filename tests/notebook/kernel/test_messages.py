"""What a kernel's user is told when it died."""

from __future__ import annotations

import pytest

from sublet.notebook.kernel import messages


@pytest.mark.parametrize(
    ("code", "how"),
    [(137, "killed by SIGKILL"), (1, "exit code 1"), (None, "its supervisor was killed")],
)
def test_only_a_kernel_that_held_a_gpu_gave_one_back(code: int | None, how: str) -> None:
    assert f"The kernel died ({how}), and its GPU was given back." in messages.crashed(code, leased=True)
    without = messages.crashed(code, leased=False)
    assert f"The kernel died ({how}). It was restarted" in without
    assert "GPU was given back" not in without
