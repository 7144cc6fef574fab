"""The function, class or module that the loop stands in.

Rules of this file:
- `$WHOLE` is the state, the loop and what follows it, and returns `parts`; where it cannot return, `$SETUP`, `$LOOP` and `$FINISH` stand
  for themselves.
- `call` runs it and gives the list of texts in which it ends.
"""

from __future__ import annotations

from functools import partial

from tests.training.programs.pieces import CALLED_FROM_C, Frame, filled, table_of

_WHOLE = "$SETUP\n$LOOP\n$FINISH\nreturn parts"
_FUNCTION = "def train():\n    $WHOLE"


def _frame(name: str, text: str, call: str = "train()", **given: object) -> Frame:
    return Frame(name=name, text=filled(text, WHOLE=_WHOLE), call=call, **given)  # type: ignore[arg-type]


_from_c = partial(_frame, refusable=CALLED_FROM_C)
_coroutine = partial(_frame, imports="asyncio", refusable="it runs in an event loop")

FRAMES = table_of(
    (
        _frame("module", "$SETUP\n$LOOP\n$FINISH", "", scope="module", weight=5.0),
        _frame("function", _FUNCTION, weight=5.0),
        _frame(
            "function_with_arguments",
            "def train(rate, /, *extra, size=3, **options):\n    $WHOLE",
            "train(0.5, *[1, 2], size=4, **{'deep': True})",
        ),
        _frame(
            "function_of_a_function",
            """
def train():
    def inner():
        $WHOLE

    lead = ['lead']
    return lead + inner()
""",
            weight=2.0,
        ),
        _frame(
            "three_functions_deep",
            """
def train():
    $WHOLE

def run(n):
    got = train()
    return [str(n), *got]

def job(*names):
    table = {name: run(len(name)) for name in names}
    return table[names[0]]
""",
            "job('ab')",
        ),
        _frame(
            "method",
            """
class Trainer:
    def __init__(self):
        self.runs = 0

    def fit(self):
        self.runs += 1
        $WHOLE
""",
            "Trainer().fit()",
            weight=4.0,
        ),
        _frame(
            "method_of_a_parent",
            """
class Base:
    def fit(self):
        $WHOLE

class Own(Base):
    def fit(self):
        return ['own', *super().fit()]
""",
            "Own().fit()",
        ),
        _frame(
            "class_and_static_methods",
            """
class Trainer:
    @staticmethod
    def fit():
        $WHOLE

    @classmethod
    def run(cls):
        return cls.fit()
""",
            "Trainer.run()",
        ),
        _frame(
            "callable_object",
            "class Trainer:\n    def __call__(self, times):\n        $WHOLE",
            "Trainer()(1)",
        ),
        _frame(
            "init_of_a_class",
            """
class Trained:
    def __init__(self):
        $SETUP
        $LOOP
        $FINISH
        self.parts = parts
""",
            "Trained().parts",
        ),
        _from_c(
            "property",
            "class Trainer:\n    @property\n    def parts(self):\n        $WHOLE",
            "Trainer().parts",
        ),
        _from_c(
            "missing_key",
            "class Lazy(dict):\n    def __missing__(self, key):\n        $WHOLE",
            "Lazy()['parts']",
        ),
        _from_c(
            "missing_attribute",
            """
class Lazy:
    def __getattr__(self, name):
        if name != 'parts':
            raise AttributeError(name)
        $WHOLE
""",
            "Lazy().parts",
        ),
        _frame(
            "closure",
            """
def make(seed):
    made = [seed]

    def train():
        made.append(len(made))
        $WHOLE

    return train
""",
            "make(5)()",
        ),
        _frame("lambda", _FUNCTION, "(lambda go, *rest: go())(train, 1)"),
        _frame(
            "recursion",
            """
def train(depth=3):
    if depth:
        deeper = train(depth - 1)
        return [str(depth), *deeper]
    $WHOLE
""",
        ),
        _frame(
            "decorated",
            """
def noted(function):
    @functools.wraps(function)
    def wrapper(*args, **options):
        wrapper.calls += 1
        result = function(*args, **options)
        return [*result, str(wrapper.calls)]

    wrapper.calls = 0
    return wrapper

@noted
@noted
def train():
    $WHOLE
""",
            imports="functools",
            weight=2.0,
        ),
        _frame(
            "decorated_by_a_context_manager",
            """
opened = []

@contextlib.contextmanager
def session():
    opened.append('open')
    yield
    opened.append('closed')

@session()
def train():
    $WHOLE
""",
            imports="contextlib",
        ),
        _frame(
            "partial",
            "def train(rate, *, size):\n    $WHOLE",
            "functools.partial(train, 0.5, size=3)()",
            imports="functools",
        ),
        _from_c("cached_function", f"@functools.cache\n{_FUNCTION}", imports="functools"),
        _from_c("context_run", _FUNCTION, "contextvars.copy_context().run(train)", imports="contextvars"),
        _frame(
            "generator_of_the_end",
            "def training():\n    $SETUP\n    $LOOP\n    $FINISH\n    yield from parts",
            "list(training())",
        ),
        _frame(
            "generator_of_each_step",
            "def training():\n    $SETUP\n    $LOOP\n    $FINISH\n    yield parts",
            "[seen for seen in training()][-1]",
            after_each="yield x",
            weight=2.0,
        ),
        _frame(
            "generator_of_a_generator",
            """
def training():
    $WHOLE

def outer():
    got = yield from training()
    yield got
""",
            "list(outer())[-1]",
            after_each="yield step",
        ),
        _coroutine("coroutine", "async def train():\n    $WHOLE", "asyncio.run(train())"),
        _coroutine(
            "coroutine_that_awaits",
            "async def train():\n    $WHOLE",
            "asyncio.run(train())",
            after_each="await asyncio.sleep(0)",
        ),
        _frame(
            "thread",
            """
def train(told):
    $SETUP
    $LOOP
    $FINISH
    told.extend(parts)

def in_a_thread():
    told = []
    thread = threading.Thread(target=train, args=(told,))
    thread.start()
    thread.join()
    return told
""",
            "in_a_thread()",
            imports="threading",
            refusable="it trains in a thread",
        ),
        _frame("imported_module", _FUNCTION, "part_train.train()", file="part_train", weight=2.0),
        _frame(
            "method_in_an_imported_module",
            "class Trainer:\n    def fit(self):\n        $WHOLE",
            "part_fit.Trainer().fit()",
            file="part_fit",
        ),
        _from_c(
            "while_a_module_is_imported",
            "$SETUP\n$LOOP\n$FINISH",
            "__import__('part_trained').parts",
            file="part_trained",
            scope="module",
        ),
        _from_c(
            "body_of_a_class",
            "class Training:\n    $SETUP\n    $LOOP\n    $FINISH",
            "Training.parts",
            scope="class",
        ),
        _frame(
            "command_of_click",
            """
@click.command()
@click.option('--rate', default=0.5)
def command(rate):
    $WHOLE
""",
            "command([], standalone_mode=False)",
            imports="click",
            needs="click",
        ),
        _from_c(
            "subclass_is_made",
            """
class Plugin:
    def __init_subclass__(cls):
        $SETUP
        $LOOP
        $FINISH
        cls.parts = parts
""",
            "type('Own', (Plugin,), {}).parts",
        ),
        _from_c(
            "entering_a_context",
            """
class Session:
    def __enter__(self):
        $WHOLE

    def __exit__(self, *error):
        return None

def entered():
    with Session() as parts:
        return parts
""",
            "entered()",
        ),
    )
)
