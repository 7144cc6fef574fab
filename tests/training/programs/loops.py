"""The loop that trains.

A loop counts `step` from 0 to `$N` - 1 and sets `item`, a number of its own. `$BODY` is its body; one that `calls` has it as the function
`one(step)`.
"""

from __future__ import annotations

from functools import partial

from tests.training.programs.pieces import CALLED_FROM_C, LoopPiece, table_of


def _loop(name: str, text: str, **given: object) -> LoopPiece:
    return LoopPiece(name=name, text=text, **given)  # type: ignore[arg-type]


_from_c = partial(_loop, refusable=CALLED_FROM_C)

LOOPS = table_of(
    (
        _loop("range", "for step in range($N):\n    item = step % 7\n    $BODY", weight=6.0),
        _loop(
            "epochs",
            """
for epoch in range($E):
    for batch in range($B):
        step += 1
        item = epoch + batch
        $BODY
""",
            setup="step = -1",
            weight=4.0,
        ),
        _loop(
            "shuffled_epochs",
            """
for epoch in range($E):
    random.shuffle(order)
    for item in order:
        step += 1
        $BODY
""",
            setup="step, order = -1, list(range($B))",
            imports="random",
            weight=2.0,
        ),
        _loop(
            "three_levels",
            """
for phase in ("warm", "full"):
    for part in [($E, 1), (1, $B)]:
        for k in range(*sorted((0, part[0] + part[1] - 1))):
            if step + 1 >= $N:
                break
            step += 1
            item = len(phase) + k
            $BODY
while step + 1 < $N:
    step += 1
""",
            setup="step = -1",
        ),
        _loop(
            "epochs_left_early",
            """
for epoch in range(100):
    for batch in range($B):
        if step + 1 >= $N or (batch > 2 and (epoch + batch) % 4 == 1):
            break
        step += 1
        item = batch
        $BODY
    if step + 1 >= $N:
        break
""",
            setup="step = -1",
        ),
        _loop(
            "while",
            "while step < $N - 1:\n    step += 1\n    item = step % 3\n    $BODY",
            setup="step = -1",
            weight=2.0,
        ),
        _loop(
            "while_true",
            "while True:\n    step += 1\n    if step >= $N:\n        break\n    item = 1\n    $BODY",
            setup="step = -1",
        ),
        _loop(
            "while_walrus",
            "while (step := next(numbers, None)) is not None:\n    item = step % 5\n    $BODY",
            setup="numbers = iter(range($N))",
        ),
        _loop(
            "while_else",
            "while step < $N - 1:\n    step += 1\n    item = 2\n    $BODY\nelse:\n    parts.append('else')",
            setup="step = -1",
        ),
        _loop(
            "for_else",
            "for step in range($N):\n    item = step % 4\n    $BODY\nelse:\n    parts.append('else')",
        ),
        _loop(
            "enumerate_list",
            "for step, item in enumerate(data):\n    $BODY",
            setup="data = [n * n % 13 for n in range($N)]",
            weight=2.0,
        ),
        _loop(
            "zip_with_cycle",
            """
for step, item, sign in zip(range($N), itertools.cycle([3, 1, 2]), itertools.cycle((1, -1))):
    item *= sign
    $BODY
""",
            imports="itertools",
        ),
        _loop(
            "generator",
            "for step, item in stream($N):\n    $BODY",
            top="""
def stream(count):
    level = 1
    for n in range(count):
        level = level * 3 % 17
        yield n, level
""",
            weight=3.0,
        ),
        _loop(
            "generator_with_random_numbers",
            "for step, item in enumerate(stream()):\n    $BODY\n    if step == $N - 1:\n        break",
            top="""
def stream():
    while True:
        order = list(range(4))
        random.shuffle(order)
        yield from order
""",
            imports="random",
        ),
        _loop(
            "generator_that_reads_the_loop",
            "for item in stream(control):\n    step += 1\n    control['easy'] = step % 5 < 3\n    $BODY",
            setup="step, control = -1, {'easy': True, 'left': $N}",
            top="""
def stream(control):
    n = 0
    while control['left'] > 0:
        control['left'] -= 1
        n += 1 if control['easy'] else 5
        yield n % 9
""",
        ),
        _loop(
            "generator_expression",
            "for step, item in ((n, n * k % 11) for n, k in zip(range($N), itertools.count(2))):\n    $BODY",
            imports="itertools",
        ),
        _loop(
            "map_with_a_counter",
            "for step, item in enumerate(map(scaled, range($N))):\n    $BODY",
            setup="seen = []\nscaled = lambda n: seen.append(n) or n * 2 % 7 + len(seen) % 2",
            own_scope=True,
        ),
        _loop(
            "filter_and_islice",
            """
for step, item in enumerate(itertools.islice(filter(lambda n: n % 3, itertools.count(1)), $N)):
    $BODY
""",
            imports="itertools",
        ),
        _loop(
            "iterator_class",
            "for item in feed:\n    step += 1\n    $BODY",
            setup="step, feed = -1, Feed($N)",
            top="""
class Feed:
    def __init__(self, count):
        self.left, self.level = count, 2

    def __iter__(self):
        return self

    def __next__(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.level = self.level * 5 % 23
        return self.level
""",
            weight=2.0,
        ),
        _loop(
            "iterable_class_of_epochs",
            "for epoch in range($E):\n    for item in data:\n        step += 1\n        $BODY",
            setup="step, data = -1, Data($B)",
            top="""
class Data:
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def __iter__(self):
        self.epoch += 1
        for n in range(self.count):
            yield n * self.epoch % 7

    def __len__(self):
        return self.count
""",
            weight=2.0,
        ),
        _loop(
            "lines_of_a_file",
            """
for step, line in enumerate(lines):
    item = int(line) % 9
    $BODY
    if step == $N - 1:
        break
""",
            setup="lines = open('lines.txt')",
            end="lines.close()",
            files=(("lines.txt", "".join(f"{n * 7}\n" for n in range(60))),),
        ),
        _loop(
            "rows_of_a_csv",
            """
with open('table.csv', newline='') as table:
    for step, row in enumerate(csv.DictReader(table)):
        item = int(row['n'])
        $BODY
        if step == $N - 1:
            break
""",
            imports="csv",
            files=(("table.csv", "n,m\n" + "".join(f"{n * 5 % 8},{n}\n" for n in range(60))),),
        ),
        _loop(
            "items_of_a_dict",
            "for step, (name, item) in enumerate(table.items()):\n    table[name] = item + 1\n    $BODY",
            setup="table = {f'p{n}': n * 3 % 8 for n in range($N)}",
        ),
        _loop(
            "queue_that_refills",
            """
while waiting:
    step, item = waiting.popleft()
    if step + 2 < $N:
        waiting.append((step + 2, item * 3 % 10))
    $BODY
""",
            setup="waiting = collections.deque([(0, 1), (1, 2)])",
            imports="collections",
        ),
        _loop(
            "heap_of_jobs",
            """
while heap and step < $N - 1:
    item, number = heapq.heappop(heap)
    step += 1
    heapq.heappush(heap, (item + number % 4 + 1, number))
    item %= 6
    $BODY
""",
            setup="step, heap = -1, [(0, 1), (0, 2), (1, 3)]",
            imports="heapq",
        ),
        _loop(
            "groups_of_batches",
            """
for key, members in itertools.groupby(range($N), key=lambda n: n // 3):
    for step in members:
        item = key
        $BODY
""",
            imports="itertools",
        ),
        _loop(
            "rows_of_an_array",
            "for step, row in enumerate(rows):\n    row += 1\n    item = float(row.sum()) % 5\n    $BODY",
            setup="rows = numpy.arange($N * 2.0).reshape($N, 2)",
            imports="numpy",
        ),
        _loop(
            "reversed_range",
            "for back in reversed(range($N)):\n    step = $N - 1 - back\n    item = back % 6\n    $BODY",
        ),
        _loop(
            "permutations_and_products",
            """
for step, (a, b) in enumerate(itertools.product(range(6), itertools.permutations([1, 2, 3], 1))):
    item = a + b[0]
    $BODY
    if step == $N - 1:
        break
""",
            imports="itertools",
        ),
        _loop(
            "call_until_a_sentinel",
            "for item in iter(meter, 0):\n    step += 1\n    $BODY",
            setup="step, left = -1, [$N + 1]\nmeter = lambda: left.append(left.pop() - 1) or left[0]",
            own_scope=True,
        ),
        _loop(
            "text_and_bytes",
            """
for step, (letter, item) in enumerate(zip('abcdefghij' * 4, bytes(range(9)) * 5)):
    item += ord(letter) % 3
    $BODY
    if step == $N - 1:
        break
""",
        ),
        _loop(
            "targets_in_places",
            "for place['n'] in range($N):\n    step = place['n']\n    item = step % 5\n    $BODY",
            setup="place = {}",
        ),
        _loop(
            "starred_targets",
            "for step, *rest in [(n, n % 3, n % 4) for n in range($N)]:\n    item, *_ = rest\n    $BODY",
        ),
        _loop(
            "list_that_grows_while_it_is_read",
            """
for step in plan:
    if step + 1 < $N:
        plan.append(step + 1)
    item = len(plan) % 5
    $BODY
""",
            setup="plan = [0]",
        ),
        _loop("comprehension", "losses = [one(step) for step in range($N)]", calls=True),
        _from_c("map_to_a_list", "losses = list(map(one, range($N)))", calls=True),
        _from_c(
            "sum_of_a_generator",
            "total = sum(one(step) for step in range($N))\nparts.append(repr(total))",
            calls=True,
        ),
        _from_c(
            "reduce",
            """
total = functools.reduce(lambda sum, step: sum * 0.5 + one(step), range($N), 0.25)
parts.append(repr(total))
""",
            imports="functools",
            calls=True,
        ),
        _from_c("sort_key", "order = sorted(range($N), key=one)\nparts.append(repr(order))", calls=True),
        _from_c(
            "substitution_in_a_text",
            "text = re.sub('x', lambda found: f'{one(found.start()):.3f};', 'x' * $N)\nparts.append(text)",
            imports="re",
            calls=True,
        ),
        _loop(
            "dict_comprehension_with_a_condition",
            "table = {step: loss for step in range($N) if (loss := one(step)) > -99.0}\nparts.append(repr(table))",
            calls=True,
        ),
        _loop(
            "call_itself",
            "again(0)",
            setup="""
def again(step):
    loss = one(step)
    return loss + again(step + 1) if step + 1 < $N else loss
""",
            calls=True,
            own_scope=True,
        ),
        _loop("for_that_calls", "for step in range($N):\n    one(step)", calls=True, weight=3.0),
        _loop(
            "while_that_calls_in_its_test",
            "while one(step := step + 1) < 1e9 and step < $N - 1:\n    pass",
            setup="step = -1",
            calls=True,
        ),
        _loop(
            "calls_in_one_expression",
            """
for step in range(0, $N - 1, 2):
    both = (one(step), [one(step + 1)])
    parts.append(f'{both[0]:.4f} {both[1][0] - both[0]:.4f}')
""",
            calls=True,
        ),
    )
)
