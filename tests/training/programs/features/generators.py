"""Generators, coroutines and context managers that wait in the middle of their code from step to step."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

generator = partial(feature, __name__)

generator(
    "generator_send",
    top="""
def my_stream(start):
    total = start
    while True:
        got = yield total % «7..11»
        total += got * 3 + 1
""",
    setup="my_stream_now = my_stream(«1..5»)\nnext(my_stream_now)",
    step="my_v = my_stream_now.send(step % 4 + 1)",
)
generator(
    "iterable_dataset",
    top="""
class MyDataset:
    def __init__(self, seed):
        self.seed, self.epoch = seed, 0

    def __iter__(self):
        self.epoch += 1
        value = self.seed + self.epoch
        for _ in range(5):
            value = value * 31 % 97
            yield value
""",
    setup="my_data = MyDataset(«2..9»)\nmy_it = iter(my_data)",
    step="""
my_v = next(my_it, None)
if my_v is None:
    my_it = iter(my_data)
    my_v = next(my_it) + my_data.epoch
""",
)
generator(
    "generator_in_an_object",
    top="""
class MyLoader:
    def __init__(self):
        self.it = self.make()

    def make(self):
        n = «1..5»
        while True:
            n = n * 5 % 89
            yield n

    def batch(self):
        return next(self.it)
""",
    setup="my_loader = MyLoader()",
    step="my_v = my_loader.batch() % 11",
)
generator(
    "generator_with_finally",
    top="""
def my_reads(log):
    n = 0
    try:
        while True:
            try:
                n += 2
                yield n % 7
            finally:
                log.append(n)
    finally:
        log.append("closed")
""",
    setup="my_log = []\nmy_it = my_reads(my_log)",
    step="my_v = next(my_it) + 0.1 * len(my_log)",
    end="my_it.close()",
    finish="my_log[-2:]",
)
generator(
    "yield_from",
    top="""
def my_inner(n):
    total = 0
    for k in range(n):
        total += k + n
        yield total
    return total

def my_outer():
    n, last = 2, 0
    while True:
        last = yield from my_inner(n)
        n = 2 + last % 4
""",
    setup="my_it = my_outer()",
    step="my_v = next(my_it) % 13",
)
generator(
    "generator_expression_over_a_generator",
    top="""
def my_squares():
    n = 0
    while True:
        n += 1
        yield n * n
""",
    setup="my_odd = (n for n in (m % 31 for m in my_squares()) if n % 2)",
    step="my_v = next(my_odd)",
)
generator(
    "generator_throw",
    top="""
def my_patient():
    faults = 0
    n = 0
    while True:
        try:
            n += 1
            yield n % 5 + faults
        except KeyError as told:
            faults += told.args[0]
""",
    setup="my_it = my_patient()\nnext(my_it)",
    step="my_v = my_it.throw(KeyError(2)) if step % 4 == 1 else next(my_it)",
)
generator(
    "async_generator_by_hand",
    top="""
async def my_source():
    n = 1
    while True:
        n = n * 3 % 41
        yield n

def my_pull(source):
    try:
        source.__anext__().send(None)
    except StopIteration as got:
        return got.value
""",
    setup="my_feed = my_source()",
    step="my_v = my_pull(my_feed) % 9",
)
generator(
    "coroutine_by_hand",
    top="""
class MyPause:
    def __await__(self):
        return (yield "more")

async def my_work(log):
    total = 0
    while True:
        total += await MyPause()
        log[0] = total
""",
    setup="my_total = [0]\nmy_work_now = my_work(my_total)\nmy_work_now.send(None)",
    step="my_work_now.send(step % 3 + 1)\nmy_v = my_total[0] % 11",
    end="my_work_now.close()",
)
generator(
    "recursive_generator",
    top="""
def my_walk(tree):
    for branch in tree:
        if isinstance(branch, list):
            yield from my_walk(branch)
        else:
            yield branch
""",
    setup="my_leaves = my_walk([[n, [n + 1, [n * 2 % 9]]] for n in range(20)])",
    step="my_v = next(my_leaves)",
)
generator(
    "context_manager_left_open",
    imports="contextlib",
    top="""
@contextlib.contextmanager
def my_budget(log):
    log.append("in")
    spent = 0
    try:
        yield lambda n: log.append(n) or len(log)
    finally:
        log.append("out")
""",
    setup="my_log = []\nmy_manager = my_budget(my_log)\nmy_spend = my_manager.__enter__()",
    step="my_v = my_spend(step % 5) % 7",
    end="my_manager.__exit__(None, None, None)",
    finish="my_log",
)
generator(
    "generator_replaced_midway",
    top="""
def my_phase(number):
    n = number
    while True:
        n = (n * 7 + number) % 43
        yield n
""",
    setup="my_number, my_it = 1, my_phase(1)",
    step="""
if step % 5 == 4:
    my_it.close()
    my_number += 1
    my_it = my_phase(my_number)
my_v = next(my_it) % 8
""",
)
generator(
    "generators_in_a_list",
    top="""
def my_arm(k):
    n = k
    while True:
        n = n * (k + 2) % 37
        yield n + k
""",
    setup="my_arms = [my_arm(k) for k in range(1, 4)]",
    step="my_v = next(my_arms[step * step % 3]) % 9",
)
generator(
    "generator_that_holds_itself",
    top="""
class MyNode:
    def __init__(self):
        self.values = self.run()
        self.seen = 0

    def run(self):
        while True:
            self.seen += 2
            yield self.seen % 9 + (self.values is not None)
""",
    setup="my_node = MyNode()",
    step="my_v = next(my_node.values)",
)
generator(
    "generator_local_dict_and_array",
    imports="numpy",
    top="""
def my_moving():
    table, average = {}, numpy.zeros(3)
    n = 0
    while True:
        n += 1
        table[n % 4] = table.get(n % 4, 0) + n
        average = 0.9 * average + numpy.arange(3.0) * n
        yield float(average.sum()) % 5 + table[n % 4] % 3
""",
    setup="my_it = my_moving()",
    step="my_v = next(my_it)",
)
generator(
    "generator_in_a_with_block",
    top="""
class MyScope:
    depth = 0

    def __enter__(self):
        self.depth += 1
        return self

    def __exit__(self, *error):
        self.depth -= 1

def my_scoped():
    scope = MyScope()
    while True:
        with scope:
            for k in range(3):
                scope.depth += k
                yield scope.depth
""",
    setup="my_it = my_scoped()",
    step="my_v = next(my_it) % 12",
)
generator(
    "generator_that_handles_an_exception",
    imports="sys",
    top="""
def my_after():
    n = 0
    while True:
        try:
            raise LookupError(n)
        except LookupError as error:
            n += 1 + len(error.args)
            yield n % 6
            n += sys.exc_info()[1].args[0] % 2
""",
    setup="my_it = my_after()",
    step="my_v = next(my_it)",
)
generator(
    "random_batches_from_a_generator",
    imports="random",
    top="""
def my_batches(seed):
    own = random.Random(seed)
    order = list(range(8))
    while True:
        own.shuffle(order)
        for at in range(0, 8, 2):
            yield order[at : at + 2]
""",
    setup="my_feed = my_batches(«1..99»)",
    step="my_pair = next(my_feed)\nmy_v = my_pair[0] - 0.5 * my_pair[1]",
)
generator(
    "prefetching_queue_of_a_generator",
    imports="collections",
    top="""
def my_produce():
    n = 3
    while True:
        n = n * 11 % 59
        yield n
""",
    setup="my_source = my_produce()\nmy_ready = collections.deque(next(my_source) for _ in range(3))",
    step="my_ready.append(next(my_source))\nmy_v = my_ready.popleft() % 7",
)
