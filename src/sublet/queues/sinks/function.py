"""A function as a sink.

Rules of this file:
- It is given the idempotency key, and may be called again with the same one: after a crash, or when it
  raised.
- Whatever it raises means that the result is not stored: `SinkDown`, with the cause. `BadInput` says that it
  never will be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from sublet.core.errors import BadInput, SinkDown
from sublet.ports.sink import Made


class CallableSink:
    """Implements `ports.sink.Sink`. `fn(key, body, result)`, or `fn(made)`; `fn.known(keys)` if it has
    one."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
        self._takes_made = self._reads_made()
        self._closed = False

    def check(self) -> None:
        """Does nothing: a function cannot be checked before it is called."""

    def store(self, results: Sequence[Made]) -> None:
        if self._closed:
            raise SinkDown("the sink was closed", remedy="open it again")
        for made in results:
            arguments = (made,) if self._takes_made else (made.key, made.body, made.result)
            self._call(self._fn, *arguments)

    def known(self, keys: Sequence[str]) -> set[str]:
        ask = getattr(self._fn, "known", None)
        return set(self._call(ask, keys) or ()) & set(keys) if callable(ask) else set()

    def describe(self) -> dict[str, str]:
        return {"kind": "function", "place": self._name}

    def close(self) -> None:
        self._closed = True

    def _reads_made(self) -> bool:
        if inspect.iscoroutinefunction(self._fn):
            raise self._not_awaited()
        try:
            signature = inspect.signature(self._fn)
        except (TypeError, ValueError):  # a built-in that does not say
            return False
        for arguments in (("key", "body", "result"), ("made",)):
            try:
                signature.bind(*arguments)
            except TypeError:
                continue
            return len(arguments) == 1
        raise BadInput(
            f"the sink {self._name}{signature} can be called neither as f(key, body, result) nor as f(made)",
            remedy="write def sink(key, body, result): …",
        )

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            returned = call(*arguments)
        except BadInput:
            raise
        except Exception as e:
            raise SinkDown(
                f"the sink {self._name} raised {type(e).__name__}; nothing was acknowledged"
            ) from e
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise self._not_awaited()
        return returned

    def _not_awaited(self) -> BadInput:
        return BadInput(
            f"the sink {self._name} is asynchronous, and nobody would wait for it; nothing was stored",
            remedy="write def sink(key, body, result): asyncio.run(…)",
        )
