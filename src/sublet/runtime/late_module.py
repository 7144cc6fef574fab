"""A module a cell imported in the worker, under its name in the notebook: imported here when it is first used.

To bring `torch` back because a cell said `import torch` would cost seconds in a notebook that never uses it itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class LateModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__version__", "__path__", "__file__", "__all__"):
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(import_module(self.__name__), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        return dir(import_module(self.__name__))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return import_module, (self.__name__,)

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}, imported here when it is first used>"


def module_or_late(name: str) -> ModuleType:
    return sys.modules.get(name) or LateModule(name)
