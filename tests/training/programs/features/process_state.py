"""State of modules and of the process itself: what is imported, replaced, switched and set for all of it."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

process_state = partial(feature, __name__)

process_state(
    "global_of_an_imported_module",
    imports="my_counts",
    files={
        "my_counts.py": "count = 0\nseen = []\n\ndef more():\n    global count\n    count += «2..4»\n    seen.append(count)\n    return count % 11\n"
    },
    step="my_v = my_counts.more() + len(my_counts.seen) * 0.1",
    reset="my_counts.count = 0",
)
process_state(
    "attribute_of_an_imported_module",
    imports="my_config",
    files={"my_config.py": "rate = 1.0\ntable = {}\n"},
    setup="my_config.rate = 1.0",
    step="my_config.rate *= 0.9\nmy_config.table[step] = my_config.rate\nmy_v = my_config.rate",
    finish="sorted(my_config.table)",
)
process_state(
    "thread_local",
    imports="threading",
    setup="my_local = threading.local()\nmy_local.count = 0",
    step="my_local.count += «1..3»\nmy_v = my_local.count % 8",
)
process_state(
    "context_variable",
    imports="contextvars",
    top="my_depth = contextvars.ContextVar('my_depth', default=0)",
    step="my_depth.set(my_depth.get() + step % 3 + 1)\nmy_v = my_depth.get() % 10",
    reset="my_depth.set(0)",
)
process_state(
    "context_variable_token",
    imports="contextvars",
    top="my_mode = contextvars.ContextVar('my_mode')",
    setup="my_mode.set(0.5)\nmy_tokens = []",
    step="""
my_tokens.append(my_mode.set(my_mode.get() + 1))
if step % 5 == 4:
    my_mode.reset(my_tokens.pop(0))
    my_tokens.clear()
my_v = my_mode.get()
""",
    refusable="a token of a context cannot be made again",
)
process_state(
    "own_context",
    imports="contextvars",
    top="""
my_level = contextvars.ContextVar("my_level", default=1)

def my_raise():
    my_level.set(my_level.get() * 2 % 19)
    return my_level.get()
""",
    setup="my_context = contextvars.copy_context()",
    step="my_v = my_context.run(my_raise) + my_level.get()",
)
process_state(
    "environment_variable",
    imports="os",
    setup="os.environ['my_SCALE'] = '3'",
    step="""
os.environ['my_SCALE'] = str(int(os.environ['my_SCALE']) * 3 % 50)
my_v = int(os.environ['my_SCALE']) % 7
""",
)
process_state(
    "environment_read_by_a_child_process",
    imports="os subprocess sys",
    setup="os.environ['my_N'] = '1'",
    step="""
os.environ['my_N'] += str(step % 3)
my_v = 0.0
if step % 5 == 0:
    my_v = len(subprocess.run(['sh', '-c', 'printf %s "$my_N"'], capture_output=True, check=True).stdout)
""",
    weight=0.3,
)
process_state(
    "library_function_replaced",
    imports="math",
    top="""
my_calls = [0]

def my_patch(original):
    def counted(value):
        my_calls[0] += 1
        return original(value) + 0.1 * my_calls[0]

    return counted
""",
    setup="math.my_floor = my_patch(math.floor)",
    step="my_v = math.my_floor(step * 1.5) % 9",
    reset="my_calls[0] = 0",
    inline=True,
)
process_state(
    "library_replaced_midway",
    imports="random",
    setup="my_original, my_wraps = random.uniform, 0",
    step="""
if step % 6 == 2:
    my_wraps += 1
    random.uniform = lambda a, b, inner=random.uniform: inner(a, b) + 0.125
my_v = random.uniform(0, 2) + my_wraps
""",
    end="random.uniform = my_original",
    reset="random.uniform = my_original",
    inline=True,
    refusable="it replaces a function of the standard library in the loop",
)
process_state(
    "attribute_of_a_library_module",
    imports="string",
    setup="string.my_state = [1]",
    step="string.my_state.append(sum(string.my_state) % 11)\nmy_v = string.my_state[-1]",
    refusable="it keeps its state in a module of the standard library",
)
process_state(
    "attribute_of_a_library_class",
    imports="collections",
    setup="collections.UserDict.my_uses = 0",
    step="collections.UserDict.my_uses += step % 4\nmy_v = collections.UserDict().my_uses % 7",
    refusable="it keeps its state in a class of the standard library",
)
process_state(
    "name_in_builtins",
    imports="builtins",
    setup="builtins.my_shared = 2",
    step="builtins.my_shared = my_shared * 3 % 31\nmy_v = my_shared",
    inline=True,
    refusable="it keeps its state among the builtins",
)
process_state(
    "global_random_states",
    imports="random numpy",
    setup="random.seed(«1..99»)\nnumpy.random.seed(«1..99»)",
    step="my_v = random.random() + float(numpy.random.rand()) + random.gauss(0, 0.1) + float(numpy.random.normal())",
)
process_state(
    "working_directory",
    imports="os",
    setup="os.makedirs('my_deep/er', exist_ok=True)\nmy_home = os.getcwd()",
    step="""
if step % 3 == 2:
    os.chdir("my_deep" if os.path.isdir("my_deep") else "er" if os.path.isdir("er") else my_home)
my_v = len(os.path.relpath(os.getcwd(), my_home)) % 7
""",
    end="os.chdir(my_home)",
    reset="os.chdir(my_home)",
    inline=True,
    refusable="it changes its working directory in the loop",
)
process_state(
    "file_mask",
    imports="os",
    setup="os.umask(0o022)",
    step="my_v = os.umask(0o027 if step % 4 > 1 else 0o002) % 7",
    reset="os.umask(0o077)",
    refusable="it changes the file mask of its process",
)
process_state(
    "signal_handler_set_in_the_loop",
    imports="signal",
    top="""
def my_handlers(seen):
    def one(number, frame):
        seen.append(1)

    def two(number, frame):
        seen.append(3)

    return one, two
""",
    setup="my_seen = []\nmy_one, my_two = my_handlers(my_seen)\nsignal.signal(signal.SIGUSR2, my_one)",
    step="""
if step == 6:
    signal.signal(signal.SIGUSR2, my_two)
signal.raise_signal(signal.SIGUSR2)
my_v = sum(my_seen) % 9
""",
    inline=True,
    refusable="it sets a signal's handler in the loop",
)
process_state(
    "recursion_limit",
    imports="sys",
    setup="my_before = sys.getrecursionlimit()",
    step="""
sys.setrecursionlimit(sys.getrecursionlimit() + 7)
my_v = (sys.getrecursionlimit() - my_before) % 40 * 0.25
""",
    end="sys.setrecursionlimit(my_before)",
    reset="sys.setrecursionlimit(my_before)",
    inline=True,
    refusable="it changes a limit of its interpreter",
)
process_state(
    "numpy_error_state_and_print_options",
    imports="numpy",
    setup="numpy.set_printoptions(precision=8)",
    step="""
if step == 4:
    numpy.seterr(divide="raise")
    numpy.set_printoptions(precision=3)
try:
    my_v = len(str(numpy.array([1 / 3]))) + float(numpy.isinf(numpy.float64(1.0) / numpy.float64(0.0)))
except FloatingPointError:
    my_v = 2.5
""",
    end="numpy.seterr(divide='warn')\nnumpy.set_printoptions(precision=8)",
    reset="numpy.seterr(divide='ignore')\nnumpy.set_printoptions(precision=6)",
    refusable="it changes how NumPy treats errors",
)
process_state(
    "warning_filters",
    imports="warnings",
    setup="warnings.simplefilter('ignore', FutureWarning)",
    step="""
if step == 5:
    warnings.simplefilter("error", FutureWarning)
try:
    warnings.warn("soon", FutureWarning, stacklevel=1)
    my_v = 1.0
except FutureWarning:
    my_v = 3.0
""",
    end="warnings.simplefilter('ignore', FutureWarning)",
    reset="warnings.simplefilter('ignore' if step > 5 else 'error', FutureWarning)",
    refusable="it changes the filters of warnings in the loop",
)
process_state(
    "module_path_extended",
    imports="sys",
    files={
        "my_more/my_late.py": "LEVEL = 4\n\ndef grow(n):\n    global LEVEL\n    LEVEL = (LEVEL + n) % 13\n    return LEVEL\n"
    },
    step="""
if step == 3:
    sys.path.append(sys.path[0] + "/my_more")
if step >= 4:
    import my_late
    my_v = my_late.grow(step)
else:
    my_v = 0.5
""",
    reset="import my_late\nmy_late.LEVEL = 0",
)
process_state(
    "module_made_by_hand",
    imports="sys types",
    setup="sys.modules['my_made'] = types.ModuleType('my_made')\nsys.modules['my_made'].level = 1.0",
    step="import my_made\nmy_made.level = my_made.level * 0.8 + step % 4\nmy_v = my_made.level",
    refusable="its module has no file",
)
process_state(
    "module_reloaded",
    imports="importlib my_part",
    files={"my_part.py": "try:\n    loads += 1\nexcept NameError:\n    loads = 1\n"},
    step="if step % 4 == 1:\n    importlib.reload(my_part)\nmy_v = my_part.loads",
    reset="my_part.loads = 0",
)
process_state(
    "state_of_the_garbage_collector",
    imports="gc",
    setup="gc.disable()",
    step="""
if step % 5 == 1:
    gc.enable()
if step % 5 == 4:
    gc.disable()
my_v = 1.5 if gc.isenabled() else 0.25
""",
    end="gc.enable()",
    reset="if gc.isenabled():\n    gc.disable()\nelse:\n    gc.enable()",
    inline=True,
    refusable="it switches the garbage collector in the loop",
)
