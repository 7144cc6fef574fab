"""State of classes and of what looks attributes up: metaclasses, descriptors, registries, and classes that change."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

of_a_class = partial(feature, __name__)

of_a_class(
    "class_attribute",
    top="""
class MyLayer:
    made = 0
    sizes = []

    def __init__(self, n):
        MyLayer.made += 1
        self.sizes.append(n)
""",
    step="MyLayer(step % 4)\nmy_v = MyLayer.made % 8 + sum(MyLayer.sizes) % 3",
    reset="MyLayer.made = 0",
)
of_a_class(
    "cached_property",
    imports="functools",
    top="""
class MyBatch:
    made = 0

    def __init__(self):
        MyBatch.made += 1
        self.number = MyBatch.made

    @functools.cached_property
    def mean(self):
        self.number += 5
        return self.number * 0.5
""",
    setup="my_batch = MyBatch()",
    step="""
if step % 6 == 5:
    my_batch.__dict__.pop('mean', None)
my_batch.number += 1
my_v = my_batch.mean + my_batch.number * 0.1
""",
)
of_a_class(
    "singleton",
    top="""
class MyRegistry:
    _only = None

    def __new__(cls):
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.names = []
        return cls._only
""",
    step="MyRegistry().names.append(step)\nmy_v = len(MyRegistry().names) * 0.5",
    reset="MyRegistry._only = None",
)
of_a_class(
    "decorator_class",
    top="""
class MyMemo:
    def __init__(self, function):
        self.function, self.known, self.misses = function, {}, 0

    def __call__(self, n):
        if n not in self.known:
            self.misses += 1
            self.known[n] = self.function(n) + self.misses
        return self.known[n]

@MyMemo
def my_cube(n):
    return n**3 % 11
""",
    step="my_v = my_cube(step * 5 % 8)",
    reset="my_cube.known.clear()\nmy_cube.misses = 0",
)
of_a_class(
    "descriptor",
    top="""
class MyTracked:
    def __set_name__(self, owner, name):
        self.name, self.sets = "_" + name, 0

    def __get__(self, holder, owner=None):
        return self if holder is None else getattr(holder, self.name, 0) + self.sets * 0.25

    def __set__(self, holder, value):
        self.sets += 1
        setattr(holder, self.name, value)

class MyState:
    level = MyTracked()
""",
    setup="my_state = MyState()\nmy_state.level = 1.0",
    step="my_state.level = my_state.level * 0.5 + step % 3\nmy_v = my_state.level",
    reset="vars(MyState)['level'].sets = 0",
)
of_a_class(
    "getattr_object",
    top="""
class MyLazy:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(vars(self)) * 3 + len(name)
        setattr(self, name, value)
        return value
""",
    setup="my_lazy = MyLazy()",
    step="my_v = getattr(my_lazy, 'part' + 'x' * (step * 7 % 9)) % 13",
)
of_a_class(
    "object_that_refuses_strangers",
    top="""
class MyGuarded:
    def __init__(self):
        object.__setattr__(self, "values", {"n": 1})

    def __getattribute__(self, name):
        if name.startswith("__") and name != "__class__":
            raise AttributeError("look elsewhere")
        values = object.__getattribute__(self, "values")
        values["n"] = values["n"] * 5 % 47
        return values[name]
""",
    setup="my_guarded = MyGuarded()",
    step="my_v = my_guarded.n % 9",
    refusable="its class lets nobody look at it",
)
of_a_class(
    "metaclass_counter",
    top="""
class MyMeta(type):
    made = 0

    def __call__(cls, *args):
        MyMeta.made += 1
        cls.last = MyMeta.made
        return super().__call__(*args)

class MyPoint(metaclass=MyMeta):
    last = 0
""",
    step="MyPoint()\nmy_v = MyPoint.last % 6",
    reset="MyMeta.made = 0",
)
of_a_class(
    "registry_of_subclasses",
    top="""
class MyBase:
    kinds = {}

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        MyBase.kinds[cls] = len(MyBase.kinds) + 1
""",
    step="""
if step % 3 == 1:
    type(f"Kind{step}", (MyBase,), {"at": step})
my_v = sum(MyBase.kinds.values()) % 9 + len(MyBase.__subclasses__()) * 0.1
""",
    reset="MyBase.kinds.clear()",
)
of_a_class(
    "class_made_midway",
    setup="my_kind = None\nmy_made = []",
    step="""
if step % 5 == 2:
    my_kind = type("MyMade", (object,), {"level": step, "grow": lambda self: self.level * 2})
if my_kind is not None:
    my_made.append(my_kind())
    my_made[0].level += 1
my_v = sum(made.grow() for made in my_made) % 17
""",
)
of_a_class(
    "class_of_an_object_changed",
    top="""
class MyCold:
    heat = 1

class MyHot:
    heat = 5
""",
    setup="my_thing = MyCold()\nmy_thing.n = 0",
    step="""
my_thing.n += 1
if step % 4 == 2:
    my_thing.__class__ = MyHot if my_thing.heat == 1 else MyCold
my_v = my_thing.heat + my_thing.n * 0.1
""",
)
of_a_class(
    "method_replaced_on_an_object",
    imports="types",
    top="""
class MyPolicy:
    def __init__(self):
        self.n = 0

    def act(self):
        self.n += 1
        return self.n % 5

def my_other(self):
    self.n += 3
    return self.n % 7
""",
    setup="my_policy = MyPolicy()",
    step="""
if step == 4:
    my_policy.act = types.MethodType(my_other, my_policy)
if step == 9:
    MyPolicy.act = my_other
my_v = my_policy.act()
""",
)
of_a_class(
    "finalizer_of_an_object",
    top="""
class MyBuffer:
    alive = 0
    gone = 0

    def __init__(self):
        MyBuffer.alive += 1

    def __del__(self):
        MyBuffer.alive -= 1
        MyBuffer.gone += 2
""",
    setup="my_pool = [MyBuffer() for _ in range(3)]",
    step="my_pool[step % 3] = MyBuffer()\nmy_v = MyBuffer.alive + MyBuffer.gone % 7",
    reset="MyBuffer.gone = 1",
)
of_a_class(
    "static_and_class_methods",
    top="""
class MyMeterBoard:
    _readings = {}
    total = 0

    @staticmethod
    def note(n):
        MyMeterBoard._readings[n] = MyMeterBoard._readings.get(n, 0) + 1

    @classmethod
    def add(cls, n):
        cls.note(n)
        cls.total += cls._readings[n]
        return cls.total
""",
    step="my_v = MyMeterBoard.add(step % 4) % 11",
    reset="MyMeterBoard._readings.clear()",
)
