"""Threat 25: which mode a home and what is in it have."""

from __future__ import annotations

import pytest

from sublet.core.file_modes import file_in, folder_in, tightened_home


@pytest.mark.parametrize(
    ("folder", "made_folder", "made_file"),
    [
        (0o700, 0o700, 0o600),
        (0o755, 0o700, 0o600),
        (0o777, 0o700, 0o600),
        (0o775, 0o700, 0o600),  # a umask of 002, and nobody meant a group
        (0o2755, 0o700, 0o600),  # the group may not write here
        (0o2775, 0o2770, 0o660),
        (0o2770, 0o2770, 0o660),
    ],
)
def test_what_is_made_in_a_folder(folder: int, made_folder: int, made_file: int) -> None:
    assert folder_in(folder) == made_folder
    assert file_in(folder) == made_file


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (0o40700, None),
        (0o40755, 0o700),
        (0o40711, 0o700),
        (0o40775, 0o700),
        (0o42775, 0o2770),
        (0o42770, None),
        (0o40500, None),
    ],
)
def test_a_home_that_is_there(mode: int, wanted: int | None) -> None:
    assert tightened_home(mode) == wanted
