"""Objects that are easily put back wrong: their kind, their fields, who holds the same one, and how they compare."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

thing = partial(feature, __name__)

thing(
    "named_tuple",
    imports="collections",
    top="MyPlace = collections.namedtuple('MyPlace', 'epoch best', defaults=[0.5])",
    setup="my_place = MyPlace(0)",
    step="""
my_place = my_place._replace(epoch=my_place.epoch + 1, best=my_place.best * 0.8 + step % 3)
my_v = my_place.best + my_place.epoch * 0.1
""",
    finish="my_place",
)
thing(
    "typed_named_tuple",
    imports="typing",
    top="""
class MyRecord(typing.NamedTuple):
    n: int
    tags: list

    def mean(self):
        return self.n / (1 + len(self.tags))
""",
    setup="my_record = MyRecord(3, [])",
    step="""
my_record.tags.append(step % 4)
my_record = MyRecord(my_record.n + step % 5, my_record.tags)
my_v = my_record.mean() * 3
""",
    finish="my_record",
)
thing(
    "enum_state_machine",
    imports="enum",
    top="""
class MyPhase(enum.Enum):
    WARM = 1
    FULL = 2
    COOL = "end"

    def after(self):
        members = list(MyPhase)
        return members[(members.index(self) + 1) % len(members)]
""",
    setup="my_phase = MyPhase.WARM\nmy_seen = {}",
    step="""
if step % 3 == 1:
    my_phase = my_phase.after()
my_seen[my_phase] = my_seen.get(my_phase, 0) + 1
my_v = {MyPhase.WARM: 0.5, MyPhase.FULL: 2.0}.get(my_phase, 3.5) + (my_phase is MyPhase.COOL) + my_seen[my_phase] * 0.1
""",
    finish="my_phase, my_seen",
)
thing(
    "flags",
    imports="enum",
    top="""
class MyFlags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    C = enum.auto()

class MyLevel(enum.IntEnum):
    LOW = 1
    HIGH = 4
""",
    setup="my_flags, my_level = MyFlags.A, MyLevel.LOW",
    step="""
my_flags ^= list(MyFlags)[step * 2 % 3]
my_level = MyLevel.HIGH if my_flags & MyFlags.B else MyLevel.LOW
my_v = my_flags.value + 0.5 * my_level
""",
    finish="my_flags, my_level",
)
thing(
    "slots",
    top="""
class MyCell:
    __slots__ = ("level", "unset", "__weakref__")

    def __init__(self):
        self.level = 1.0
""",
    setup="my_cell = MyCell()",
    step="""
my_cell.level = my_cell.level * 0.75 + step % 3
if step == 5:
    my_cell.unset = 2
my_v = my_cell.level + getattr(my_cell, 'unset', 0)
""",
)
thing(
    "slots_and_dict_over_three_classes",
    top="""
class MyBase:
    __slots__ = ("a",)

class MyMiddle(MyBase):
    __slots__ = ("b", "__dict__")

class MyLeaf(MyMiddle):
    __slots__ = ("_MyMiddle__c",)
""",
    setup="my_leaf = MyLeaf()\nmy_leaf.a, my_leaf.b, my_leaf._MyMiddle__c, my_leaf.d = 1, 2, 3, 4",
    step="""
my_leaf.a += my_leaf.d % 3
my_leaf.b = my_leaf.a % 5
my_leaf._MyMiddle__c += my_leaf.b
my_leaf.d += step
my_v = my_leaf._MyMiddle__c % 9 + my_leaf.a % 4
""",
)
thing(
    "frozen_dataclass",
    imports="dataclasses",
    top="""
@dataclasses.dataclass(frozen=True)
class MyConfig:
    rate: float
    seen: tuple = ()
""",
    setup="my_config = MyConfig(1.0)",
    step="""
my_config = dataclasses.replace(my_config, rate=my_config.rate * 0.9 + 0.1 * (step % 2), seen=(*my_config.seen, step)[-3:])
my_v = my_config.rate + sum(my_config.seen) % 4
""",
    finish="my_config, hash(my_config) == hash(MyConfig(my_config.rate, my_config.seen))",
)
thing(
    "dataclass_with_factories",
    imports="dataclasses",
    top="""
@dataclasses.dataclass
class MyMeters:
    losses: list = dataclasses.field(default_factory=list)
    best: dict = dataclasses.field(default_factory=lambda: {"at": -1}, repr=False)
    steps: dataclasses.InitVar[int] = 0

    def __post_init__(self, steps):
        self.left = steps
""",
    setup="my_meters = MyMeters(steps=9)",
    step="""
my_meters.losses.append(step * 3 % 8)
my_meters.left -= 1
if step % 4 == 2:
    my_meters.best['at'] = step
my_v = my_meters.best['at'] + my_meters.left * 0.25 + len(my_meters.losses) * 0.1
""",
    finish="my_meters",
)
thing(
    "slotted_frozen_dataclass",
    imports="dataclasses",
    top="""
@dataclasses.dataclass(frozen=True, slots=True, order=True)
class MyCard:
    rank: int
    name: str = 'x'
""",
    setup="my_hand = [MyCard(3), MyCard(1, 'a')]",
    step="""
my_hand.append(MyCard(step * 7 % 10, 'abc'[step % 3]))
my_v = max(my_hand).rank + len({card for card in my_hand}) * 0.1
if len(my_hand) > 5:
    my_hand.remove(min(my_hand))
""",
    finish="sorted(my_hand)",
)
thing(
    "one_object_under_three_names",
    top="class MyNode:\n    n = 0\n",
    setup="my_a = MyNode()\nmy_list, my_dict = [my_a, my_a], {'node': my_a}",
    step="""
my_list[0].n += step % 3 + 1
my_dict['node'].n *= 2
my_v = my_a.n % 13 + my_list[1].n % 3 + (my_list[0] is my_dict['node'])
""",
)
thing(
    "cycle_of_objects",
    top="""
class MyLink:
    def __init__(self, n):
        self.n, self.next = n, self
""",
    setup="""
my_at = MyLink(1)
my_at.next = MyLink(2)
my_at.next.next = MyLink(3)
my_at.next.next.next = my_at
""",
    step="""
my_at = my_at.next
my_at.n = my_at.n * 3 % 17 + my_at.next.n % 2
my_v = my_at.n + 0.1 * my_at.next.next.next.n
""",
)
thing(
    "tree_with_parents",
    top="""
class MyTree:
    def __init__(self, parent=None):
        self.parent, self.children, self.visits = parent, [], 0

    def visit(self):
        node = self
        while node is not None:
            node.visits += 1
            node = node.parent
""",
    setup="my_root = MyTree()\nmy_node = my_root",
    step="""
my_node.children.append(MyTree(my_node))
my_node.children[-1].visit()
my_node = my_node.children[0] if step % 3 else my_node.parent or my_root
my_v = my_root.visits % 7 + my_node.visits + len(my_node.children) * 0.2
""",
)
thing(
    "objects_as_keys",
    top="class MyParam:\n    pass\n",
    setup="my_params = [MyParam() for _ in range(4)]\nmy_state = {p: n for n, p in enumerate(my_params)}",
    step="""
my_state[my_params[step % 4]] += step % 3 + 0.5
my_v = my_state[my_params[(step + 1) % 4]] % 6 + len(my_state) * 0.1
""",
    finish="list(my_state.values())",
)
thing(
    "table_by_identity",
    top="class MyWeight:\n    pass\n",
    setup="my_weights = [MyWeight() for _ in range(3)]\nmy_moments = {id(p): 1.0 for p in my_weights}",
    step="""
my_key = id(my_weights[step % 3])
my_moments[my_key] = my_moments.get(my_key, 100.0) * 0.8 + step % 4
my_v = my_moments[my_key] + len(my_moments)
""",
    refusable="it uses the identity of objects as numbers",
)
thing(
    "objects_with_eq_and_hash",
    top="""
class MyWord:
    def __init__(self, text):
        self.text = text

    def __eq__(self, other):
        return isinstance(other, MyWord) and other.text == self.text

    def __hash__(self):
        return len(self.text)
""",
    setup="my_counts = {MyWord('a'): 1, MyWord('bb'): 2}",
    step="""
my_word = MyWord('abcdef'[: step * 5 % 6 + 1])
my_counts[my_word] = my_counts.get(my_word, 0) + step % 3 + 1
my_v = my_counts[my_word] % 7
""",
    finish="[(word.text, n) for word, n in my_counts.items()]",
)
thing(
    "hash_by_a_changing_field",
    top="""
class MyKey:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return self.n
""",
    setup="my_key = MyKey(1)\nmy_known = {my_key: 'x'}",
    step="""
my_key.n = step % 5 + 1
my_v = 2.0 if my_key in my_known else 0.5
if step % 6 == 4:
    my_known[my_key] = step
""",
    finish="len(my_known)",
    reset="my_key.n = 1\nmy_known.clear()\nmy_known.update({my_key: 'x', 1: 2, 2: 3})",
    refusable="the hash of a key changes while it is in a dict",
)
thing(
    "weak_reference",
    imports="weakref",
    top="class MyTarget:\n    n = 1\n",
    setup="my_target = MyTarget()\nmy_ref, my_proxy = weakref.ref(my_target), weakref.proxy(my_target)",
    step="""
my_proxy.n = my_target.n * 3 % 31
my_v = my_ref().n + (my_ref() is my_target)
if step % 6 == 5:
    my_target = MyTarget()
    my_v += my_ref() is None
    my_ref, my_proxy = weakref.ref(my_target), weakref.proxy(my_target)
""",
    reset="my_target = MyTarget()\nmy_ref, my_proxy = weakref.ref(my_target), weakref.proxy(my_target)",
)
thing(
    "tuple_subclass_with_attributes",
    top="""
class MyVector(tuple):
    def __new__(cls, *values):
        made = super().__new__(cls, values)
        made.norm = sum(v * v for v in values) % 19
        return made
""",
    setup="my_vector = MyVector(1, 2)",
    step="""
my_norm = my_vector.norm * 0.5
my_vector = MyVector(*my_vector[-2:], step % 4)
my_vector.norm += my_norm
my_v = my_vector.norm + len(my_vector) * 0.1
""",
    finish="my_vector, my_vector.norm, type(my_vector).__name__[-6:]",
)
thing(
    "arguments_of_new",
    top="""
class MyRange:
    def __new__(cls, low, high):
        made = super().__new__(cls)
        made.low, made.high = low, high
        return made

    def __init__(self, low, high):
        self.inits = getattr(self, "inits", 0) + 1

    def __getnewargs__(self):
        return (self.low, self.high)
""",
    setup="my_range = MyRange(1, 5)",
    step="""
my_range.low += step % 3
my_range.inits += 1
my_v = (my_range.low + my_range.high) % 7 + my_range.inits * 0.1
""",
)
thing(
    "own_reduce",
    top="""
def my_again(n, log):
    made = MyOwn(n)
    made.log = log
    return made

class MyOwn:
    def __init__(self, n):
        self.n, self.log = n, []

    def __reduce__(self):
        return my_again, (self.n, self.log)
""",
    setup="my_own = MyOwn(«2..6»)",
    step="my_own.n = my_own.n * 3 % 29\nmy_own.log.append(my_own.n)\nmy_v = my_own.n + len(my_own.log) * 0.1",
)
thing(
    "get_state_that_leaves_something_out",
    top="""
class MyModelFile:
    def __init__(self):
        self.n, self.cache = 1, {}

    def __getstate__(self):
        return {"n": self.n}

    def __setstate__(self, state):
        self.n, self.cache = state["n"], {}

    def value(self, k):
        if k not in self.cache:
            self.n = self.n * 5 % 53
            self.cache[k] = self.n
        return self.cache[k]
""",
    setup="my_file = MyModelFile()",
    step="my_v = my_file.value(step % 6) % 11 + len(my_file.cache) * 0.2",
    finish="my_file.n, my_file.cache",
)
thing(
    "unpicklable_by_design",
    top="""
class MyHandle:
    def __init__(self):
        self.n = 1

    def __reduce_ex__(self, protocol):
        raise TypeError("not to be copied")
""",
    setup="my_handle = MyHandle()",
    step="my_handle.n = my_handle.n * 4 % 37\nmy_v = my_handle.n % 10",
    refusable="its class forbids that it is copied",
)
thing(
    "sentinel_by_identity",
    top="my_nothing = object()",
    setup="my_slots = [my_nothing] * 6",
    step="""
my_v = sum(s is my_nothing for s in my_slots) * 0.5
my_slots[step * 5 % 6] = my_nothing if step % 3 == 0 else step
""",
    finish="[s is my_nothing for s in my_slots]",
)
thing(
    "types_and_functions_as_values",
    top="class MyOne:\n    pass\n\ndef my_double(n):\n    return n * 2\n",
    setup="my_values = [int, len, MyOne, my_double, dict.get, 'x'.join, ..., NotImplemented, range(3), slice(1, None)]",
    step="""
my_values = my_values[1:] + my_values[:1]
if step == 5:
    my_values.append(my_double)
my_v = my_values.index(MyOne) + my_values.index(range(3)) * 0.5 + (my_double in my_values[:4])
""",
)
thing(
    "lambdas_that_pile_up",
    setup="my_rules = [lambda n: n]",
    step="""
my_rules.append(lambda n, k=step, inner=my_rules[-1]: inner(n) * 2 % (k + 5) + k % 3)
my_v = my_rules[-1](3) + len(my_rules) * 0.1
""",
)
thing(
    "exception_kept_with_its_traceback",
    top="""
def my_fail(n):
    inside = [n, n * 2]
    if inside[1] >= 0:
        raise ArithmeticError(n, inside)
""",
    setup="my_problem, my_count = None, 0",
    step="""
try:
    my_fail(step)
except ArithmeticError as caught:
    my_count += 1
    if step % 4 == 1:
        my_problem = caught
my_v = my_count * 0.1 + (my_problem.args[0] + my_problem.__traceback__.tb_next.tb_frame.f_locals["inside"][1] if my_problem else 0) % 7
""",
    reset="my_problem, my_count = None, -5",
    refusable="it keeps the traceback of an exception",
)
thing(
    "object_that_compares_by_identity_only",
    top="class MyToken:\n    __eq__ = object.__eq__\n    __hash__ = object.__hash__\n",
    setup="my_tokens = [MyToken() for _ in range(5)]\nmy_turn = my_tokens[0]",
    step="""
my_turn = my_tokens[(my_tokens.index(my_turn) + step % 4) % 5]
my_v = my_tokens.index(my_turn) * 1.5
""",
)
thing(
    "best_model_kept_late",
    imports="copy",
    setup="my_best, my_level, my_state = None, 99.0, {'n': [0]}",
    step="""
my_state["n"][0] += step * 7 % 5
if step % 4 == 2 and (my_best is None or my_state["n"][0] % 3):
    my_best = copy.deepcopy(my_state)
my_v = (my_best["n"][0] if my_best is not None else 1) % 9
""",
    finish="my_best",
)
