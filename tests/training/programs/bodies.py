"""What the body of the loop does around the step: `$STEP` is what the features do, `$UPDATE` changes the weights, each stands in it once."""

from __future__ import annotations

from tests.training.programs.pieces import LoopPiece, table_of

BODIES = table_of(
    (
        LoopPiece(name="plain", text="$STEP\n$UPDATE", weight=8.0),
        LoopPiece(
            name="try_except",
            setup="failures = 0",
            text="""try:
    $STEP
    if step % 3 == 1:
        raise ValueError(f"step {step}")
except ValueError as problem:
    x = 0.5 * len(problem.args[0])
    failures += 1
finally:
    x += 0.05 * failures
$UPDATE""",
            weight=2.0,
        ),
        LoopPiece(
            name="bare_except",
            setup="failures = 0",
            text="""try:
    $STEP
    if step % 4 == 2:
        raise KeyError(step)
except:
    failures += 1
    x = 0.1 * failures
$UPDATE""",
        ),
        LoopPiece(
            name="step_in_an_except",
            text="""try:
    raise LookupError(step)
except LookupError as reason:
    $STEP
    x += 0.01 * reason.args[0]
    $UPDATE""",
        ),
        LoopPiece(
            name="step_in_a_finally",
            text="""try:
    x = 0.0
finally:
    $STEP
$UPDATE""",
        ),
        LoopPiece(
            name="own_context_manager",
            setup="scope = Scope()",
            top="""
class Scope:
    depth = entered = 0

    def __enter__(self):
        self.depth += 1
        self.entered += 1
        return self

    def __exit__(self, *error):
        self.depth -= 1
        return error[0] is ZeroDivisionError
""",
            text="""with scope as inside:
    $STEP
    x += 0.1 * inside.entered
    if step % 5 == 3:
        x /= 0
$UPDATE""",
            weight=2.0,
        ),
        LoopPiece(
            name="context_manager_of_a_generator",
            setup="spent = []",
            imports="contextlib",
            top="""
@contextlib.contextmanager
def timed(spent):
    began = len(spent)
    try:
        yield began
    finally:
        spent.append(began * 2 % 7)
""",
            text="""with timed(spent) as began, contextlib.suppress(KeyError):
    $STEP
    x += 0.01 * sum(spent) + 0.1 * (began % 3)
    if step % 4 == 1:
        raise KeyError
$UPDATE""",
        ),
        LoopPiece(
            name="exit_stack",
            setup="undone = []",
            imports="contextlib",
            text="""with contextlib.ExitStack() as stack:
    stack.callback(undone.append, step)
    $STEP
    x += 0.1 * len(undone)
$UPDATE""",
        ),
        LoopPiece(
            name="lock_around_the_step",
            setup="guard = threading.Lock()",
            imports="threading",
            text="with guard:\n    $STEP\n    $UPDATE",
        ),
        LoopPiece(
            name="continue_at_random",
            turns=True,
            setup="skipped = 0",
            imports="random",
            text="$STEP\nif random.random() < 0.2:\n    skipped += 1\n    continue\nx += 0.1 * skipped\n$UPDATE",
            weight=2.0,
        ),
        LoopPiece(
            name="match_statement",
            setup="told = []",
            text="""$STEP
match [step % 3, item]:
    case [0, first]:
        x += 0.1 * float(first)
    case [1, int() | float() as second] if len(told) < 5:
        told.append(second)
    case _:
        x -= 0.2 * len(told)
$UPDATE""",
        ),
        LoopPiece(
            name="retries",
            setup="tries = 0",
            text="""$STEP
for attempt in range(3):
    tries += 1
    if tries % 4 != 2:
        break
else:
    x += 9.0
x += 0.05 * attempt + 0.01 * tries
$UPDATE""",
        ),
        LoopPiece(
            name="history_and_early_best",
            setup="history, best = [], None",
            text="""$STEP
history.append(x)
if best is None or x > max(history[:-1], default=-1e9):
    best = {"x": x, "step": step}
x += 0.1 * best["step"] - 0.01 * len(history)
$UPDATE""",
            weight=2.0,
        ),
        LoopPiece(
            name="update_every_second_step",
            turns=True,
            setup="held = 0.0",
            text="$STEP\nheld += x\nif step % 2 == 0:\n    continue\nx, held = held, 0.0\n$UPDATE",
        ),
        LoopPiece(
            name="variables_made_and_deleted",
            setup="extra = []",
            text="""$STEP
if step % 4 == 0:
    extra = [x]
elif step % 4 == 3:
    x += extra[0]
    del extra
else:
    extra.append(step)
$UPDATE""",
        ),
        LoopPiece(
            name="conditional_chain",
            setup="mode = 'a'",
            text="""$STEP
mode = {"a": "b", "b": "c"}.get(mode, "a") if step % 2 else mode
x += 0.3 if mode == "a" else -0.4 if mode == "b" else 0.0
$UPDATE""",
        ),
        LoopPiece(
            name="lambdas_of_the_step",
            setup="rules = []",
            text="""$STEP
rules.append(lambda value, k=step: value * 0.5 + k % 3)
rules = rules[-3:]
for rule in rules:
    x = rule(x)
$UPDATE""",
            own_scope=True,
        ),
        LoopPiece(
            name="local_decimal_context",
            imports="decimal",
            text="""
with decimal.localcontext() as context:
    context.prec = 5 + step % 3
    $STEP
    x = float(decimal.Decimal(x) / 7)
$UPDATE
""",
        ),
        LoopPiece(
            name="nested_withs_and_return_values",
            top="""
class Nothing:
    def __enter__(self):
        return [1]

    def __exit__(self, *error):
        return None
""",
            text="""
with Nothing() as a, Nothing() as b:
    with Nothing() as (c,):
        $STEP
        x += 0.1 * (len(a) + b[0] + c)
    $UPDATE
""",
        ),
        LoopPiece(
            name="random_noise",
            imports="random numpy",
            text="$STEP\nx += random.gauss(0, 0.1) + float(numpy.random.rand()) * 0.1\n$UPDATE",
            weight=3.0,
        ),
        LoopPiece(
            name="printed_progress",
            setup="running = 0.0",
            text="""
$STEP
running = running * 0.9 + x * 0.1
if step % 3 == 0:
    print(f"step {step}: {running:.6f}")
x += 0.1 * running
$UPDATE
""",
            weight=2.0,
        ),
        LoopPiece(
            name="early_stopping",
            turns=True,
            setup="lowest, patience = 99.0, 3",
            text="""
$STEP
$UPDATE
if x < lowest:
    lowest, patience = x, 3
else:
    patience -= 1
if patience == 0 and step > 7:
    parts.append(f"stopped at {step}")
    break
""",
            weight=2.0,
        ),
        LoopPiece(
            name="callbacks",
            setup="callbacks = [Recorder(), Stopper()]",
            top="""
class Callback:
    calls = 0

    def after(self, step, x):
        self.calls += 1
        return x

class Recorder(Callback):
    def __init__(self):
        self.seen = []

    def after(self, step, x):
        self.seen.append(round(x, 3))
        return super().after(step, x) + 0.1 * len(set(self.seen))

class Stopper(Callback):
    best = -1e9

    def after(self, step, x):
        self.best = max(self.best, x)
        return super().after(step, x) - 0.1 * self.best
""",
            text="$STEP\nfor callback in callbacks:\n    x = callback.after(step, x)\n$UPDATE",
        ),
    )
)
