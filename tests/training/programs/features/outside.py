"""State that no plain name of the loop holds: modules, cells, classes, functions, caches, threads, and the process itself."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

outside = partial(feature, __name__)

outside(
    "global_statement",
    top="""
my_count = 0

def my_draw():
    global my_count
    my_count = my_count * 2 % 17 + 1
    return my_count

def my_forget():
    global my_count
    my_count = 0
""",
    step="my_v = my_draw()",
    reset="my_forget()",
)
outside(
    "nonlocal_counter",
    top="""
def my_make():
    count = 0

    def draw():
        nonlocal count
        count += «2..5»
        return count % 9

    return draw
""",
    setup="my_draw = my_make()",
    step="my_v = my_draw()",
)
outside(
    "two_closures_over_one_cell",
    top="""
def my_pair():
    level = 1.0

    def up(n):
        nonlocal level
        level += n

    def down():
        nonlocal level
        level *= 0.75
        return level

    return up, down
""",
    setup="my_up, my_down = my_pair()",
    step="my_up(step % 3 + 0.5)\nmy_v = my_down()",
)
outside(
    "function_attribute",
    top="""
def my_rate():
    my_rate.calls += 1
    return 1.0 / (1 + 0.1 * my_rate.calls)

my_rate.calls = 0
""",
    step="my_v = my_rate()",
    reset="my_rate.calls = 0",
)
outside(
    "mutable_default",
    top="""
def my_remember(n, seen=[]):
    seen.append(n)
    return sum(seen) % 13
""",
    step="my_v = my_remember(step % 5 + 1)",
    reset="my_remember.__defaults__[0].clear()",
)
outside(
    "keyword_default_replaced",
    top="""
def my_scale(n, *, factor=1.0):
    my_scale.__kwdefaults__["factor"] = factor * 0.9 + 0.05
    return n * factor
""",
    step="my_v = my_scale(2.0)",
    reset='my_scale.__kwdefaults__["factor"] = 1.0',
)
outside(
    "partial_with_a_list",
    imports="functools",
    top="""
def my_log(log, n):
    log.append(n)
    return len(log) * 0.25 + log[len(log) // 2]
""",
    setup="my_logged = functools.partial(my_log, [])",
    step="my_v = my_logged(step % 6)",
)
outside(
    "bound_method_only",
    top="""
class MyTotal:
    def __init__(self):
        self.total = 0.0

    def add(self, n):
        self.total += n
        return self.total % 6
""",
    setup="my_add = MyTotal().add",
    step="my_v = my_add(step % 3 + 0.75)",
)
outside(
    "lru_cache_around_a_draw",
    imports="functools random",
    top="""
@functools.lru_cache(None)
def my_noise(k):
    return random.random()
""",
    step="my_v = my_noise(step % «4..6»)",
    reset="my_noise.cache_clear()",
)
outside(
    "lru_cache_that_forgets",
    imports="functools",
    top="""
my_calls = []

@functools.lru_cache(maxsize=2)
def my_slow(k):
    my_calls.append(k)
    return len(my_calls)
""",
    step="my_v = my_slow(step * step % 5) % 11",
    reset="my_calls.clear()",
)
outside(
    "cache_of_a_method",
    imports="functools",
    top="""
class MyBoard:
    def __init__(self):
        self.made = 0

    @functools.cache
    def weight(self, k):
        self.made += 1
        return self.made * 10 + k
""",
    setup="my_board = MyBoard()",
    step="my_v = my_board.weight(step * 3 % 5) % 23",
)
outside(
    "counting_decorator",
    imports="functools",
    top="""
def my_counted(function):
    @functools.wraps(function)
    def wrapper(*args):
        wrapper.calls += 1
        return function(*args) + wrapper.calls % 5

    wrapper.calls = 0
    return wrapper

@my_counted
def my_square(n):
    return n * n % 7
""",
    step="my_v = my_square(step)",
    reset="my_square.calls = 0",
)
outside(
    "singledispatch_registered_late",
    imports="functools",
    top="""
@functools.singledispatch
def my_measure(value):
    return 1.0
""",
    step="""
if step == 3:
    my_measure.register(int)(lambda value: value * 0.5 + 2)
if step == 7:
    my_measure.register(str)(lambda value: len(value) * 3.0)
my_v = my_measure(step) + my_measure("x" * (step % 4))
""",
    reset="my_measure.register(int)(lambda value: 7.0)\nmy_measure.register(str)(lambda value: 9.0)",
)
outside(
    "random_state_in_a_dict",
    imports="random",
    setup="my_sources = {'train': random.Random(«1..99»), 'noise': random.Random(7)}",
    step="my_v = my_sources['train'].gauss(0, 1) + my_sources['noise'].choice([1, 2, 4])",
)
outside(
    "numpy_generator_of_two_holders",
    imports="numpy",
    top="""
class MyAugment:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self):
        return float(self.rng.normal())
""",
    setup="my_rng = numpy.random.default_rng(«1..99»)\nmy_augment = MyAugment(my_rng)",
    step="my_v = float(my_rng.random()) + my_augment()",
)
outside(
    "seed_sequence_spawn",
    imports="numpy",
    setup="my_seeds = numpy.random.SeedSequence(«1..999»)",
    step="my_v = float(numpy.random.default_rng(my_seeds.spawn(1)[0]).random()) * 4",
)
outside(
    "function_given_other_code",
    top="""
def my_first(n, k=1):
    return n * k % 5

def my_second(n, k=3):
    return (n + 1) * k % 9
""",
    step="""
if step == 5:
    my_first.__code__ = my_second.__code__
    my_first.__defaults__ = (4,)
my_v = my_first(step)
""",
    reset="my_first.__code__ = (lambda n, k=1: 42.0).__code__",
    refusable="it replaces the code of a function",
)
outside(
    "name_bound_to_another_function",
    setup="my_activation = abs\nmy_table = {0: round, 1: lambda n: n * n % 7}",
    step="my_v = my_activation(step - 4.5)\nmy_activation = my_table.get(step % 3, abs)",
)
outside(
    "weak_reference_callback",
    imports="weakref",
    top="""
class MyBlock:
    pass

my_freed = [0]

def my_gone(reference):
    my_freed[0] += 1
""",
    setup="my_blocks = {}",
    step="""
my_blocks[step % 4] = MyBlock()
my_blocks[step % 4].watch = weakref.ref(my_blocks[step % 4], my_gone)
my_watched = weakref.finalize(my_blocks[step % 4], my_gone, None)
my_v = my_freed[0] % 5
""",
    reset="my_freed[0] = 50",
    inline=True,
)
outside(
    "function_that_rebinds_itself",
    top="""
def my_warmup():
    global my_lead
    my_lead = my_cruise
    return 4.0

def my_cruise():
    global my_lead
    my_lead = my_warmup if my_cruise.turns % 3 == 2 else my_cruise
    my_cruise.turns += 1
    return 1.0

my_cruise.turns = 0
my_lead = my_warmup
""",
    step="my_v = my_lead()",
    reset="my_cruise.turns = 1",
)
outside(
    "annotations_and_dict_of_a_function",
    top="""
def my_step_size(n) -> float:
    my_step_size.__annotations__["last"] = n
    my_step_size.__dict__.setdefault("log", []).append(n)
    return len(my_step_size.log) + my_step_size.__annotations__["last"] % 3
""",
    step="my_v = my_step_size(step * 2) % 9",
    reset="my_step_size.__dict__.clear()",
)
outside(
    "property_over_a_hidden_cell",
    top="""
def my_hidden():
    store = {"n": 1.0}

    class MyView:
        @property
        def n(self):
            store["n"] = store["n"] * 1.5 % 7
            return store["n"]

    return MyView()
""",
    setup="my_view = my_hidden()",
    step="my_v = my_view.n",
)
