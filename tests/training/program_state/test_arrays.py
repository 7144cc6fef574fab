"""Arrays and tensors in another process: their numbers, and who shares memory with whom."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy
import pytest

from sublet.training.program_state.arrays import BLOCKS, NUMPY_ARRAY, TENSOR, _lost_graph
from sublet.training.program_state.cpython.frame_memory import NotResumable
from sublet.training.program_state.memory import Blocks, bytes_at, digest_of_holder
from tests.conftest import needed
from tests.forked import with_torch
from tests.training.program_state.carried import Carried, assert_carried, carry, carry_elsewhere

PROGRAMS = {
    "arrays of NumPy": """
import numpy as np
a = np.arange(10.0)
v = a[2:5]
t = a.reshape(2, 5).T
r = np.array([[1, 2], [3, 4]], order='F')
o = np.array([a, None, [1]], dtype=object)
st = np.zeros(3, dtype=[('x', 'f4'), ('y', 'i8')])
sv = st['x']
ro = np.arange(3)
ro.flags.writeable = False
z = np.zeros((0, 3))
sc = np.float32(1.5)
d0 = np.array(5.0)

class Sub(np.ndarray):
    pass
sub = np.arange(3.0).view(Sub)
sub.tag = [1]
bc = np.broadcast_to(np.arange(3), (4, 3))
neg = a[::-1]
so = np.array(['a', 'bb'])
dt = np.array(['2020-01-01'], dtype='M8[D]')
rec = np.rec.array([(1, 2.0)], dtype=[('a', 'i4'), ('b', 'f8')])
ma = np.ma.masked_array([1, 2, 3], [0, 1, 0])
fr = np.frombuffer(bytearray(b'12345678'), dtype='u1')
rng = np.random.default_rng(3)
rs = np.random.RandomState(5)
bg = rng.bit_generator
ss = np.random.SeedSequence(7)
N = None
begin()
for i in range(5):
    a += i
    v *= 2
    st['y'][0] += 1
    sv[1] += 2
    o[2].append(i)
    r[0, 1] += 1
    sub += 1
    sub.tag.append(i)
    fr.setflags()
    fr[0] += 1
    neg[0] += 1
    sc = sc + np.float32(0.1)
    d0 += 1
    rec.a += 1
    ma += 1
    if i == 1:
        N = a[1:]
        M = N[::2]
        Q = np.ones((3, 2))[1]
        W = np.array([N], dtype=object) if 0 else np.zeros(2, dtype=st.dtype)
        N2 = np.asfortranarray(np.ones((2, 3)))
        N2[0] = 5
    if i >= 1:
        N += 1
        Q *= 2
        W['x'] += 1
    if i == 1:
        sp = ss.spawn(2)
    step()
    print(a, v, t, r, r.flags.f_contiguous, o, st, sv, ro.flags.writeable, z.shape, sc, type(sc), d0, sub, type(sub), sub.tag, bc[0], neg, so, dt, rec, ma, fr)
    if i >= 1:
        print(N, M, Q, W, N2, N2.flags.f_contiguous, Q.base is not None, sp[0].generate_state(1), ss.n_children_spawned)
    print(rng.random(), rs.rand(), bg is rng.bit_generator, np.random.rand(), rng.spawn(1)[0].random() if hasattr(rng, 'spawn') else 0, rs.randn())
""",
    "arrays that change shape": """
import numpy as np
x = np.ones((3, 4))
y = x[:, 1]
x2 = np.zeros(5)
lst = [x, x[1], x[1][2:]]
w = np.lib.stride_tricks.sliding_window_view(np.arange(6.0), 3)
begin()
for i in range(5):
    x = x * 2 if i % 2 else x + 1
    y += 1
    x2.resize(5 + i, refcheck=False) if i == 2 else None
    x2[-1] = i
    lst[2][0] += 5
    step()
    print(x, y, x2, lst, lst[1].base is lst[0])
""",
    "views of objects": """
import numpy as np
o = np.array([[1], [2], [3]], dtype=object)
v = o[:2]
s = np.zeros(2, dtype=[('a', 'O')]) if 0 else None
begin()
for i in range(4):
    o[0, 0] = o[0, 0] + 1
    step()
    print(o, v)
""",
    "matrices and iterators": """
import numpy as np
m = np.matrix([[1, 2], [3, 4]])
p = np.poly1d([1, 2])
it = np.nditer(np.arange(3)) if 0 else None
g = iter(np.arange(60))
ix = np.ndindex(3, 3)
f = np.vectorize(lambda x: x + 1)
e = enumerate(np.arange(90.0))
begin()
for i in range(4):
    m += 1
    next(g)
    next(ix)
    next(e)
    step()
    print(m, type(m), p(2), next(g), next(ix), f([1, 2]), next(e))
""",
    "arrays of objects": """
import numpy as np
o = np.empty((2, 2), dtype=object)
o[0, 0] = o
l = [1]
o[0, 1] = l
o[1] = [{'a': l}, None]
of = np.asfortranarray(o)
begin()
for i in range(4):
    l.append(i)
    of[1, 1] = i
    if i == 1:
        n = np.array([l, None], dtype=object)
        s = n.copy()
    step()
    print(o[0, 0] is o, o[0, 1] is l, o[1, 0]['a'] is l, of[0, 1] is l, of[1, 1], i < 1 or (n[0] is l, s[0] is l))
""",
    "NumPy's random numbers": """
import numpy as np
begin()
for i in range(4):
    step()
    print(np.random.rand(), np.random.normal())
""",
    "arrays over other memory": """
import numpy as np
b = bytearray(b'1234')
fr = np.frombuffer(b, dtype='u1')
fr2 = np.frombuffer(bytearray(b'12345678'), dtype='u1')
fr3 = np.asarray(memoryview(bytearray(b'abc')))
import array
fr4 = np.frombuffer(array.array('d', [1, 2]))
begin()
for i in range(4):
    fr[0] += 1
    fr2[0] += 1
    fr3[1] += 1
    fr4 += 1
    step()
    print(fr, b, fr2, fr3, fr4)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numpy_goes_on_elsewhere(name: str) -> None:
    needed("numpy")
    assert_carried(PROGRAMS[name])


def test_records_that_hold_objects_are_refused_in_words() -> None:
    needed("numpy")
    text = "import numpy as np\nst = np.zeros(2, dtype=[('a', 'O')])\nbegin()\nstep()\nprint(st)\n"
    assert "st ndarray an array of records that hold objects" in carry(text).refused


OF_TORCH = {
    "models, optimizers, loaders, views, tied weights": """
import torch
torch.manual_seed(0)
a = torch.arange(10.0)
v = a[2:5]
n = a.numpy()
s = a.untyped_storage()
p = torch.nn.Parameter(torch.ones(3))
q = p.data
tied = torch.nn.Linear(2, 2)
t2 = torch.nn.Linear(2, 2)
t2.weight = tied.weight
bf = torch.ones(3, dtype=torch.bfloat16)
tr = torch.arange(6).view(2, 3).t()
ex = torch.ones(1).expand(3)
em = torch.empty(0)
g = torch.Generator().manual_seed(3)
m = torch.nn.Sequential(tied, torch.nn.BatchNorm1d(2), torch.nn.Dropout(), t2)
o = torch.optim.Adam(m.parameters(), lr=0.1)
sch = torch.optim.lr_scheduler.StepLR(o, 2)
h = []
hk = tied.register_forward_hook(lambda m, i, o: h.append(1))
K = None
ema = {k: v.clone() for k, v in m.state_dict().items()}
flat = torch.cat([x.reshape(-1) for x in m.parameters()])
dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(20.0).view(10, 2)), batch_size=2, shuffle=True)
it = iter(dl)
begin()
for i in range(5):
    a += i
    v *= 2
    q += 1
    bf += 1
    tr += 1
    l = m(next(it)[0]).sum()
    o.zero_grad()
    l.backward()
    o.step()
    sch.step()
    if i == 1:
        K = a[3:]
        G = p * 2
        P2 = torch.nn.Parameter(K[:2])
        D = torch.ones(3).requires_grad_()
        D.grad = torch.ones(3)
        TT = torch.nn.Linear(2, 1)
    if i >= 1:
        K += 1
        D.data += 1
    for k, x in m.state_dict().items():
        ema[k].mul_(0.5).add_(x) if x.is_floating_point() else None
    step()
    print(a.tolist(), v.tolist(), n.tolist(), s.data_ptr() == a.data_ptr(), p.tolist(), t2.weight is tied.weight, bf.tolist(), tr.tolist(), ex.stride(), torch.rand(1, generator=g).item(), l.item(), sch.get_last_lr(), len(h), [x.tolist() for x in ema.values()], o.param_groups[0]['params'][0] is tied.weight, torch.rand(1).item())
    if i >= 1:
        print(K.tolist(), K.data_ptr() - a.data_ptr(), G.tolist(), P2.data_ptr() == K.data_ptr(), D.grad.tolist(), D.tolist(), TT(torch.ones(2)).item(), G.requires_grad)
""",
    "sparse, conjugated, subclassed and with a graph": """
import torch
x = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,))
r = torch.ones(3, requires_grad=True)
y = r * 2

class Sub(torch.Tensor):
    pass
s = torch.ones(2).as_subclass(Sub)
s.z = [1]
c = torch.ones(2, dtype=torch.complex64)
cj = c.conj()
p = torch.arange(4.0)
v = p[1:]
begin()
for i in range(4):
    with torch.no_grad():
        r += 1
    x = x * 2
    s.z.append(i)
    s += 1
    kept = y
    y = r * 2
    c += 1
    p += 1
    step()
    print(x.to_dense().tolist(), r.tolist(), y.detach().tolist(), y.requires_grad, s.tolist(), s.z, type(s), cj.resolve_conj().tolist(), v.tolist(), v._base is p or v.data_ptr() - p.data_ptr())
""",
}


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Carried]:
    needed("torch")
    return carry_elsewhere(OF_TORCH, with_torch())


@pytest.mark.parametrize("name", OF_TORCH)
def test_torch_goes_on_elsewhere(name: str, of_torch: dict[str, Carried]) -> None:
    of_torch[name].check()


def test_memory_lives_as_long_as_what_is_made_on_it() -> None:
    """X1. A tensor that is put back may be made on memory of the beginning, and outlive what it was found by."""
    owner = numpy.arange(1000)
    gone = weakref.ref(owner)
    there = bytes_at(owner.ctypes.data, owner.nbytes, owner)
    view = there[8:]
    del owner, there
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_memory_that_nothing_shows_is_not_compared() -> None:
    """A loss of torch lies in the memory of the squares it was made from; what SciPy prunes shows a part of what was there."""
    torch = needed("torch")
    blocks = Blocks()
    BLOCKS.append(blocks)
    try:
        whole = numpy.arange(100.0)
        part, held = whole[10:20], numpy.arange(50.0)
        other = held[:5]
        loss = torch.zeros(64).resize_(1)
        for array in (part, whole, other, held):
            NUMPY_ARRAY.content(array)
        names = {address: name for (address, _), name in blocks.names.items()}
        of_whole = names[whole.__array_interface__["data"][0]]
        TENSOR.content(loss)
        of_loss = blocks.names[loss.untyped_storage().data_ptr(), 256]
        assert blocks.shown(lambda array: False) == {of_loss: [[0, 4]]}
        del whole, array
        assert blocks.shown(lambda array: False) == {of_loss: [[0, 4]], of_whole: [[80, 160]]}
    finally:
        BLOCKS.pop()
    memory = numpy.arange(200, dtype="uint8")
    before = digest_of_holder(memory, [[80, 160]])
    memory[5] = 0
    assert digest_of_holder(memory, [[80, 160]]) == before
    memory[90] = 0
    assert digest_of_holder(memory, [[80, 160]]) != before


def test_a_tensor_whose_graph_is_gone_is_made_where_no_graph_is_needed() -> None:
    torch = needed("torch")
    with torch.no_grad():
        made = _lost_graph(torch.ones(2), "MulBackward0")
    assert made.requires_grad
    with pytest.raises(NotResumable, match="MulBackward0"):
        made.sum().backward()


def test_a_file_that_is_mapped_to_be_read_goes_on_elsewhere(tmp_path: Path) -> None:
    assert_carried(f"""
import numpy as np
np.arange(40, dtype="u2").tofile({str(tmp_path / "tokens")!r})
np.save({str(tmp_path / "saved.npy")!r}, np.asfortranarray(np.arange(40.0).reshape(8, 5)))
class Tokens:
    def __init__(self): self.data = np.memmap({str(tmp_path / "tokens")!r}, dtype="u2", mode="r", offset=4)
tokens, part = Tokens(), None
saved = np.load({str(tmp_path / "saved.npy")!r}, mmap_mode="r")
early = saved[2:, 1]
begin()
for n in range(6):
    late = Tokens()
    part = late.data[n:][::2] if n % 2 else tokens.data[n:]
    plain = np.asarray(saved)[n:, 3]
    step()
    print(tokens.data[n], part[:3], plain[0], early[0], type(part).__name__, saved[n], late.data.offset)
""")


def test_a_file_that_is_mapped_to_be_written_is_refused(tmp_path: Path) -> None:
    refused = carry(f"""
import numpy as np
mine = np.memmap({str(tmp_path / "mine")!r}, dtype="u2", mode="w+", shape=(4,))
begin()
for n in range(4):
    step()
""").refused
    assert refused == "mine.base mmap "


def test_functions_of_arrays_that_were_made_of_functions_of_elements_go_on_elsewhere() -> None:
    assert_carried("""
import numpy as np
twice = np.frompyfunc(lambda one, other: one * 2 + other, 2, 1)
more = np.vectorize(lambda one: one + 1.5, otypes=[float])
more(np.arange(3))
begin()
for n in range(6):
    late = np.frompyfunc(lambda one: one + n, 1, 1)
    found = twice(n, 1), more(np.arange(n + 1)), np.add.reduce([n, 1])
    step()
    print(found, late(1))
""")
