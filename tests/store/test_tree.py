"""A state taken apart and put together again is the same to the bit, or refused with its path (C4), and runs no code (C7)."""

from __future__ import annotations

import enum
import json
import math
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.core.checkpoints.checkpoint import MAX_DEPTH, TensorEntry, lay_out
from sublet.core.errors import Damaged, MissingExtra, Unsavable
from sublet.store.arena import Arena
from sublet.store.tree import TakenState, put_together, take_apart
from tests.conftest import MORE_EXAMPLES


def round_trip(state: Any) -> Any:
    """Through JSON and an arena, as a save and a load would."""
    taken = take_apart(state)
    return rebuilt(taken)


def rebuilt(taken: TakenState) -> Any:
    tree = json.loads(json.dumps(taken.tree, allow_nan=False))
    layout = lay_out([s.nbytes for s in taken.storages])
    arena = Arena(layout.size, shared=False)
    arena.take(taken.storages, layout, all_new=True)
    spans = layout.storages
    return put_together(tree, taken.tensors, lambda n: arena.view[spans[n].offset : spans[n].end])


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    assert type(one) is type(other), path
    if isinstance(one, float):
        assert bits(one) == bits(other), path
    elif isinstance(one, complex):
        assert (bits(one.real), bits(one.imag)) == (bits(other.real), bits(other.imag)), path
    elif isinstance(one, dict):
        assert len(one) == len(other), path
        for (k1, v1), (k2, v2) in zip(one.items(), other.items(), strict=True):  # in their order
            assert_same(k1, k2, f"{path} key")
            assert_same(v1, v2, f"{path}[…]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (v1, v2) in enumerate(zip(one, other, strict=True)):
            assert_same(v1, v2, f"{path}[{i}]")
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert one.tobytes() == other.tobytes(), path
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad), (
            path
        )
        assert raw(one) == raw(other), path
    else:
        assert one == other, path


# --- plain values --------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
NANS = st.integers(0, 2**51 - 1).map(
    lambda n: struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | n | (n & 1) << 63))[0]
)
FLOATS = st.one_of(
    st.floats(), NANS, st.sampled_from([math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308])
)
INTS = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.integers(10**5000, 10**5001),
    st.sampled_from([2**64, -(2**64), 2**63]),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), INTS, FLOATS, st.complex_numbers(), TEXTS, st.binary(max_size=9)
)
KEYS = st.one_of(TEXTS, TEXTS.map("$".__add__), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(),
                 st.binary(max_size=4), st.tuples(st.integers(), TEXTS))  # fmt: skip
HASHABLE = st.one_of(st.integers(), TEXTS, st.binary(max_size=3), st.tuples(st.integers(), TEXTS))
TREES = st.recursive(
    st.one_of(
        SCALARS,
        st.binary(max_size=5).map(bytearray),
        st.frozensets(HASHABLE, max_size=4),
        st.sets(HASHABLE, max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(TEXTS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=25,
)


@settings(max_examples=150 * MORE_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_any_tree_comes_back_bit_exact(tree: Any) -> None:
    assert_same(tree, round_trip(tree))


BENT: list[Any] = [
        chr(0xD83D) + chr(0xDE00), "\ud800", "\udfff\ud800", "a\x00b", "\u2028", "😀", {"\ud83d\ude00": 1, "😀": 2}, {"": 1},
        10**5000, -(10**5000), 2**64 - 1, -(2**64), {10**5000: [10**5000]}, {10**5000, 1}, -0.0, [True, 1, 1.0],
        {1: "int", 1.5: "float", "1": "text", b"1": "bytes", (1,): "tuple", None: "none"}, {"$tensor": 0}, {"$x": 1, "y": 2},
        {"y": 2, "$x": 1}, OrderedDict(b=1, a=2), {"b": 1, "a": 2}, (), [], {}, set(), frozenset(), b"", bytearray(), OrderedDict(), Counter({5: 1, 2: 3}),
        [float("inf"), float("-inf")], complex(-0.0, math.nan), {frozenset([1]), (1, frozenset([2]))},
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BENT)))
def test_values_json_would_bend(number: int) -> None:
    """C4: surrogate halves that JSON would join, numbers it cannot print, keys it would turn into texts."""
    assert_same(BENT[number], round_trip(BENT[number]))


def test_signalling_nan_payloads_survive() -> None:
    for pattern in (0x7FF0000000000001, 0xFFF8DEADBEEF0001, 0x7FFFFFFFFFFFFFFF):
        value = struct.unpack("<d", struct.pack("<Q", pattern))[0]
        assert bits(round_trip([value])[0]) == bits(value)
        array = np.array([pattern], np.uint64).view(np.float64)
        assert round_trip(array).tobytes() == array.tobytes()


def test_the_tree_of_a_set_does_not_depend_on_its_order() -> None:
    words = [f"word{i}" for i in range(50)]
    assert take_apart(set(words)).tree == {"$set": sorted(words)}


# --- what is refused -----------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Sub(torch.Tensor):
    pass


Point = namedtuple("Point", "x y")
REFUSED = [
    object(), Colour.RED, Text("x"), Point(1, 2), defaultdict(list), print, torch.float32, torch.nn.Linear(1, 1), slice(1),
    range(3), np.array([object()], dtype=object), np.array(["a"], dtype=np.dtypes.StringDType()), np.ma.array([1, 2], mask=[0, 1]),
    np.array([[1]]).view(np.matrix), np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]), np.random.default_rng(), np.dtype("f4"),
    np.str_("a\x00"), np.bytes_(b"a\x00"), np.void(b""), torch.zeros(2).to_sparse(), torch.empty(2, device="meta"),
    torch.zeros(2).as_subclass(Sub), np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})),
    memoryview(b"x"), iter([]), ...,
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_anything_else_is_refused_with_its_path(value: Any) -> None:
    """C4: bit-exact or refused; a mask, a subclass or a name is never dropped in silence."""
    with pytest.raises(Unsavable, match=r"state\['layers'\]\[1\]"):
        take_apart({"layers": [0, value]})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused() -> None:
    value = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(Unsavable, match=r"state\['q'\]"):
        take_apart({"q": value})


@pytest.mark.parametrize(
    "key", [frozenset([1]), object(), Colour.RED, 1j, Point(1, 2)], ids=lambda v: type(v).__name__
)
def test_keys_that_are_refused(key: Any) -> None:
    with pytest.raises(Unsavable, match="state"):
        take_apart({key: 1})


def test_what_contains_itself_is_refused_at_once() -> None:
    """Twice itself has 2^100 paths: they are not walked."""
    once: list[Any] = []
    once.append(once)
    twice: list[Any] = []
    twice += [twice, twice]
    table: dict[str, Any] = {}
    table.update(a=table, b=table)
    for value in (once, twice, table, {"x": (twice,)}):
        with pytest.raises(Unsavable, match="contains itself"):
            take_apart(value)


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: OrderedDict(k=v)]
)
def test_depth(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert_same(value, round_trip(value))
    with pytest.raises(Unsavable, match="nested deeper"):
        take_apart(wrap(value))


# --- NumPy ---------------------------------------------------------------------------------------------------

DTYPES = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "f16", "c8", "c16", "c32", ">i4", ">f8", ">c8", ">u2",
    "M8[ns]", "M8[25s]", "m8[us]", ">M8[D]", "S5", "U4", ">U4", "V3",
    [("a", "<i4"), ("b", ">f8", (2, 3)), ("c", "U3")], np.dtype([("a", "i1"), ("b", "f8")], align=True),
    [("outer", [("inner", "M8[ns]"), ("flag", "?")])],
]  # fmt: skip


def filled(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    data = bytearray(random.Random(3).randbytes(math.prod(shape) * kind.itemsize))
    if kind.kind == "U" or "U" in str(kind):
        data = bytearray(len(data))
    if kind.kind == "b":
        data = bytearray(b & 1 for b in data)
    return np.frombuffer(data, kind).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_types(dtype: Any) -> None:
    for shape in ((), (0,), (3, 0, 2), (5,), (2, 3)):
        array = filled(dtype, shape) if 0 not in shape else np.empty(shape, dtype)
        back = round_trip({"a": array})["a"]
        assert_same(array, back)
        assert back.flags.writeable
    scalar = filled(dtype, (1,))[0]
    back = round_trip(scalar)
    assert type(back) is type(scalar)
    if np.dtype(dtype).char in "gG":
        assert back == scalar  # the padding inside a long double is anybody's
    else:
        assert_same(scalar, back)


def test_numpy_texts() -> None:
    for value in (
        np.array(["ä😀", "b", ""]),
        np.array([b"x", b"yz"]),
        np.str_("ä"),
        np.bytes_(b"q"),
        np.str_(""),
        np.array([""]),
    ):
        assert_same(value, round_trip(value))
    assert_same({np.float64(1.5): 1, np.str_("k"): 2}, round_trip({np.float64(1.5): 1, np.str_("k"): 2}))


def test_numpy_arrays_of_every_order() -> None:
    base = np.arange(24.0).reshape(2, 3, 4)
    frozen = base.copy()
    frozen.setflags(write=False)
    for array in (np.asfortranarray(base), base[:, ::2, ::-1], base.T, np.broadcast_to(base[0], (5, 3, 4)), base[1:1], frozen,
                  np.frombuffer(b"\x01\x02\x03", np.uint8)[1:]):  # fmt: skip
        back = round_trip(array)
        assert_same(np.ascontiguousarray(array), back)
        assert back.flags.writeable
        back += 1


def test_one_array_in_two_places_stays_one() -> None:
    array = np.arange(3)
    back = round_trip([array, array, array.copy()])
    assert back[0] is back[1]
    assert back[0] is not back[2]


# --- torch ---------------------------------------------------------------------------------------------------

TORCH_DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")},
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_types(dtype: torch.dtype) -> None:
    def of(
        storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)

    data = bytearray(random.Random(1).randbytes(24 * dtype.itemsize))
    if dtype is torch.bool:
        data = bytearray(b & 1 for b in data)
    storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    for offset, shape, stride in (
        (0, (4, 6), (6, 1)),
        (0, (6, 4), (1, 6)),
        (3, (), ()),
        (5, (2, 3), (6, 2)),
        (2, (7, 3), (1, 0)),
        (0, (0, 3), (3, 1)),
        (0, (24,), (1,)),
    ):
        tensor = of(storage, offset, shape, stride)
        back = round_trip([tensor])[0]
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert elements(back) == elements(tensor)


def elements(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each element: some types can do nothing but lie in memory."""
    data = bytes(tensor.untyped_storage())
    size = tensor.element_size()
    places = [int(tensor.storage_offset())]
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = [p + i * step for p in places for i in range(n)]
    return [data[p * size : (p + 1) * size] for p in places]


def test_tied_tensors_stay_tied() -> None:
    base = torch.arange(12.0)
    state = {"a": base, "b": base[2:5], "c": base.view(3, 4).t(), "again": base}
    back = round_trip(state)
    assert back["again"] is back["a"]
    assert_same(state, back)
    back["a"][3] = 100.0
    assert back["b"][1] == 100
    assert back["c"][3, 0] == 100
    assert base[3] == 3, "the saved state is not what was loaded"


def test_a_lone_slice_does_not_bring_all_around_it() -> None:
    big = torch.zeros(1 << 20)
    lone = big[5:9]
    assert sum(s.nbytes for s in take_apart({"x": lone}).storages) == 16
    assert sum(s.nbytes for s in take_apart({"x": lone, "tied": lone}).storages) == 16, (
        "one tensor twice is still alone"
    )
    shared = take_apart({"x": big[5:9], "y": big[7:12]})
    assert [s.nbytes for s in shared.storages] == [4 << 20]
    back = rebuilt(shared)
    back["x"][2] = 1
    assert back["y"][0] == 1
    small = take_apart(torch.zeros(1).expand(1000, 1000))
    assert [s.nbytes for s in small.storages] == [4]


def test_conjugate_and_negative_views() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"z": z, "conj": z.conj(), "neg": z.conj().imag, "imag": z.imag}
    back = round_trip(state)
    for key, value in state.items():
        assert torch.equal(back[key], value.resolve_conj().resolve_neg()), key


def test_gradients_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    leaf = torch.randn(2, requires_grad=True)
    back = round_trip({"p": parameter, "f": frozen, "l": leaf, "made": leaf * 2, "plain": torch.ones(1)})
    assert isinstance(back["p"], torch.nn.Parameter)
    assert isinstance(back["f"], torch.nn.Parameter)
    assert not isinstance(back["l"], torch.nn.Parameter)
    assert [t.requires_grad for t in back.values()] == [True, False, True, True, False]
    assert all(t.is_leaf for t in back.values())
    back["p"].sum().backward()
    assert back["p"].grad is not None


def trained(optimizer: Any, steps: int, model: Any) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def a_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    model[2].weight = model[0].weight  # tied
    return model


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1),
], ids=["adam", "adamw-fused", "momentum", "sgd"])  # fmt: skip
def test_training_goes_on_as_if_nothing_happened(make: Any) -> None:
    """C4, all of it: a model and its optimizer restored into new ones take the same steps."""
    model = a_model()
    optimizer = make(model.parameters())
    trained(optimizer, 3, model)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": list(model.parameters()),
    }
    back = round_trip(state)
    assert_same(state["optimizer"], back["optimizer"])
    assert_same(dict(state["model"]), dict(back["model"]))
    other = a_model()
    other.load_state_dict(back["model"])
    restored = make(other.parameters())
    restored.load_state_dict(back["optimizer"])
    trained(optimizer, 3, model)
    trained(restored, 3, other)
    for one, same in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, same)
    assert raw(back["model"]["0.weight"]) == raw(back["model"]["2.weight"])
    assert back["model"]["0.weight"].data_ptr() == back["model"]["2.weight"].data_ptr(), "tied weights"


def test_random_states() -> None:
    generator = np.random.default_rng(5)
    state = {
        "random": random.getstate(), "numpy": np.random.get_state(), "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(), "dict": np.random.get_state(legacy=False),
    }  # fmt: skip
    back = round_trip(state)
    assert_same(state, back)

    def draw(source: dict[str, Any]) -> list[Any]:
        random.setstate(source["random"])
        np.random.set_state(source["numpy"])
        torch.set_rng_state(source["torch"])
        generator.bit_generator.state = source["generator"]
        return [random.random(), np.random.rand(), torch.rand(1).item(), generator.random()]

    assert draw(state) == draw(back)


def test_what_is_loaded_is_its_own_memory() -> None:
    state = {"t": torch.zeros(4), "n": np.zeros(4), "b": bytearray(4), "l": [1]}
    taken = take_apart(state)
    back = rebuilt(taken)
    state["t"][0] = state["n"][0] = state["b"][0] = 1
    assert back["t"][0] == back["n"][0] == back["b"][0] == 0
    back["t"][1] = back["n"][1] = back["b"][1] = 2
    back["b"] += b"longer"
    assert state["t"][1] == state["n"][1] == state["b"][1] == 0


# --- trees of others -----------------------------------------------------------------------------------------

ENTRY = TensorEntry(framework="numpy", dtype="<f4", shape=(4,), stride=None, offset=0, storage=0)
TORCH = TensorEntry(framework="torch", dtype="float32", shape=(4,), stride=(1,), offset=0, storage=0)


def over(entry: TensorEntry, **values: Any) -> TensorEntry:
    return TensorEntry(**{**{f: getattr(entry, f) for f in entry.__slots__}, **values})


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": 1}, {"$tensor": -1}, {"$tensor": True}, {"$tensor": "0"}, {"$tensor": None}, {"$tensor": [0]}, {"$tensor": 2**70},
        {"$bytes": 7}, {"$bytes": -1}, {"$bytes": "x"}, {"$float": "zz"}, {"$float": "00"}, {"$float": 1}, {"$int": "xyz"}, {"$int": 5},
        {"$text": "ff"}, {"$text": 3}, {"$what": 1}, {"$tuple": 1}, {"$tuple": None}, {"$dict": [[1]]}, {"$dict": [[[], 1]]},
        {"$dict": 5}, {"$set": [[]]}, {"$complex": ["a", "b"]}, {"$complex": [1, 2, 3]}, {"$tuple": [], "x": 1}, {"$pickle": "gASV"},
    ],
    ids=str,
)  # fmt: skip
def test_a_tree_of_somebody_else(tree: Any) -> None:
    """C7: whatever a tree says, `Damaged` comes out and nothing else."""
    memory = memoryview(bytearray(16))
    with pytest.raises(Damaged):
        put_together([tree], [ENTRY], [memory].__getitem__)


@pytest.mark.parametrize(
    "entry",
    [
        over(ENTRY, dtype="O"), over(ENTRY, dtype="object"), over(ENTRY, dtype=""), over(ENTRY, dtype="["), over(ENTRY, dtype="(" * 4000),
        over(ENTRY, dtype="[('a', 'O')]"), over(ENTRY, dtype="[__import__('os')]"), over(ENTRY, shape=(5,)), over(ENTRY, shape=(3,)),
        over(ENTRY, shape=(2**40, 2**40)), over(ENTRY, storage=3), over(ENTRY, storage=1), over(ENTRY, dtype="V0"), over(ENTRY, dtype="<f8", shape=(4,)),
        over(TORCH, dtype="Tensor"), over(TORCH, dtype="load"), over(TORCH, dtype="quint8"), over(TORCH, dtype="qint32"), over(TORCH, dtype="_inductor"), over(TORCH, dtype="nothing"), over(TORCH, shape=(5,)), over(TORCH, offset=1),
        over(TORCH, stride=(2,)), over(TORCH, stride=None), over(TORCH, shape=(2**46,), stride=(2**46,)), over(TORCH, dtype="float64"),
        over(TORCH, storage=1), over(TORCH, dtype="int64", grad=True, shape=(2,)), over(TORCH, offset=2**46), over(TORCH, shape=(2**45, 2**45), stride=(0, 0), offset=9),
    ],
    ids=lambda e: f"{e.framework}-{e.dtype[:12]}-{e.shape}-{e.stride}-{e.offset}-{e.storage}",
)  # fmt: skip
def test_a_tensor_of_somebody_else(entry: TensorEntry) -> None:
    """C7: no tensor reaches beyond its storage, no type runs code."""
    memory = [memoryview(bytearray(16)), memoryview(bytearray(0))]
    with pytest.raises(Damaged):
        put_together({"$tensor": 0}, [entry], memory.__getitem__)


@pytest.mark.parametrize("mark", ["$bytes", "$bytearray"])
def test_the_same_bytes_twice_are_refused(mark: str) -> None:
    """C7: fourteen letters a copy would fill any memory. What we write has storages of its own for each."""
    for other in ("$bytes", "$bytearray"):
        with pytest.raises(Damaged, match="twice"):
            put_together([{mark: 0}, {other: 0}], [], [memoryview(bytearray(16))].__getitem__)
    twice = b"x" * 16
    assert round_trip([twice, twice, bytearray(twice)]) == [twice, twice, bytearray(twice)]


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.numpy", None)
    with pytest.raises(MissingExtra, match="jax"):
        put_together({"$tensor": 0}, [over(ENTRY, framework="jax")], [memoryview(bytearray(16))].__getitem__)
