"""What travels, and that it is the same on the other side. The other side is a real worker."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sublet.processes.channel.pickling import pack, unpack
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.remote_exception import RemoteTraceback
from tests.processes.conftest import script

DTYPES = [
    "?",
    "i1",
    "u2",
    "<i4",
    ">i4",
    "u8",
    "f2",
    "f4",
    "f8",
    "g",
    "F",
    "D",
    "S3",
    "U4",
    "V5",
    "M8[ns]",
    "m8[s]",
]


def echo(value: Any) -> Any:
    return value


def facts(value: Any) -> Any:
    """What the worker sees of it, said in plain words."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    return value.dtype.str, value.shape, value.flags.c_contiguous, value.flags.f_contiguous


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    structured = np.zeros(3, dtype=[("a", "i4"), ("b", "f8", (2,)), ("c", "S5")])
    structured["b"] = 1.5
    square = np.arange(24.0).reshape(4, 6)
    made = {dtype: np.arange(6).astype(dtype).reshape(2, 3) for dtype in DTYPES if dtype[0] != "V"}
    return made | {
        "void": np.array([b"abcde", b"fghij"], dtype="V5"),
        "no item": np.array(["", ""], dtype="U0"),
        "0-d": np.array(3.5),
        "empty": np.zeros((0, 5)),
        "fortran": np.asfortranarray(square),
        "strided": square[::2, ::-1],
        "transposed": square.T,
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "object": np.array([1, "two", None, [3]], dtype=object),
        "structured": structured,
        "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
        "many dimensions": np.arange(2**8).reshape((2,) * 8),
    }


def test_an_array_that_is_a_file_stays_that_file(tmp_path: Path) -> None:
    whole = np.memmap(tmp_path / "a", "f8", "w+", shape=(4000, 100))
    whole[:] = 1
    there = unpack(pack([whole, whole[7:9], whole.T]))
    there[1][0, 5] = 3  # as a worker does
    assert whole[7, 5] == there[0][7, 5] == there[2][5, 7] == 3
    assert len(pack(whole)) == 1  # no buffer: none of its content travels
    only_read = np.memmap(tmp_path / "a", "f8", "r", offset=808, shape=(50,), order="F")
    again = unpack(pack(only_read))
    assert again.tolist() == only_read.tolist()
    assert not again.flags.writeable


def test_an_array_of_a_file_travels_by_content_where_the_file_does_not_say_it(tmp_path: Path) -> None:
    whole = np.memmap(tmp_path / "a", "f8", "w+", shape=(400, 10))
    private = np.memmap(tmp_path / "a", "f8", "c", shape=(400, 10))
    private[0, 0] = 5
    made = whole + 1
    scattered = whole[:, 3]
    for array in (private, made, scattered, whole[:0]):
        assert unpack(pack(array)).tolist() == array.tolist()
    kept = unpack(pack([whole], snapshot=True))
    whole[0, 0] = 9
    assert kept[0][0, 0] == 0
    os.replace(tmp_path / "a", tmp_path / "b")
    np.zeros((400, 10)).tofile(tmp_path / "a")  # another file of that name
    assert unpack(pack(whole))[0, 0] == 9
    os.unlink(tmp_path / "a")
    assert unpack(pack(whole))[0, 0] == 9


@pytest.mark.parametrize("wrapped", [False, True])
def test_arrays_go_and_come_back(torch_worker: LocalWorker, wrapped: bool) -> None:
    """Bare they take pickle's own pickler, in a set of others ours."""
    for name, sent in arrays().items():
        (got,) = torch_worker.call(echo, ([sent, {1}][: 1 + wrapped],), {})[:1]
        assert type(got) is type(sent), name
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), name
        assert np.array_equal(got, sent), name
        assert torch_worker.call(facts, (sent,), {})[:2] == (sent.dtype.str, sent.shape), name
        assert got.flags.writeable or not sent.flags.writeable, name
    functions = np.array([lambda x: x + 1], dtype=object)
    assert torch_worker.call(lambda a: a[0](2), (functions,), {}) == 3
    order = torch_worker.call(facts, (arrays()["fortran"],), {})
    assert order[2:] == (False, True)


def test_memory_of_arrays_is_not_in_the_stream() -> None:
    big = np.zeros(1_000_000)
    tensor = torch.zeros(1_000_000)
    for value in (
        big,
        [big],
        {"k": (big, big[:5])},
        np.asfortranarray(big.reshape(1000, 1000)),
        tensor,
        {tensor},
    ):
        stream, *buffers = pack(value)
        assert stream.nbytes < 2000
        assert sum(b.nbytes for b in buffers) >= 4_000_000
    assert sum(b.nbytes for b in pack([big, big, tensor, tensor, tensor[3:]])) < 12_010_000


def test_what_was_read_only_stays_so_and_the_rest_is_writable(torch_worker: LocalWorker) -> None:
    fixed = np.frombuffer(bytes(200_000), np.uint8)
    for sent in (fixed, fixed[:10]):
        assert not torch_worker.call(echo, (sent,), {}).flags.writeable
    for size in (10, 200_000):
        got = torch_worker.call(echo, (np.zeros(size),), {})
        got += 1
        assert got.sum() == size
        assert torch_worker.call(lambda a: a.flags.writeable, (np.zeros(size),), {})
    assert torch_worker.call(echo, (b"x" * 100_000,), {}) == b"x" * 100_000
    assert type(torch_worker.call(echo, (bytearray(100_000),), {})) is bytearray


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    made = {
        str(dtype): torch.arange(12).to(dtype).reshape(3, 4)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.bool,
            torch.int8,
            torch.uint8,
            torch.int64,
        )
    }
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex32):
        made[str(dtype)] = torch.arange(12.0).to(dtype)
    return made | {
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "0-d": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "view": base[1:3, ::2],
        "transposed": base.t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "requires grad": torch.ones(3, requires_grad=True),
        "result of a computation": torch.ones(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "large": torch.arange(100_000),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_go_and_come_back(torch_worker: LocalWorker) -> None:
    for name, sent in tensors().items():
        if name == "result of a computation":
            sent = sent.detach()
        got = torch_worker.call(echo, (sent,), {})
        assert type(got) is type(sent), name
        assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride()), name
        assert got.requires_grad == sent.requires_grad, name
        assert torch.equal(got.to(torch.complex128), sent.to(torch.complex128)), name
        assert torch_worker.call(facts, (sent,), {})[:2] == (sent.dtype, tuple(sent.shape)), name
    got = torch_worker.call(echo, (torch.zeros(100_000),), {})
    got.add_(1)
    assert float(got.sum()) == 100_000


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors(torch_worker: LocalWorker) -> None:
    dense = torch.eye(300)
    for sent in (dense.to_sparse(), dense.to_sparse_csr()):
        got = torch_worker.call(echo, (sent,), {})
        assert got.layout is sent.layout
        assert torch.equal(got.to_dense(), dense)


@pytest.mark.parametrize("size", [4, 100_000])
def test_tensors_that_share_memory_still_do(torch_worker: LocalWorker, size: int) -> None:
    base = torch.zeros(size)

    def write(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        a[1] = 5
        return a, b, float(c[1])

    a, b, seen = torch_worker.call(write, (base, base[1:], base.view(torch.int32).view(torch.float32)), {})
    assert seen == 5
    assert float(b[0]) == 5
    a[2] = 7
    assert float(b[1]) == 7
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert float(base[1]) == 0


def test_models_keep_their_ties(torch_worker: LocalWorker) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    model[1].weight = model[0].weight

    def step(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
        model(torch.ones(1, 200)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return model, model.state_dict(), len(list(model.parameters()))

    got, state, parameters = torch_worker.call(step, (model,), {})
    assert parameters == 3
    assert got[0].weight is got[1].weight
    assert torch.equal(state["0.weight"], got[0].weight)
    assert not torch.equal(got[0].weight, model[0].weight)
    model.load_state_dict(state)
    assert torch.equal(model(torch.ones(1, 200)), got(torch.ones(1, 200)))


def test_a_module_whose_name_begins_like_torch_is_not_torch() -> None:
    kind = type("Kind", (), {"__module__": "torchlike", "__reduce__": lambda self: (int, (7,))})
    import sys

    held = sys.modules.pop("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        assert unpack(pack(kind())) == 7
    finally:
        sys.modules["torch"] = held


def test_exceptions_bring_notes_and_what_caused_them(torch_worker: LocalWorker) -> None:
    def fail() -> None:
        try:
            {}["key"]
        except KeyError as e:
            error = ValueError("outer", 3)
            error.add_note("look here")
            raise error from e

    with pytest.raises(ValueError, match="outer") as caught:
        torch_worker.call(fail, (), {})
    assert caught.value.args == ("outer", 3)
    assert caught.value.__notes__ == ["look here"]
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = str(caught.value.__cause__)
    assert text.index("KeyError: 'key'") < text.index("direct cause") < text.index("look here")
    with pytest.raises(ExceptionGroup) as group:
        torch_worker.call(raise_group, (), {})
    assert [str(e) for e in group.value.exceptions] == ["one", "two"]


def raise_group() -> None:
    raise ExceptionGroup("both", [ValueError("one"), TypeError("two")])


def test_what_cannot_be_pickled_is_said_before_anything_is_sent() -> None:
    with pytest.raises((TypeError, pickle.PicklingError)):
        pack([(x for x in ())])


MAIN = """
import dataclasses, enum, functools, os, sys
from pathlib import Path
from sublet.processes.worker.workers import LocalWorkers
import time

scale = 10

class Color(enum.Enum):
    RED = 1
    BLUE = 2
    def next(self): return Color.BLUE if self is Color.RED else Color.RED

class Flag(enum.IntFlag):
    A = 1
    B = 2

@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int
    def scaled(self): return Slotted(self.x * scale)

class Base:
    made = 0
    seen = []
    def __init__(self, x): self.x = x
    def value(self): return self.x
class Derived(Base):
    def value(self): return super().value() + scale
    @classmethod
    def make(cls): return cls(1)
    @staticmethod
    def twice(n): return 2 * n
    @property
    def half(self): return self.x / 2

class Oops(Exception):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code
    def __reduce__(self): return Oops, (self.code,)

def fact(n): return 1 if n < 2 else n * fact(n - 1)
def even(n): return True if n == 0 else odd(n - 1)
def odd(n): return False if n == 0 else even(n - 1)
@functools.cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
@functools.lru_cache(maxsize=3)
def small(n): return n
def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
def deco(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args) + 1
    return wrapper
@deco
def scaled(x): return x * scale
def generator_sum(n): return sum(x * scale for x in range(n))
def raising(code): raise Oops(code)
def apply(f, *args): return f(*args)

worker = LocalWorkers(Path(sys.argv[1]), "here", "torch,numpy,sublet").start()
far_us = time.monotonic_ns() // 1000 + 120_000_000
worker.arm(far_us, far_us, confirm=True)
worker.begin("lease-1", 7, {})
run = lambda f, *args: worker.call(f, args, {})
try:
    BODY
finally:
    worker.end("done")
"""


def in_main(folder: Any, body: str) -> list[str]:
    import textwrap

    indented = textwrap.indent(textwrap.dedent(body).strip(), "    ").lstrip()
    return script(MAIN.replace("BODY", indented), str(folder)).stdout.splitlines()


@pytest.mark.usefixtures("torch_worker")
def test_functions_and_classes_of_a_script(folder: Any) -> None:
    said = in_main(
        folder,
        """
        print(run(fact, 10), run(even, 7), run(fib, 50), run(small, 3), run(generator_sum, 4))
        print(run(apply, fib, 30), run(apply, small.cache_parameters)["maxsize"])
        c = counter(); c()
        print(run(c), run(c), c())
        print(run(scaled, 3), run(lambda x: scaled(x) + scale, 1))
        print(run(Color.next, Color.RED) is Color.BLUE, run(lambda: Color.RED) is Color.RED)
        print(run(lambda f: f | Flag.B, Flag.A) == Flag.A | Flag.B)
        got = run(Slotted.scaled, Slotted(4))
        print(got, type(got) is Slotted)
        d = Derived(5)
        print(run(d.value), run(Derived.make).value(), run(Derived.twice, 4), run(lambda: d.half))
        print(type(run(lambda: Derived(2))) is Derived, isinstance(run(lambda: Derived(2)), Base))
        try: run(raising, 7)
        except Oops as e: print("caught", e.code, type(e) is Oops)
        """,
    )
    assert said == [
        "3628800 False 12586269025 3 60",
        "832040 3",
        "2 3 2",
        "31 21",
        "True True",
        "True",
        "Slotted(x=40) True",
        "15 11 8 2.5",
        "True True",
        "caught 7 True",
    ]


@pytest.mark.usefixtures("torch_worker")
def test_a_class_that_comes_home_is_unchanged(folder: Any) -> None:
    """Its methods and what is stored in it are this process's; the worker has a copy, as old as the call that
    sent it."""
    said = in_main(
        folder,
        """
        value, seen = Base.value, Base.seen
        def make():
            Base.made += 1
            Base.seen.append("there")
            return Base(Base.made)
        print(run(make).x)
        print(Base.made, Base.seen, Base.seen is seen, Base.value is value)
        Base.made = 100
        Base.seen.append("here")
        back = run(lambda b: b, Base(1))
        print(Base.made, Base.seen, Base.seen is seen, Base.value is value, type(back) is Base)
        print(run(make).x)
        """,
    )
    assert said == ["1", "0 [] True True", "100 ['here'] True True True", "101"]
