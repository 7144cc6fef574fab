"""Containers that are easily put back wrong: their order, their kind, and what they share."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

container = partial(feature, __name__)

container(
    "two_lists_share_their_members",
    setup="my_rows = [[n] for n in range(3)]\nmy_view = [my_rows[2], my_rows[0]]",
    step="""
my_view[step % 2].append(step % 4)
if step == 6:
    my_rows[2] = my_rows[1]
my_v = sum(map(sum, my_rows)) % 11 + len(my_view[0]) * 0.1
""",
    finish="my_rows, my_view",
)
container(
    "containers_that_contain_themselves",
    setup="""
my_list = [1]
my_list.append(my_list)
my_dict = {'n': 1}
my_dict['me'] = my_dict
my_pair = (my_list, my_dict)
my_list.append(my_pair)
""",
    step="""
my_list[1][0] += step % 5
my_dict['me']['n'] = my_dict['n'] * 3 % 19
my_v = my_list[0] % 8 + my_list[2][1]['me']['n']
""",
)
container(
    "linked_list_of_a_thousand",
    setup="my_chain = None\nfor my_n in range(«900..1500»):\n    my_chain = [my_n % 7, my_chain]",
    step="my_chain = [step * 2 % 9 + my_chain[0], my_chain[1][1]]\nmy_v = my_chain[0] % 10 + my_chain[1][0]",
)
container(
    "order_of_a_set_of_texts",
    setup="my_set = {str(n * 7919) for n in range(«9..14»)}\nmy_order = list(my_set)\nmy_n = 0",
    step="my_n += 1\nmy_v = (2.0 if list(my_set) == my_order else 7.0) + my_n * 0.1",
    reset="my_order = []",
    refusable="the order of a set of texts is another in each process",
)
container(
    "set_of_texts_that_grows",
    setup="my_seen = {'a', 'b'}\nmy_frozen = frozenset(['x'])",
    step="""
my_seen.add('w' + str(step * 5 % 11))
if step % 4 == 3:
    my_seen.discard('w5')
my_frozen |= {str(step % 6)}
my_v = len(my_seen) + len(my_frozen & {'1', '3', 'x'}) * 0.5
""",
    finish="sorted(my_seen), sorted(my_frozen)",
)
container(
    "order_of_a_set_of_objects",
    top="class MyMember:\n    pass\n",
    setup="my_set = {MyMember() for _ in range(«7..12»)}\nmy_order = list(my_set)\nmy_n = 0",
    step="my_n += 2\nmy_v = (1.0 if list(my_set) == my_order else 4.0) + my_n * 0.1",
    reset="my_order = []",
    refusable="the order of a set of objects is another in each process",
)
container(
    "set_of_tuples",
    setup="my_visited = {(0, 0)}\nmy_at = (0, 0)",
    step="""
my_at = ((my_at[0] + step % 3) % 5, (my_at[1] + 2) % 4)
my_v = 3.0 if my_at in my_visited else 1.0
my_visited.add(my_at)
""",
    finish="sorted(my_visited)",
)
container(
    "history_of_a_set_of_numbers",
    setup="my_set = set(range(«20..40»))",
    step="my_v = my_set.pop() % 9\nmy_set |= {step * 97 % 211, step + 1000}\nmy_set.discard(step * 3)",
    finish="list(my_set)[:10]",
    refusable="the order of a set depends on its history",
)
container(
    "tuples_as_keys",
    setup="my_table = {(0, 'a'): 1.0}",
    step="""
my_key = (step % 3, 'abc'[step * 2 % 3])
my_table[my_key] = my_table.get(my_key, 0.5) * 1.5 % 7
my_table[None, 1.5, True] = step
my_v = sum(my_table.values()) % 9
""",
    finish="my_table",
)
container(
    "keys_of_many_kinds",
    setup="my_table = {1: 'int', 'a': 2, None: 3, b'a': 4, 2.5: 5, (): 6, frozenset([1]): 7, int: 8, ...: 9, len: 10}",
    step="""
my_keys = list(my_table)
my_table[my_keys[step % 4]] = my_table.pop(my_keys[step % 4])
my_table[step] = step % 3
my_v = len(my_table) + my_table[int] * 0.5 + my_table[len]
my_table[int] = my_table[int] * 2 % 15
my_table[len] = step % 4
""",
    reset="my_table = {1: 'int', 'a': 2, None: 3, b'a': 4, 2.5: 5, (): 6, int: 9, len: 11, 'y': 0, 'z': 1}",
)
container(
    "order_of_a_dict",
    setup="my_dict = {name: n for n, name in enumerate('abcdef')}",
    step="""
my_first = next(iter(my_dict))
my_dict[my_first] = my_dict.pop(my_first) + step % 4
if step % 3 == 0:
    my_dict['z'] = my_dict.pop('z', 1) + 2
my_v = my_dict[next(reversed(my_dict))] % 9
""",
    finish="my_dict",
)
container(
    "ordered_dict",
    imports="collections",
    setup="my_cache = collections.OrderedDict((n, n * n) for n in range(5))",
    step="""
my_cache.move_to_end(list(my_cache)[step * 2 % 5], last=bool(step % 3))
my_k, my_n = next(iter(my_cache.items()))
my_cache[my_k] = my_n + 1
my_v = my_n % 7
""",
    finish="my_cache",
)
container(
    "default_dict",
    imports="collections",
    setup="""
my_groups = collections.defaultdict(list)
my_nested = collections.defaultdict(lambda: collections.defaultdict(int))
""",
    step="""
my_groups[step % 3].append(step)
my_nested[step % 2][step % 5] += step % 4
my_v = len(my_groups[step % 4]) + sum(my_nested[1].values()) % 5
""",
    finish="dict(my_groups)",
)
container(
    "counter_and_chain_map",
    imports="collections",
    setup="my_counts = collections.Counter('abca')\nmy_scopes = collections.ChainMap({}, {'n': 1})",
    step="""
my_counts.update('abcd'[step % 4] * (step % 3))
my_scopes['n'] = my_scopes['n'] + step % 4
if step % 5 == 4:
    my_scopes = my_scopes.new_child()
my_v = my_counts.most_common(1)[0][1] + my_scopes['n'] % 6 + len(my_scopes.maps) * 0.1
""",
    finish="my_counts, my_scopes",
)
container(
    "deque_with_a_limit",
    imports="collections",
    setup="my_recent = collections.deque([0.5], maxlen=«3..5»)",
    step="""
my_recent.append(step * 3 % 7)
my_v = sum(my_recent) / len(my_recent) + (my_recent.maxlen or 100) * 0.1
""",
    finish="my_recent",
)
container(
    "user_dict_and_list",
    imports="collections",
    top="""
class MyTable(collections.UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value + 1)

class MyRow(collections.UserList):
    pass
""",
    setup="my_table, my_row = MyTable(a=1), MyRow([2])",
    step="""
my_table['ab'[step % 2]] = my_table.get('a', 0) % 7
my_row.append(step % 4)
my_v = sum(my_table.values()) + len(my_row) * 0.1 + my_row[-1]
""",
    finish="my_table, my_row",
)
container(
    "heap_of_lists",
    imports="heapq",
    top="""
class MyTask:
    def __init__(self, due):
        self.due = due

    def __lt__(self, other):
        return self.due < other.due
""",
    setup="my_heap = [MyTask(n * 5 % 9) for n in range(6)]\nheapq.heapify(my_heap)",
    step="""
my_task = heapq.heappop(my_heap)
my_v = my_task.due
my_task.due += step % 5 + 2
heapq.heappush(my_heap, my_task)
""",
    finish="[task.due for task in my_heap]",
)
container(
    "weak_value_dictionary",
    imports="weakref",
    top="class MyAsset:\n    def __init__(self, n):\n        self.n = n\n",
    setup="my_live = [MyAsset(n) for n in range(3)]\nmy_weak = weakref.WeakValueDictionary(enumerate(my_live))",
    step="""
my_live[step % 3] = MyAsset(step)
my_weak[step] = my_live[step % 3]
my_v = len(my_weak) + sum(a.n for a in my_weak.values()) % 7
""",
    finish="sorted(my_weak)",
)
container(
    "weak_keys_and_sets",
    imports="weakref",
    top="class MyHandle:\n    pass\n",
    setup="""
my_held = [MyHandle() for _ in range(4)]
my_notes, my_open = weakref.WeakKeyDictionary(), weakref.WeakSet(my_held)
""",
    step="""
my_notes[my_held[step % 4]] = step * 2 % 7
if step % 3 == 2:
    my_held[step % 4] = MyHandle()
    my_open.add(my_held[step % 4])
my_v = sum(my_notes.values()) % 9 + len(my_open) * 0.5 + len(my_notes) * 0.1
""",
    reset="my_notes.clear()",
)
container(
    "dict_subclass_with_missing",
    top="""
class MyLazyDict(dict):
    def __init__(self):
        super().__init__()
        self.misses = 0

    def __missing__(self, key):
        self.misses += 1
        self[key] = key * 2 + self.misses
        return self[key]
""",
    setup="my_lazy = MyLazyDict()",
    step="my_v = my_lazy[step * 3 % 8] % 9 + my_lazy.misses * 0.1",
    finish="my_lazy, my_lazy.misses",
)
container(
    "list_and_set_subclasses_with_attributes",
    top="class MyList(list):\n    label = 0\n\nclass MySet(set):\n    limit = 3\n",
    setup="my_list, my_set = MyList([1]), MySet()\nmy_list.label, my_set.limit = 2, 5",
    step="""
my_list.append(step % 3)
my_list.label += my_list[-1]
my_set.add(step % my_set.limit)
my_set.limit += step % 2
my_v = my_list.label % 6 + len(my_set) + my_set.limit * 0.1
""",
    finish="my_list, my_list.label, sorted(my_set), type(my_set).__mro__[1]",
)
container(
    "mapping_proxy_and_namespace",
    imports="types",
    setup="""
my_inner = {'n': 1}
my_proxy = types.MappingProxyType(my_inner)
my_space = types.SimpleNamespace(n=2)
""",
    step="""
my_inner['n'] = my_inner['n'] * 3 % 23
my_space.n += my_proxy['n'] % 4
my_v = my_space.n % 8 + my_proxy['n'] * 0.1
""",
    finish="my_space",
)
container(
    "kinds_change_midway",
    setup="my_value = None",
    step="""
if step % 6 == 1:
    my_value = [step, repr(my_value)]
elif step % 6 == 3:
    my_value = {"n": my_value, "s": str(step)}
elif step % 6 == 5:
    my_value = float(sum(map(ord, str(my_value))) % 97)
my_v = sum(map(ord, repr(my_value))) % 11
""",
    finish="my_value",
)
