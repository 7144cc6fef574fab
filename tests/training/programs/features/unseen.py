"""Changes that reading the source does not show: through aliases, views, memory, operators and text that is run."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

unseen = partial(feature, __name__)

unseen(
    "append_by_another_name",
    setup="my_history = []\nmy_push = my_history.append",
    step="my_push(step * 3 % 7 + x)\nmy_v = sum(my_history) % 5 + len(my_history) * 0.1",
)
unseen(
    "append_in_a_lambda",
    setup="my_losses = [1.0]\nmy_note = lambda n: my_losses.append(n * 0.5)",
    step="my_note(my_losses[-1] + step % 3)\nmy_v = my_losses[-1]",
)
unseen(
    "numpy_add_at",
    imports="numpy",
    setup="my_counts = numpy.zeros(«4..7»)",
    step="""
numpy.add.at(my_counts, [step % 3, step % 4, 0], 0.5)
my_v = float(my_counts @ numpy.arange(len(my_counts)))
""",
    finish="my_counts.tolist()",
)
unseen(
    "numpy_out_argument",
    imports="numpy",
    setup="my_average = numpy.zeros(3)",
    step="""
numpy.multiply(my_average, 0.9, out=my_average)
numpy.add(my_average, [x, 1.0, step % 3], out=my_average)
my_v = float(my_average.sum())
""",
    finish="my_average.tolist()",
)
unseen(
    "numpy_put_and_copyto",
    imports="numpy",
    setup="my_board = numpy.zeros((3, 3))\nmy_mask = numpy.eye(3, dtype=bool)",
    step="""
numpy.put(my_board, step % 9, step % 5 + 1)
numpy.copyto(my_board, my_board.T + 0.25, where=my_mask)
my_board.flat[step * 2 % 9] -= 0.5
my_v = float(my_board.trace()) % 11 + float(my_board.sum()) * 0.1
""",
    finish="my_board.tolist()",
)
unseen(
    "memoryview_write",
    setup="my_bytes = bytearray(16)\nmy_view = memoryview(my_bytes)[4:12]",
    step="my_view[step % 8] = (my_view[step % 8] + step * 7 + 3) % 256\nmy_v = sum(my_bytes) % 23",
    finish="bytes(my_bytes)",
)
unseen(
    "memoryview_cast",
    imports="array",
    setup="my_array = array.array('d', [1.0, 2.0, 3.0])\nmy_view = memoryview(my_array).cast('B').cast('d')",
    step="my_view[step % 3] = my_view[step % 3] * 0.5 + 1.25\nmy_v = my_array[step % 3] + my_array[0]",
)
unseen(
    "write_through_a_view",
    imports="numpy",
    setup="my_whole = numpy.zeros((4, 6))\nmy_part = my_whole[1:3, ::2]",
    step="my_part += step % 3 + 0.5\nmy_part[0, 0] *= -0.5\nmy_v = float(my_whole.sum()) % 13",
    finish="my_whole.tolist()",
)
unseen(
    "view_made_anew_each_step",
    imports="numpy",
    setup="my_flat = numpy.arange(12.0)\nmy_cube = my_flat.reshape(2, 3, 2)",
    step="my_cube[:, step % 3] *= 0.75\nmy_flat[step % 12] += 1\nmy_v = float(my_cube[1].sum()) % 9",
)
unseen(
    "view_of_the_weights",
    weights="numpy",
    setup="my_half = w[:2]",
    step="my_half *= 0.97\nmy_v = float(my_half.sum()) + step % 3",
    reset="my_half = w[1:3]",
)
unseen(
    "weights_under_two_names",
    weights="numpy",
    setup="my_layers = [{'w': w, 'b': w[::-1]}]\nmy_same = my_layers[0]['w']",
    step="my_same += 0.01 * (step % 3)\nmy_v = float(my_layers[0]['b'][0]) + (my_layers[0]['w'] is w)",
    reset="my_layers = [{'w': w.copy(), 'b': w.copy()}]\nmy_same = my_layers[0]['w']",
    inline=True,
)
unseen(
    "memory_map",
    imports="numpy",
    setup="my_map = numpy.memmap('my_map.bin', dtype='float64', mode='w+', shape=(6,))",
    step="my_map[step % 6] += step * 0.5 + 1\nmy_v = float(my_map.sum()) % 8",
    end="my_map.flush()",
    refusable="it keeps its state in a file that it maps",
    weight=0.7,
)
unseen(
    "anonymous_memory_map",
    imports="mmap",
    setup="my_memory = mmap.mmap(-1, 64)",
    step="my_memory[step % 64] = (my_memory[(step - 1) % 64] * 3 + 5) % 251\nmy_v = my_memory[step % 64] % 9",
    refusable="it keeps its state in memory that no object describes",
)
unseen(
    "array_array",
    imports="array",
    setup="my_array = array.array('«d|l|h»', [1, 2])",
    step="my_array.append(my_array[-1] % 50 + my_array[-2] % 30)\nmy_v = my_array[-1] % 13",
    finish="my_array.tolist()",
)
unseen(
    "bytearray_that_grows",
    setup="my_tape = bytearray(b'ab')",
    step="""
my_tape += bytes([(my_tape[-1] * 5 + 3) % 256])
if len(my_tape) > 9:
    del my_tape[:2]
my_v = my_tape[0] % 11 + len(my_tape) * 0.1
""",
)
unseen(
    "operator_functions",
    imports="operator",
    setup="my_table, my_list = {}, [0, 0, 0]",
    step="""
operator.setitem(my_table, step % 4, operator.length_hint(my_list) + step)
operator.iadd(my_list, [step % 3])
if step % 4 == 3:
    operator.delitem(my_list, 0)
my_v = sum(my_table.values()) % 7 + sum(my_list) * 0.2
""",
)
unseen(
    "setattr_by_text",
    top="class MyBag:\n    pass\n",
    setup="my_bag = MyBag()",
    step="""
setattr(my_bag, "n" + str(step % 3), getattr(my_bag, "n" + str(step % 3), 1) * 2 % 17)
if step % 7 == 6:
    delattr(my_bag, "n0")
my_v = sum(vars(my_bag).values())
""",
)
unseen(
    "exec_of_text",
    setup="""
my_namespace = {'n': 1}
exec('def grow():\\n    global n\\n    n = n * 3 % 41\\n    return n', my_namespace)
""",
    step="my_v = my_namespace['grow']() % 9\nexec('n += 1', my_namespace)",
)
unseen(
    "eval_of_text",
    setup="my_names = {'k': 2}\nmy_rule = compile('[k := k * 5 % 23, k][1]', 'rule', 'eval')",
    step="""
my_v = eval('my_count(k)', {'my_count': my_names.__getitem__}, {'k': 'k'})
my_names['k'] = eval('k * 5 % 23 + 1', dict(my_names))
""",
)
unseen(
    "globals_by_text",
    step="globals()['my_hidden'] = globals().get('my_hidden', 1) * 7 % 39\nmy_v = globals()['my_hidden'] % 8",
    reset="globals()['my_hidden'] = 1",
)
unseen(
    "dict_of_an_object",
    top="class MyPlain:\n    pass\n",
    setup="my_plain = MyPlain()\nmy_plain.level = 2",
    step="""
my_plain.__dict__.update(level=vars(my_plain)['level'] * 3 % 29, last=step)
my_v = my_plain.level + my_plain.last % 2
""",
)
unseen(
    "ctypes_array",
    imports="ctypes",
    setup="my_cells = (ctypes.c_double * 4)(1.0, 2.0)",
    step="my_cells[step % 4] = my_cells[(step + 1) % 4] * 0.5 + step % 3\nmy_v = sum(my_cells)",
    finish="list(my_cells)",
    refusable="it keeps its state in memory of ctypes",
)
unseen(
    "ctypes_structure_and_pointer",
    imports="ctypes",
    top="class MyPair(ctypes.Structure):\n    _fields_ = [('n', ctypes.c_int), ('total', ctypes.c_double)]\n",
    setup="my_pair = MyPair(1, 0.5)\nmy_pointer = ctypes.pointer(my_pair)",
    step="""
my_pointer.contents.n += step % 4
my_pair.total = my_pair.total * 0.5 + my_pair.n
my_v = my_pointer[0].total % 9
""",
    refusable="it keeps its state in memory of ctypes",
)
unseen(
    "ctypes_over_a_bytearray",
    imports="ctypes",
    setup="my_store = bytearray(12)\nmy_numbers = (ctypes.c_uint32 * 3).from_buffer(my_store)",
    step="my_numbers[step % 3] += step * 1000 + 77\nmy_v = sum(my_store) % 19",
    refusable="it keeps its state in memory of ctypes",
)
unseen(
    "array_over_a_bytearray",
    imports="numpy",
    setup="my_store = bytearray(32)\nmy_numbers = numpy.frombuffer(my_store, dtype='<i4')",
    step="my_numbers[step % 8] += step + 300\nmy_v = (sum(my_store) + int(my_numbers.sum())) % 23",
)
unseen(
    "struct_pack_into",
    imports="struct",
    setup="my_page = bytearray(24)",
    step="""
my_n, my_f = struct.unpack_from("<id", my_page, 4)
struct.pack_into("<id", my_page, 4, my_n + step + 1, my_f * 0.5 + step % 3)
my_v = my_n % 9 + my_f
""",
)
unseen(
    "in_memory_files",
    imports="io",
    setup="my_text, my_bytes = io.StringIO(), io.BytesIO(b'0123456789')",
    step="""
my_text.write(f"{step * 3 % 7};")
my_bytes.seek(step % 10)
my_bytes.write(bytes([65 + step % 26]))
my_v = len(my_text.getvalue()) % 7 + my_bytes.tell() % 4 + sum(my_bytes.getvalue()) % 5
""",
    finish="my_text.getvalue(), my_bytes.getvalue()",
)
unseen(
    "heap_and_bisect_on_an_alias",
    imports="heapq bisect",
    setup="my_heap, my_sorted = [], []\nmy_alias = my_sorted",
    step="""
heapq.heappush(my_heap, (step * 7 % 11, step))
bisect.insort(my_alias, step * 5 % 13)
my_v = my_heap[0][0] + my_sorted[len(my_sorted) // 2]
if step % 3 == 2:
    my_v += heapq.heappop(my_heap)[1] * 0.1
""",
)
unseen(
    "shuffle_in_place",
    imports="random numpy",
    setup="my_order, my_rows = list(range(9)), numpy.arange(10)\nmy_rng = numpy.random.default_rng(«1..50»)",
    step="random.shuffle(my_order)\nmy_rng.shuffle(my_rows)\nmy_v = my_order[0] - 0.5 * int(my_rows[3])",
    finish="my_order, my_rows.tolist()",
)
unseen(
    "sort_key_with_a_side_effect",
    top="""
def my_ranked(log):
    def rank(n):
        log.append(n)
        return n * 7 % 10

    return rank
""",
    setup="my_log = []\nmy_rank = my_ranked(my_log)\nmy_items = [3, 1, 4, 5, 9, 2, 6]",
    step="my_items.sort(key=my_rank)\nmy_items[0] += step % 5\nmy_v = my_items[-1] + len(my_log) % 4",
)
unseen(
    "alias_grown_in_place",
    setup="my_first = [1]\nmy_second = my_first\nmy_holder = {'list': my_first}",
    step="my_second += [step % 4]\nmy_v = sum(my_first) % 11 + (my_holder['list'] is my_second)",
)
unseen(
    "slots_of_a_wrapped_list",
    top="""
class MyWindow:
    __slots__ = ("items",)

    def __init__(self, items):
        self.items = items

    def __iadd__(self, n):
        self.items[:] = [*self.items[1:], n]
        return self
""",
    setup="my_items = [0, 0, 0]\nmy_window = MyWindow(my_items)",
    step="my_window += step * step % 9\nmy_v = my_items[0] + my_items[1] * 0.5 + sum(my_items) * 0.1",
)
unseen(
    "deque_rotated",
    imports="collections",
    setup="my_ring = collections.deque([3, 1, 4, 1, 5, 9, 2])",
    step="my_ring.rotate(step % 3 + 1)\nmy_ring[0] += 1\nmy_v = my_ring[-1] % 12",
)
unseen(
    "matrix_multiply_in_place",
    imports="numpy",
    setup="my_state = numpy.eye(2)\nmy_turn = numpy.array([[0.8, -0.6], [0.6, 0.8]])",
    step="my_state @= my_turn\nmy_v = float(my_state[0, 1])",
)
unseen(
    "object_that_changes_when_read",
    top="""
class MyShy:
    def __init__(self):
        self.reads = 0

    @property
    def value(self):
        self.reads += 1
        return self.reads % 5

    def __repr__(self):
        return f"MyShy({self.reads})"

    def __len__(self):
        self.reads += 100
        return 3

    def __bool__(self):
        self.reads += 1000
        return True

    def __iter__(self):
        self.reads += 10_000
        return iter(())
""",
    setup="my_shy = MyShy()",
    step="my_v = my_shy.value",
    finish="my_shy",
)
unseen(
    "comparison_with_a_side_effect",
    top="""
class MyTouchy:
    def __init__(self, n):
        self.n, self.compared = n, 0

    def __eq__(self, other):
        self.compared += 1
        return isinstance(other, MyTouchy) and self.n == other.n

    def __hash__(self):
        self.compared += 1
        return hash(self.n)
""",
    setup="my_touchy = [MyTouchy(n) for n in range(4)]",
    step="my_v = my_touchy.index(MyTouchy(step % 4)) + sum(t.compared for t in my_touchy) % 7",
    finish="[t.compared for t in my_touchy]",
)
unseen(
    "changes_by_map_and_any",
    imports="collections",
    setup="my_seen = collections.Counter()\nmy_log = []",
    step="""
collections.deque(map(my_seen.update, [[step % 3], [step % 5]]), maxlen=0)
my_found = any(my_log.append(n) or n > 3 for n in (step % 6, 2, step % 4))
my_v = my_seen[0] + len(my_log) * 0.1 + my_found
""",
)
unseen(
    "dict_setdefault_chain",
    setup="my_tree = {}",
    step="""
my_tree.setdefault(step % 2, {}).setdefault(step % 3, []).append(step)
my_v = len(my_tree[step % 2]) + len(my_tree[step % 2][step % 3]) * 0.3
""",
    finish="my_tree",
)
unseen(
    "swap_of_two_objects_contents",
    top="class MyCup:\n    def __init__(self, n):\n        self.n = n\n",
    setup="my_left, my_right = MyCup(1), MyCup(5)\nmy_cups = (my_left, my_right)",
    step="""
my_left.__dict__, my_right.__dict__ = my_right.__dict__, my_left.__dict__
my_left.n = my_left.n * 2 % 13 + 1
my_v = my_cups[0].n - 0.5 * my_cups[1].n
""",
)
unseen(
    "unpacking_into_places",
    setup="my_cells, my_named = [0, 0, 0], {}",
    step="""
my_cells[step % 3], my_named["b"], *my_cells[1:] = step, step * 2 % 9, step % 5, my_cells[0] % 7
for my_cells[0] in range(step % 4 + 1):
    pass
my_v = sum(my_cells) % 11 + my_named["b"] * 0.5
""",
)
unseen(
    "walrus_in_a_condition",
    setup="my_last = 1",
    step="""
if (my_next := my_last * 3 % 28) % 2:
    my_last = my_next
else:
    my_last = my_next + 1
my_v = my_last
""",
)
unseen(
    "deleted_and_made_again",
    setup="my_sum, my_kept = 0.5, 0.0",
    step="""
if step % 5 == 3:
    my_kept = my_sum
    del my_sum
if step % 5 == 4:
    my_sum = my_kept * 0.5
    del my_kept
my_v = my_kept if step % 5 == 3 else (my_sum := my_sum + step % 3)
""",
    inline=True,
)
