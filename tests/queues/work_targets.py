"""What the workers of the tests are given to do. An item is a dict: `n`, what to `do`, and the file to `log` to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__)


def note(item: dict[str, Any], what: str) -> None:
    with open(item["log"], "a") as file:
        file.write(f"{what}\n")


class Unsendable(BaseException):
    def __reduce__(self) -> Any:
        raise TypeError


def work(item: dict[str, Any]) -> Any:
    note(item, f"begin {item['n']} {os.getpid()}")
    do = item.get("do")
    first = not Path(item["log"] + f".{item['n']}").exists()
    Path(item["log"] + f".{item['n']}").touch()
    if do == "raise":
        raise ValueError(f"poison {item['n']}")
    if do == "raise once" and first:
        raise ValueError(f"poison {item['n']}")
    if do == "exit":
        raise SystemExit(4)
    if do == "cancel":
        raise asyncio.CancelledError("poison")
    if do == "interrupt":
        raise KeyboardInterrupt("poison")
    if do == "not to be pickled":
        raise BaseExceptionGroup("poison", [Unsendable()])
    if do == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "leave":
        os._exit(3)
    if do == "set":
        return {1, 2}
    if do == "large":
        return "x" * (2 << 20)
    if do == "hang once" and first:
        time.sleep(120)
    if do == "hang":
        time.sleep(120)
    if do == "slowly":
        time.sleep(1)
    note(item, f"end {item['n']}")
    return 2 * item["n"]


def batch(items: list[dict[str, Any]]) -> list[Any]:
    note(items[0], f"batch {[item['n'] for item in items]}")
    return [work(item) for item in items]


def short(items: list[dict[str, Any]]) -> list[Any]:
    return batch(items)[1:]


def no_list(items: list[dict[str, Any]]) -> Any:
    return {"results": batch(items)}


def as_generator(items: list[dict[str, Any]]) -> Any:
    yield from batch(items)


class Model:
    """Says in the file that TARGET_LOG names, or else beside the first item, what happens to it."""

    def __init__(self) -> None:
        self.said: list[str] = ["made"]

    def setup(self) -> None:
        self.said.append("setup")

    def process(self, items: list[dict[str, Any]]) -> list[Any]:
        self.log = items[0]["log"]
        for what in self.said:
            note(items[0], what)
        self.said.clear()
        return batch(items)

    def teardown(self) -> None:
        with open(self.log, "a") as file:
            file.write("teardown\n")


class Plain:
    def process(self, item: dict[str, Any]) -> Any:
        return work(item)


class BadTeardown(Plain):
    def teardown(self) -> None:
        raise RuntimeError("no way down")


class BadSetup(Plain):
    def setup(self) -> None:
        load_weights()


class DeadlySetup(Plain):
    def setup(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


def load_weights() -> None:
    raise OSError("no weights here")


class NoProcess:
    pass


async def later(item: Any) -> Any:
    return item


NUMBER = 3
