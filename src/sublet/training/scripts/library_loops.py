"""Where a training loop is a library's: what of it is a step, and what is said where there is none.

Rules of this file:
- A library is told of when it is imported; nothing is imported for its own sake.
- A step is a step of an optimizer: of torch, of fastai, or of Keras where it runs on torch.
- A graph cannot be saved. Where a function still has one to go backward through (an actor's, while its critic
  steps), the step goes on to the next step of an optimizer.
- Boosted trees grow in C++, in memory that gives nobody all of its state (random numbers, the scores that the
  next tree is made from). They are not saved, and whoever begins to train them is told so at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from sublet.training.program_state.cpython.frame_memory import variables
from sublet.training.scripts.importing import WhenImported

KERAS = "keras.src.optimizers.base_optimizer"
FASTAI = "fastai.optimizer"
#: Libraries that boost, and where the function is that trains.
BOOSTING = {"xgboost.training": "XGBoost", "lightgbm.engine": "LightGBM", "catboost.core": "CatBoost"}


def watch_libraries(imports: WhenImported, running: Any) -> None:
    """`running` is the script, which is told of steps."""
    imports.do("torch.optim.optimizer", partial(_watch_torch, running))
    imports.do("torch.autograd.graph", partial(_watch_saved_tensors, running))
    imports.do(KERAS, partial(_watch_keras, running))
    imports.do(FASTAI, partial(_watch_fastai, running))
    for module, name in BOOSTING.items():
        imports.do(module, partial(_watch_boosting, module, name, running))


def _watch_torch(running: Any) -> None:
    optimizer = sys.modules["torch.optim.optimizer"]
    optimizer.register_optimizer_step_pre_hook(running.before_optimizer)
    optimizer.register_optimizer_step_post_hook(running.after_optimizer)


class GraphsThatWait:
    """Whether the functions that are running have graphs of torch to go backward through."""

    def __init__(self) -> None:
        #: A program that always has one goes backward through none of them, or keeps it for long: it is not
        #: waited for any more. Nor is one that says itself what is kept for going backward (checkpoints):
        #: to look whether it is there would make it.
        self.are_waited_for = True
        self._in_a_row = 0

    def are_there(self, frame: FrameType | None) -> bool:
        if not self.are_waited_for or "torch" not in sys.modules:
            return False
        found = any(_waits(value) for at in _frames(frame) for _, value in variables(at))
        self._in_a_row = self._in_a_row + 1 if found else 0
        if self._in_a_row > _MOST_IN_A_ROW:
            self.are_waited_for = found = False
        return found

    def are_not_looked_at(self) -> None:
        self.are_waited_for = False


_MOST_IN_A_ROW = 32
_MOST_NODES, _MOST_MEMBERS = 100, 64
_saved_names: dict[type, tuple[str, ...]] = {}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(_waits_itself(member) for member in value[:_MOST_MEMBERS])
    if isinstance(value, dict):
        return any(_waits_itself(member) for member in list(dict.values(value))[:_MOST_MEMBERS])
    return _waits_itself(value)


def _waits_itself(value: Any) -> bool:
    """What a node saved is let go when somebody goes backward through it."""
    if not issubclass(type(value), sys.modules["torch"].Tensor) or value.grad_fn is None:
        return False
    nodes, met = [value.grad_fn], 0
    while nodes and met < _MOST_NODES:
        node, met = nodes.pop(), met + 1
        saved = _saved_by(node)
        if saved is not None:
            if saved:
                return True
        else:
            nodes += [before for before, _ in node.next_functions if before is not None]
    return False


def _saved_by(node: Any) -> bool | None:
    """Whether it still has what it saved. None if it saves nothing, or nothing was there to be saved."""
    names = _saved_names.get(type(node))
    if names is None:
        raw = [name for name in dir(node) if name.startswith("_raw_saved_")]
        own = ["saved_tensors"] if hasattr(type(node), "saved_tensors") else []
        names = _saved_names[type(node)] = (*(name.replace("_raw", "", 1) for name in raw), *own)
    found = None
    for name in names:
        try:
            kept = getattr(node, name)
        except RuntimeError:  # torch's way to say that it is gone
            return False
        if kept is not None and (not isinstance(kept, tuple) or kept):
            found = True
    return found


def _watch_saved_tensors(running: Any) -> None:
    hooks: Any = vars(sys.modules["torch.autograd.graph"])["saved_tensors_hooks"]
    plain = hooks.__enter__

    @functools.wraps(plain)
    def enter(self: Any) -> Any:
        running.graphs.are_not_looked_at()
        return plain(self)

    hooks.__enter__ = enter


def _watch_keras(running: Any) -> None:
    """Keras steps in a function of its own, which an optimizer that scales the loss calls for another one."""
    optimizer: Any = vars(sys.modules[KERAS])["BaseOptimizer"]
    plain = optimizer.apply

    @functools.wraps(plain)
    def apply(self: Any, *args: Any, **keywords: Any) -> Any:
        if type(self).__name__ == "LossScaleOptimizer" or not _keras_is_on_torch():
            return plain(self, *args, **keywords)
        running.before_optimizer()
        found = plain(self, *args, **keywords)
        running.after_optimizer()
        return found

    optimizer.apply = apply


def _watch_fastai(running: Any) -> None:
    """Its optimizers are its own, but for those of torch that it wraps."""
    optimizer: Any = vars(sys.modules[FASTAI])["Optimizer"]
    plain = optimizer.step

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **keywords: Any) -> Any:
        running.before_optimizer()
        found = plain(self, *args, **keywords)
        running.after_optimizer()
        return found

    optimizer.step = step


def _keras_is_on_torch() -> bool:
    backend: Callable[[], str] = vars(sys.modules["keras.src.backend.config"])["backend"]
    return backend() == "torch"


def _watch_boosting(module: str, name: str, running: Any) -> None:
    there = vars(sys.modules[module])
    plain = there["train"]

    @functools.wraps(plain)
    def train(*args: Any, **keywords: Any) -> Any:
        running.cannot_save(f"{name} keeps its trees and its random numbers where they cannot be saved")
        return plain(*args, **keywords)

    there["train"] = train
