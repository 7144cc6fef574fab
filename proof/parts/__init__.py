"""The parts of `make proof`: what each tries, how often, for how long. A table for each subject."""

from __future__ import annotations

from proof.parts import cases, deployed, histories, killed, simulated, stored
from proof.parts.part import Part, printed, told

__all__ = ["Part", "parts", "printed", "told"]


def parts() -> list[Part]:
    """As the page lists them."""
    return [
        part
        for subject in (simulated, histories, killed, stored, cases, deployed)
        for part in subject.parts()
    ]
