"""`sublet block …` as people use it."""

from __future__ import annotations

import sublet as library
from tests.cli.test_commands import as_json, home, sublet  # noqa: F401
from tests.homes import Home


def test_from_ls_to_sweep(home: Home) -> None:  # noqa: F811
    assert as_json(home, "block", "ls") == []
    with library.block(blocks=8) as block:
        library.Durable({"epoch": 1}, block).checkpoint()
        [listed] = as_json(home, "block", "ls")
        assert (listed["locator"], listed["state"], listed["sequence"], listed["size_bytes"]) == (
            block.locator, "held", 1, 32768,
        )  # fmt: skip
        refused = sublet(home, "block", "rm", block.locator)
        assert refused.returncode == 75
        assert "held by process" in refused.stderr
    shown = as_json(home, "block", "show", block.locator)
    assert (shown["state"], shown["slots"][1]) == ("kept", "empty")
    assert shown["slots"][0].startswith("checkpoint 1 of epoch")
    text = sublet(home, "block", "show", block.locator).stdout
    assert "kept for 6d23h" in text or "kept for 7d00h" in text
    assert "first slot   checkpoint 1" in text
    assert block.locator in sublet(home, "block", "ls").stdout
    assert as_json(home, "block", "sweep") == {"removed": [], "unknown": []}
    assert as_json(home, "block", "rm", block.locator) == {"locator": block.locator, "removed": True}
    assert sublet(home, "block", "show", block.locator).returncode == 2
    assert "nothing to remove" in sublet(home, "block", "sweep").stdout
    assert list((home.settings.home / "blocks").iterdir()) == []


def test_a_block_whose_process_is_gone(home: Home) -> None:  # noqa: F811
    child = home.start("import sublet; b = sublet.block(keep='0s'); print(b.locator, flush=True)")
    locator = child.stdout.readline().strip()
    child.wait()
    assert "is gone: it can be attached now" in sublet(home, "block", "ls").stdout
    assert "removed" in sublet(home, "block", "rm", locator).stdout


def test_wrong_locators(home: Home) -> None:  # noqa: F811
    for name in ("../../etc/passwd", "B12", "x"):
        for verb in ("show", "rm"):
            done = sublet(home, "block", verb, name)
            assert done.returncode == 2
            assert "is not a locator" in done.stderr
    missing = sublet(home, "block", "rm", "B" + "0" * 20)
    assert missing.returncode == 2
    assert "there is no block" in missing.stderr
