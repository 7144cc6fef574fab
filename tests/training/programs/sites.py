"""Statements around the loop, and expressions in whose middle the function that trains is called.

`AROUND`: `$LOOP` stands in a statement, which may use `$UPDATE` once more. `SITES`: `$CALL` stands in a statement that binds `parts`.
"""

from __future__ import annotations

from functools import partial

from tests.training.programs.pieces import CALLED_FROM_C, Piece, table_of


def _piece(name: str, text: str, **given: object) -> Piece:
    return Piece(name=name, text=text, **given)  # type: ignore[arg-type]


_from_c = partial(_piece, refusable=CALLED_FROM_C)

AROUND = table_of(
    (
        _piece("nothing", "$LOOP", weight=12.0),
        _piece(
            "with_a_file",
            "with open('run.txt', 'w') as run_log:\n    run_log.write('begun\\n')\n    $LOOP\n    run_log.write('over\\n')",
            weight=2.0,
        ),
        _piece(
            "own_context_manager",
            "with Running(parts):\n    $LOOP",
            top="""
class Running:
    def __init__(self, parts):
        self.parts = parts

    def __enter__(self):
        self.parts.append('in')

    def __exit__(self, kind, error, trace):
        self.parts.append(f'out {kind}')
""",
            weight=2.0,
        ),
        _piece(
            "context_manager_of_a_generator",
            "with counted(parts) as count:\n    $LOOP\n    parts.append(repr(count))",
            imports="contextlib",
            top="""
@contextlib.contextmanager
def counted(parts):
    count = len(parts)
    parts.append('in')
    try:
        yield count
    finally:
        parts.append(f'out {count}')
""",
            weight=2.0,
        ),
        _piece(
            "exit_stack",
            """
with contextlib.ExitStack() as around:
    around.callback(parts.append, 'left')
    around.enter_context(contextlib.suppress(ArithmeticError))
    $LOOP
""",
            imports="contextlib",
        ),
        _piece("try_finally", "try:\n    $LOOP\nfinally:\n    parts.append('finally')", weight=2.0),
        _piece(
            "try_except_else",
            """
try:
    $LOOP
except LookupError as lost:
    parts.append(repr(lost))
else:
    parts.append('none')
""",
        ),
        _piece(
            "exception_ends_it",
            """
try:
    $LOOP
    raise StopIteration(len(parts))
except StopIteration as told:
    parts.append(repr(told.value))
""",
        ),
        _piece(
            "in_an_except",
            """
try:
    raise OSError(5, 'before')
except OSError as before:
    $LOOP
    parts.append(repr(before.errno))
""",
        ),
        _piece("in_a_finally", "try:\n    parts.append('begun')\nfinally:\n    $LOOP"),
        _piece("if_and_else", "if len(parts) > 1000:\n    parts.append('no')\nelif not parts:\n    $LOOP"),
        _piece("once_in_a_for", "for turn in ['only']:\n    $LOOP\n    parts.append(turn)"),
        _piece("once_in_a_while", "while True:\n    $LOOP\n    break"),
        _piece(
            "match_case",
            "match len(parts):\n    case 0:\n        $LOOP\n    case _:\n        parts.append('no')",
        ),
        _piece(
            "deep_withs",
            """
with warnings.catch_warnings(), threading.Lock():
    with contextlib.nullcontext(3) as three, numpy.errstate(over='ignore'):
        $LOOP
    parts.append(repr(three))
""",
            imports="contextlib threading warnings numpy",
            refusable="it holds a lock from step to step",
        ),
        _piece("another_loop_before", "for early in range(4):\n    x = 0.1 * early\n    $UPDATE\n$LOOP"),
        _piece("another_loop_after", "$LOOP\nfor late in range(4):\n    x = 0.2 * late\n    $UPDATE"),
        _piece(
            "work_before_and_after",
            """
x = random.random()
for warm in range(3):
    x = x * 0.5 + warm
parts.append(repr(x))
$LOOP
parts.append(repr(random.random()))
""",
            imports="random",
            weight=2.0,
        ),
        _piece(
            "temporary_folder",
            """
with tempfile.TemporaryDirectory(dir='.') as folder:
    with open(folder + '/n.txt', 'w') as scratch:
        scratch.write('1')
    $LOOP
""",
            imports="tempfile",
        ),
        _piece(
            "local_decimal_context",
            """
with decimal.localcontext() as precise:
    precise.prec = 9
    $LOOP
    parts.append(repr(decimal.getcontext().prec))
""",
            imports="decimal",
            refusable="what such a context will put back cannot be seen",
        ),
    )
)

SITES = table_of(
    (
        _piece("assignment", "parts = $CALL", weight=8.0),
        _piece("main_guard", "if __name__ == '__main__':\n    parts = $CALL", weight=4.0),
        _piece("left_operand_waits", "parts = [str(2 * 3)] + $CALL + ['after']"),
        _piece("list_half_built", "parts = [*'ab', *$CALL, *map(str, range(2))]"),
        _piece("format_half_built", "parts = f\"{len('abc')}|{'|'.join($CALL)}|{2 + 3:>4}\".split('|')"),
        _piece(
            "arguments_half_evaluated",
            "parts = joined(str(1), $CALL, last=str(5))",
            top="def joined(first, *rest, last):\n    return [first, *rest[0], last]",
        ),
        _piece(
            "star_arguments",
            "parts = joined(*['a'], *$CALL, **{'k': 1})",
            top="def joined(*rest, **options):\n    return [*map(str, rest), *options]",
        ),
        _piece("dict_half_built", "parts = sum(({'a': ['x'], 'b': $CALL, 'c': ['y']}).values(), [])"),
        _piece("comparison_half_done", "fits = 0 < len(parts := $CALL) < 10**9\nparts.append(repr(fits))"),
        _piece("condition", "parts = got if (got := $CALL) else ['none']"),
        _piece("boolean_operators", "parts = None or (True and $CALL)"),
        _piece("item_assignment", "box[len('ab')] = $CALL\nparts = box[2]", setup="box = {}"),
        _piece(
            "augmented_attribute",
            "space.parts += $CALL\nparts = space.parts",
            setup="space = types.SimpleNamespace(parts=['first'])",
            imports="types",
        ),
        _piece(
            "header_of_a_with",
            "with contextlib.nullcontext($CALL) as got, contextlib.suppress(KeyError):\n    parts = got",
            imports="contextlib",
        ),
        _piece("header_of_a_for", "parts = []\nfor line in $CALL:\n    parts.append(line)"),
        _piece("inside_a_for", "parts = []\nfor name in ('one',):\n    parts += [name, *$CALL]", weight=2.0),
        _piece("inside_a_comprehension", "parts = [line for turn in [0] for line in $CALL]"),
        _piece("inside_a_generator_expression", "parts = next(found for found in ($CALL for turn in [0]))"),
        _piece("inside_a_lambda", "parts = (lambda: ['in'] + $CALL)()"),
        _piece(
            "inside_an_except",
            "try:\n    raise KeyError('first')\nexcept KeyError as reason:\n    parts = [str(reason), *$CALL]",
        ),
        _piece("inside_a_finally", "try:\n    parts = []\nfinally:\n    parts = $CALL"),
        _piece(
            "return_in_a_finally",
            """
def whole():
    log = []
    try:
        return log, $CALL
    finally:
        ended(log)

log, parts = whole()
parts += log
""",
            top="def ended(log):\n    log.append('ended')",
        ),
        _piece(
            "system_exit_is_caught",
            "try:\n    parts = $CALL\n    sys.exit(3)\nexcept SystemExit as leaving:\n    parts.append(repr(leaving.code))",
            imports="sys",
        ),
        _piece("unpacked", "first, *parts = $CALL\nparts.append(first)"),
        _from_c("through_map", "parts = list(map(lambda turn: $CALL, [0]))[0]"),
        _from_c(
            "through_a_sort_key",
            "got = []\nsorted([0], key=lambda turn: got.append($CALL) or 0)\nparts = got[0]",
        ),
        _from_c(
            "through_reduce",
            "parts = functools.reduce(lambda before, turn: before + $CALL, [0], ['start'])",
            imports="functools",
        ),
        _from_c("through_eval", 'parts = eval("""$CALL""")'),
        _from_c("through_exec", 'exec("""parts = $CALL""")'),
        _from_c(
            "through_an_operator",
            "parts = operator.add(Left(lambda: $CALL), ['right'])",
            imports="operator",
            top="""
class Left:
    def __init__(self, go):
        self.go = go

    def __add__(self, other):
        return self.go() + other
""",
        ),
        _piece("called_twice", "parts = $CALL\nparts = parts + $CALL"),
        _piece(
            "called_in_two_places",
            "if len('ab') == 2:\n    parts = $CALL\nelse:\n    parts = ['other', *$CALL]",
        ),
        _piece("asserted", "assert (parts := $CALL), 'nothing'"),
        _piece("global_in_main", "def main():\n    global parts\n    parts = $CALL\n\nmain()", weight=2.0),
        _piece(
            "main_with_arguments",
            """
def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument('--rate', type=float, default=0.1)
    args = parser.parse_args(arguments)
    return [repr(args), *$CALL]

if __name__ == '__main__':
    parts = main()
""",
            imports="argparse",
            weight=3.0,
        ),
    )
)
