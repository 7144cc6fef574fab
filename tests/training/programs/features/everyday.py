"""What training scripts do beside training: errors that are kept and shown, things that are watched until they are gone, parsers and
sorters that are in the middle of their work, schedules and averages of torch."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

everyday = partial(feature, __name__)
of_torch = partial(feature, __name__, weights="torch", imports="copy")

# --- errors --------------------------------------------------------------------------------------------------

_FAILING = """
def my_fail(n):
    inside = [n, n * 2]
    try:
        return {}[n]
    except KeyError as missing:
        raise ValueError(inside) from missing
"""
everyday(
    "errors_kept_and_shown_later",
    imports="traceback",
    top=_FAILING,
    setup="my_errors = []",
    step="""
try:
    my_fail(step)
except ValueError as my_caught:
    my_errors = [*my_errors[-2:], my_caught]
my_shown = "".join(traceback.format_exception(my_errors[0]))
my_v = my_shown.count("line ") + my_shown.count("my_fail") * 0.1 + my_errors[0].args[0][1] * 0.1
""",
)
everyday(
    "error_group_with_notes",
    top=_FAILING
    + """
def my_several(n):
    found = []
    for k in range(1 + n % 3):
        try:
            my_fail(n + k)
        except ValueError as error:
            error.add_note(f"at {n}")
            found.append(error)
    return ExceptionGroup("several", found)
""",
    setup="my_group = None",
    step="""
if step % 4 == 1 or my_group is None:
    my_group = my_several(step)
my_found = my_group.subgroup(lambda error: isinstance(error, ValueError) and error.args[0][0] % 2 == 0)
my_v = len(my_group.exceptions) + len(my_group.exceptions[0].__notes__[0]) + (0 if my_found is None else 0.5)
my_v += (my_group.exceptions[0].__traceback__ is not None) + my_group.exceptions[0].__cause__.args[0] * 0.1
""",
)
everyday(
    "caller_in_a_log",
    imports="logging",
    top="""
class MyHandler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.funcName, record.lineno, record.levelno))

def my_tell(logger, n):
    logger.warning("at %d", n, stacklevel=2)
""",
    setup="""
my_logger, my_handler = logging.getLogger("my_log"), MyHandler()
my_logger.propagate = False
my_logger.addHandler(my_handler)
""",
    step="""
my_tell(my_logger, step)
my_v = len(my_handler.lines) * 0.1 + len({line for _, line, _ in my_handler.lines}) + len(my_handler.lines[-1][0])
""",
    reset="my_handler.lines.clear()",
)
everyday(
    "warned_once",
    imports="warnings",
    setup="my_shown = []",
    step="""
with warnings.catch_warnings(record=True) as my_caught:
    warnings.simplefilter("always")
    warnings.warn(f"my {step % 3}")
my_shown.append(str(my_caught[0].message))
my_v = len(set(my_shown)) + len(my_shown) * 0.1
""",
)

# --- watched until they are gone ------------------------------------------------------------------------------

_WATCHED = "class MyThing:\n    n = 1\n"
everyday(
    "watched_in_a_list",
    imports="weakref",
    top=_WATCHED,
    setup="my_box = [MyThing()]\nmy_gone = []\nmy_ref = weakref.ref(my_box[0], lambda ref: my_gone.append(1))",
    step="""
my_box[0].n = my_box[0].n * 3 % 17
if step % 3 == 1:
    my_box = [MyThing()]
    my_gone.append(2 if my_ref() is None else 5)
    my_ref = weakref.ref(my_box[0], lambda ref: my_gone.append(1))
my_v = sum(my_gone) % 11 + my_ref().n * 0.1
""",
    inline=True,
)
everyday(
    "watched_in_a_dict_of_tuples",
    imports="weakref",
    top=_WATCHED,
    setup="my_table = {n: (n, MyThing()) for n in range(3)}\nmy_all = weakref.WeakSet(thing for _, thing in my_table.values())",
    step="""
my_table[step % 3] = (step, MyThing())
my_all.add(my_table[step % 3][1])
my_v = len(my_all) + sum(n for n, _ in my_table.values()) * 0.1
""",
)

# --- in the middle of their work ------------------------------------------------------------------------------

everyday(
    "sorter_of_a_graph",
    imports="graphlib",
    setup="my_sorter = graphlib.TopologicalSorter({n: [k for k in range(n) if n % (k + 2) == 0] for n in range(40)})\nmy_sorter.prepare()\nmy_ready = []",
    step="""
my_ready += my_sorter.get_ready()
my_n = my_ready.pop(0)
my_sorter.done(my_n)
my_v = my_n % 5 + len(my_ready) * 0.1
""",
)
everyday(
    "rows_of_a_buffer",
    imports="struct",
    setup="my_rows = struct.iter_unpack('<hB', bytes(range(90)))",
    step="my_a, my_b = next(my_rows)\nmy_v = my_a % 9 + my_b * 0.1",
    refusable="an iterator of C that does not say where it is",
)
everyday(
    "words_of_a_shell",
    imports="shlex",
    setup="my_lexer = shlex.shlex('a bb ccc dddd \"e e\" ' * 20, posix=True)",
    step="my_word = my_lexer.get_token()\nmy_v = len(my_word) + my_lexer.lineno",
)
everyday(
    "incremental_text_decoder",
    imports="codecs",
    setup="my_decoder = codecs.getincrementaldecoder('utf-8')()\nmy_raw = iter(('ä€x' * 20).encode())",
    step="my_text = my_decoder.decode(bytes([next(my_raw)]))\nmy_v = len(my_text) + len(my_decoder.getstate()[0]) * 0.5",
)
everyday(
    "keys_by_comparison",
    imports="functools heapq",
    top="def my_compare(a, b):\n    return (a % 5) - (b % 5) or a - b\n",
    setup="my_key = functools.cmp_to_key(my_compare)\nmy_heap = [my_key(n) for n in range(6)]\nheapq.heapify(my_heap)",
    step="my_n = heapq.heapreplace(my_heap, my_key(step * 7 % 23)).obj\nmy_v = my_n + len(my_heap) * 0.1",
)
everyday(
    "deep_copy_each_step",
    imports="copy",
    setup="my_state = {'rows': [[1], [2]]}\nmy_state['same'] = my_state['rows']",
    step="""
my_state = copy.deepcopy(my_state)
my_state['rows'][step % 2].append(step)
my_v = sum(map(len, my_state['same'])) + (my_state['same'] is my_state['rows'])
""",
)
everyday(
    "own_mapping",
    imports="collections.abc",
    top="""
class MyMap(collections.abc.MutableMapping):
    def __init__(self):
        self._held = {}

    def __getitem__(self, key):
        return self._held[key]

    def __setitem__(self, key, value):
        self._held[key] = value

    def __delitem__(self, key):
        del self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)
""",
    setup="my_map = MyMap()",
    step="""
my_map[step % 5] = my_map.get(step % 5, 0) + step
if len(my_map) > 3:
    my_map.popitem()
my_v = sum(my_map.values()) % 13 + len(my_map) * 0.1
""",
)
everyday(
    "classes_that_register_themselves",
    top="""
class MyBase:
    kinds = {}

    def __init_subclass__(cls, /, level=0, **rest):
        super().__init_subclass__(**rest)
        cls.level = level
        MyBase.kinds[cls.__name__] = cls

class MyField:
    def __set_name__(self, owner, name):
        self.place = "_" + name

    def __get__(self, thing, owner=None):
        return self if thing is None else getattr(thing, self.place, 1)

    def __set__(self, thing, value):
        setattr(thing, self.place, value % 19)

class MyFirst(MyBase, level=2):
    rate = MyField()
""",
    setup="my_things = [MyFirst()]",
    step="""
if step == 4:
    my_things.append(type("MySecond", (MyFirst,), {"rate": MyField()}, level=5)())
for my_thing in my_things:
    my_thing.rate = my_thing.rate * 3 + step
    MyBase.kinds[type(my_thing).__name__].level += 1
my_v = sum(thing.rate for thing in my_things) * 0.1 + MyFirst.level % 7
""",
)
everyday(
    "generator_that_keeps_its_error",
    top=_FAILING
    + """
def my_trying():
    last = None
    n = 0
    while True:
        n += 1
        try:
            my_fail(n)
        except ValueError as error:
            last = last if n % 3 else error
            yield n if last is None else last.args[0][0] + last.__traceback__.tb_lineno % 5
""",
    setup="my_trial = my_trying()",
    step="my_v = next(my_trial) * 0.3",
)

# --- of torch ------------------------------------------------------------------------------------------------

of_torch(
    "schedules_one_after_another",
    inline=True,
    setup="""
my_schedule = torch.optim.lr_scheduler.SequentialLR(
    opt,
    [
        torch.optim.lr_scheduler.LinearLR(opt, 0.3, total_iters=4),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2),
    ],
    milestones=[4],
)
""",
    step="my_schedule.step()\nmy_v = opt.param_groups[0]['lr'] * 10",
    reset="my_schedule.last_epoch = 0\nmy_schedule._schedulers[1].T_cur = 0\nopt.param_groups[0]['lr'] = 0.001",
)
of_torch(
    "schedule_by_what_was_reached",
    inline=True,
    setup="my_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)\nmy_least = 3.0",
    step="my_least = my_least * (0.5 if step % 4 == 0 else 1.0)\nmy_plateau.step(my_least)\nmy_v = opt.param_groups[0]['lr'] * 9 + my_plateau.num_bad_epochs",
)
of_torch(
    "spectral_and_weight_norm",
    setup="""
my_layer = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 2))
my_other = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 1))
""",
    step="""
my_out = my_other(my_layer(torch.full((1, 3), 0.1 * (step % 5))))
my_out.sum().backward()
with torch.no_grad():
    for my_p in (*my_layer.parameters(), *my_other.parameters()):
        my_p -= 0.05 * my_p.grad
        my_p.grad = None
my_v = float(my_out.detach())
""",
)
of_torch(
    "teacher_that_follows",
    inline=True,
    setup="my_teacher = copy.deepcopy(model).requires_grad_(False)",
    step="""
with torch.no_grad():
    for my_p, my_q in zip(my_teacher.parameters(), model.parameters()):
        my_p.lerp_(my_q, 0.3)
my_v = float(sum(p.sum() for p in my_teacher.parameters()))
""",
)
of_torch(
    "hooks_of_optimizer_and_gradient",
    inline=True,
    setup="""
my_seen = {"steps": 0, "sum": 0.0}
opt.register_step_post_hook(lambda *rest, seen=my_seen: seen.update(steps=seen["steps"] + 1))
next(model.parameters()).register_hook(lambda grad, seen=my_seen: seen.update(sum=seen["sum"] * 0.5 + float(grad.sum())))
""",
    step="my_v = my_seen['steps'] % 7 + my_seen['sum']",
    reset="my_seen.update(steps=-3, sum=0.5)",
)
of_torch(
    "function_with_its_own_backward",
    top="""
class MyClip(torch.autograd.Function):
    calls = [0]

    @staticmethod
    def forward(ctx, value, most):
        ctx.save_for_backward(value)
        ctx.most = most
        return value.clamp(-most, most)

    @staticmethod
    def backward(ctx, grad):
        MyClip.calls[0] += 1
        (value,) = ctx.saved_tensors
        return grad * (value.abs() <= ctx.most), None
""",
    setup="my_weight = torch.nn.Parameter(torch.tensor([0.5, 2.0]))",
    step="""
MyClip.apply(my_weight * (1 + step % 3), 1.5).sum().backward()
with torch.no_grad():
    my_weight += 0.1 * my_weight.grad
my_weight.grad = None
my_v = float(my_weight.sum().detach()) % 5 + MyClip.calls[0] % 4
""",
)
of_torch(
    "optimizers_of_many_kinds",
    setup="""
my_given = [torch.nn.Parameter(torch.full((3,), 0.5)) for _ in range(4)]
my_kinds = [
    torch.optim.AdamW(my_given[:1], amsgrad=True),
    torch.optim.RMSprop(my_given[1:2], momentum=0.5, centered=True),
    torch.optim.Adagrad(my_given[2:3]),
    torch.optim.NAdam(my_given[3:], foreach=True),
]
""",
    step="""
for my_p, my_one in zip(my_given, my_kinds):
    my_one.zero_grad(set_to_none=step % 2 == 0)
    ((my_p * (1 + step % 3)) ** 2).sum().backward()
    my_one.step()
my_v = float(sum(p.sum() for p in my_given))
""",
)
