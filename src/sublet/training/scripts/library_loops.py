"""Where a training loop is a library's: what of it is a step, and what is said where there is none.

Rules of this file:
- A library is told of when it is imported; nothing is imported for its own sake.
- A step is a step of an optimizer: of torch, or of Keras where it runs on torch.
- Boosted trees grow in C++, in memory that gives nobody all of its state (random numbers, the scores that the
  next tree is made from). They are not saved, and whoever begins to train them is told so at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from sublet.training.scripts.importing import WhenImported

KERAS = "keras.src.optimizers.base_optimizer"
#: Libraries that boost, and where the function is that trains.
BOOSTING = {"xgboost.training": "XGBoost", "lightgbm.engine": "LightGBM", "catboost.core": "CatBoost"}


def watch_libraries(imports: WhenImported, running: Any) -> None:
    """`running` is the script, which is told of steps."""
    imports.do("torch.optim.optimizer", partial(_watch_torch, running))
    imports.do(KERAS, partial(_watch_keras, running))
    for module, name in BOOSTING.items():
        imports.do(module, partial(_watch_boosting, module, name, running))


def _watch_torch(running: Any) -> None:
    optimizer = sys.modules["torch.optim.optimizer"]
    optimizer.register_optimizer_step_pre_hook(running.before_optimizer)
    optimizer.register_optimizer_step_post_hook(running.after_optimizer)


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
