"""What a program logs in a step: shown in the progress line, committed with the step."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from sublet.core.progress.effect import MOST_TEXT


class LoggedValues:
    """The last value under each name. A tensor is read only when somebody looks, so that logging does not
    wait for the device; its graph is released."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._values[name] = value.detach() if getattr(value, "requires_grad", False) else value

    def numbers(self) -> dict[str, float]:
        """The values that can be shown as numbers."""
        return {
            name: number for name, value in self._values.items() if (number := _number(value)) is not None
        }

    def stored(self) -> dict[str, float | str]:
        """As many values as an outcome has room for: too much logged must not keep steps from being
        committed."""
        stored: dict[str, float | str] = {}
        room = MOST_TEXT - 1024
        for name, value in self.numbers().items():
            room -= len(json.dumps(name)) + 32
            if room < 0:
                break
            stored[name] = value if math.isfinite(value) else str(value)
        return stored


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
