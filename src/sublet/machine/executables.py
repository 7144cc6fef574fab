"""The file that a command names, looked for as a shell does."""

from __future__ import annotations

import os

from sublet.core.runs.exits import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE


def find_executable(name: str, path: str) -> tuple[str, int]:
    """Return the file a shell would run and 0, or '' and the code a shell would exit with. Called before a
    lease is asked for."""
    if not name:
        return "", NOT_FOUND_CODE
    places = [name] if "/" in name else [os.path.join(p or ".", name) for p in path.split(os.pathsep)]
    seen = False
    for place in places:
        if os.path.isfile(place):
            if os.access(place, os.X_OK):
                return place, 0
            seen = True
        elif os.path.isdir(place) and "/" in name:
            seen = True
    return "", NOT_EXECUTABLE_CODE if seen else NOT_FOUND_CODE
