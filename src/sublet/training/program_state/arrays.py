"""Arrays of NumPy, tensors of torch, arrays of JAX, and generators of random numbers.

Rules of this file:
- An array knows its block of memory and what part of it it is. An array that owns its memory owns it again;
  a view of another array is a view of that array again.
- A tensor that is the result of a graph keeps its numbers. Whoever goes backward through it after a resume
  is told that its graph is gone.
- An array whose shape changed since the loop began is made anew; a tensor can take another memory in place.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sublet.training.program_state.cpython.frame_memory import NotResumable
from sublet.training.program_state.kinds import Kind, Parts, Reduced, Unknown, Value, attributes_of
from sublet.training.program_state.memory import (
    Blocks,
    memory_of,
    numpy_here,
    torch_here,
    use_as,
    with_arrays,
    with_bytes,
)

#: Where takings look for the blocks of the arrays they meet.
BLOCKS: list[Blocks] = []


def _numpy() -> Any:
    return import_module("numpy")


# --- NumPy --------------------------------------------------------------------------------------------------


class NumpyArrayKind(Kind):
    def parts(self, thing: Any) -> Parts:
        if thing.base is not None and not isinstance(thing.base, (bytes, str)) and not _is_read_map(thing):
            yield ".base", thing.base
        if thing.dtype == object and thing.base is None:
            yield from ((f".flat[{at}]", member) for at, member in enumerate(thing.ravel().tolist()))
        for name, value in (_attributes(thing) or {}).items():
            yield f".{name}", value

    def note(self, thing: Any) -> Any:
        return _address(thing), thing.shape, thing.strides, thing.dtype

    def still_is(self, thing: Any, note: Any) -> bool:
        return bool(self.note(thing) == note)

    def content(self, thing: Any) -> Any:
        _check_records(thing)
        attributes = _attributes(thing)
        root = _root(thing)
        found: Any
        if _is_read_map(root):
            found = None
        elif root is not thing:
            found = root
            if root.base is None and thing.size and not thing.dtype.hasobject:
                BLOCKS[-1].viewed(root, thing, *_bounds(thing))
        elif thing.base is None:
            found = thing.ravel(order="K").tolist() if thing.dtype == object else _place(thing)
        else:  # whose memory it is has to be saved, too
            function, arguments = _view_of_others(thing, type(thing), thing.base)
            found = {"of": arguments[4]} if function in (view_of_buffer, view_of_tensor) else _place(thing)
        return found, dict(attributes) if attributes else None, bool(thing.flags.writeable)

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        kind = type(thing)
        _check_records(thing)
        if thing.dtype == object and thing.base is not None:
            raise Unknown(thing, "a view of an array of objects")
        base = thing.base
        if base is None:
            order = "C" if thing.flags.c_contiguous else "F"
            block = "" if thing.dtype == object else _place(thing)[0]
            return new_array, (kind, block, thing.dtype, thing.shape, order)
        root = _root(thing)
        if root is not thing and (root.base is None or _is_read_map(root)) and not root.dtype.hasobject:
            return view_of_array, (kind, root, thing.dtype, thing.shape, thing.strides, _offset(thing, root))
        return _view_of_others(thing, kind, root.base)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        found, attributes, writeable = content
        if isinstance(found, list):
            flat = thing.ravel(order="K")
            flat[:] = _objects(found)
            if not _numpy().shares_memory(flat, thing):
                thing[...] = flat.reshape(thing.shape)
        if attributes is not None:
            there = attributes_of(thing)
            assert there is not None
            mapped = {_MAP: vars(_root(thing))[_MAP]} if _is_read_map(_root(thing)) and _MAP in there else {}
            there.clear()
            there.update({**attributes, **mapped})
        if thing.flags.writeable != writeable:
            thing.flags.writeable = writeable


_MAP = "_mmap"  # the attribute of a `numpy.memmap`


def _is_read_map(array: Any) -> bool:
    """A file that was mapped to be read: what it holds is the file's, and who maps it again has the same."""
    kind = type(array)
    known = kind.__name__ == "memmap" and kind.__module__.startswith("numpy")
    is_root = known and array.base is getattr(array, _MAP, None)
    return is_root and array.mode == "r" and array.filename is not None


def _attributes(thing: Any) -> dict[str, Any] | None:
    found = attributes_of(thing)
    if found and _MAP in found and _is_read_map(_root(thing)):
        return {name: value for name, value in found.items() if name != _MAP}
    return found


def _check_records(thing: Any) -> None:
    """Their bytes are addresses."""
    if thing.dtype.hasobject and thing.dtype != object:
        raise Unknown(thing, "an array of records that hold objects")


def _objects(members: list[Any]) -> Any:
    made = _numpy().empty(len(members), dtype=object)
    for at, member in enumerate(members):
        made[at] = member
    return made


def _view_of_others(thing: Any, kind: type, base: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A view of what is no array: a tensor, bytes, a buffer, a mapped file."""
    torch = torch_here()
    shape = (kind, thing.dtype, thing.shape, thing.strides)
    if torch is not None and isinstance(base, torch.Tensor):
        return view_of_tensor, (*shape, base, _address(thing) - base.untyped_storage().data_ptr())
    if kind.__name__ == "memmap" and kind.__module__.startswith("numpy") and thing.mode is not None:
        if thing.filename is None:
            raise Unknown(thing, "a mapped file without a name")
        block = "" if thing.mode == "r" else _place(thing)[0]
        mode = "r+" if thing.mode == "w+" else thing.mode
        return mapped_file, (str(thing.filename), thing.dtype, mode, thing.offset, thing.shape, block)
    exporter = base.obj if isinstance(base, memoryview) else base
    if isinstance(exporter, (bytes, bytearray)) or type(exporter).__module__ in (
        "array",
        "ctypes",
        "_ctypes",
    ):
        begins = _numpy().frombuffer(exporter, dtype="uint8").__array_interface__["data"][0]
        return view_of_buffer, (*shape, exporter, _address(thing) - begins)
    block, offset = _place(thing)
    return view_of_block, (*shape, block, offset)


def _root(array: Any) -> Any:
    numpy = _numpy()
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _offset(array: Any, root: Any) -> int:
    return _address(array) - int(_bounds(root)[0])


def _bounds(array: Any) -> tuple[int, int]:
    low, high = _numpy().lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _place(array: Any) -> tuple[str, int]:
    low, high = _bounds(array) if array.size else (0, 0)
    name, offset = BLOCKS[-1].place(low, high - low, array)
    BLOCKS[-1].shows(name, offset, offset + high - low)
    return name, offset


def place_of_array(array: Any) -> tuple[int, int] | None:
    """Address and size of its memory, if it owns it."""
    if array.base is not None or array.dtype.hasobject or not array.size:
        return None
    low, high = _bounds(array)
    return low, high - low


def new_array(kind: type, block: str, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    numpy = _numpy()
    made = numpy.ndarray.__new__(kind, shape, dtype, order=order)
    if block:
        low, high = _bounds(made)
        own = numpy.frombuffer((ctypes.c_ubyte * (high - low)).from_address(low), dtype=numpy.uint8)
        if not use_as(block, own):  # another view of it came first
            made = numpy.ndarray.__new__(kind, shape, dtype, buffer=memory_of(block), order=order)
    return made


def view_of_array(
    kind: type, root: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Any:
    numpy = _numpy()
    if root.flags.c_contiguous or root.flags.f_contiguous:
        flat = root.ravel(order="K").view(numpy.ndarray)
        return numpy.ndarray.__new__(kind, shape, dtype, flat.view(numpy.uint8), offset, strides)
    raise Unknown(root, "an array that lies in memory with gaps")


def view_of_tensor(
    kind: type, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], base: Any, offset: int
) -> Any:
    torch = torch_here()
    whole = torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage()).numpy()
    return _numpy().ndarray.__new__(kind, shape, dtype, whole, offset, strides)


def view_of_buffer(
    kind: type, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], exporter: Any, offset: int
) -> Any:
    return _numpy().ndarray.__new__(kind, shape, dtype, exporter, offset, strides)


def view_of_block(
    kind: type, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], block: str, offset: int
) -> Any:
    return _numpy().ndarray.__new__(kind, shape, dtype, memory_of(block), offset, strides)


def mapped_file(name: str, dtype: Any, mode: str, offset: int, shape: tuple[int, ...], block: str) -> Any:
    numpy = _numpy()
    made = numpy.memmap(name, dtype=dtype, mode=mode, offset=offset, shape=shape)
    if block:
        use_as(block, made.reshape(-1).view(numpy.uint8))
    return made


# --- torch --------------------------------------------------------------------------------------------------


class TensorKind(Kind):
    def parts(self, thing: Any) -> Parts:
        if thing.is_leaf and thing.grad is not None:
            yield ".grad", thing.grad
        for name, value in (attributes_of(thing) or {}).items():
            yield f".{name}", value
        if thing._backward_hooks is not None:
            yield "._backward_hooks", thing._backward_hooks

    def content(self, thing: Any) -> Any:
        attributes = attributes_of(thing)
        graph = _graph_of(thing)
        return (
            _view(thing),
            bool(thing.requires_grad),
            thing.grad if thing.is_leaf else None,
            dict(attributes) if attributes else None,
            thing._backward_hooks if not graph else None,
            graph,
        )

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return new_tensor, (type(thing), _view(thing), bool(thing.requires_grad), _graph_of(thing))

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        view, requires_grad, grad, attributes, hooks, graph = content
        torch = torch_here()
        if not graph:
            with torch.no_grad():
                made = tensor_on(view)
                if _where(made) != _where(thing):
                    thing.data = made
            if thing.is_leaf and thing.requires_grad != requires_grad:
                thing.requires_grad_(requires_grad)
            if thing.is_leaf and thing.grad is not grad:
                thing.grad = grad
        there = attributes_of(thing)
        if there is not None and (attributes or there):
            there.clear()
            there.update(attributes or {})
        if hooks is not None and thing._backward_hooks is not hooks:
            thing._backward_hooks = hooks


def _graph_of(tensor: Any) -> str:
    node = tensor.grad_fn
    return "" if node is None else str(node.metadata.get(_GONE) or node.name())


def _where(tensor: Any) -> Any:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _view(tensor: Any) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    name, offset = BLOCKS[-1].place(storage.data_ptr(), storage.nbytes(), storage)
    if tensor.numel():
        begins = offset + tensor.storage_offset() * tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        BLOCKS[-1].shows(name, begins, begins + (last + 1) * tensor.element_size())
    return (
        name,
        offset,
        str(tensor.dtype).removeprefix("torch."),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        storage.nbytes(),
        str(tensor.device),
    )


def place_of_tensor(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def tensor_on(view: tuple[Any, ...]) -> Any:
    torch = torch_here()
    name, offset, dtype, begins, shape, strides, size, device = view
    if not name:
        storage = torch.UntypedStorage(size, device=device)
    else:
        memory = memory_of(name)
        if device == "cpu":
            storage = torch.from_numpy(memory[offset : offset + size]).untyped_storage()
        else:
            storage = _on_device(name, memory, device)
    made = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    return made.set_(storage, begins, shape, strides)


def _on_device(name: str, memory: Any, device: str) -> Any:
    torch = torch_here()
    if hasattr(memory, "untyped_storage"):
        return memory.untyped_storage()
    return torch.from_numpy(memory).to(device).untyped_storage()


def new_tensor(kind: type, view: tuple[Any, ...], requires_grad: bool, graph: str) -> Any:
    torch = torch_here()
    made = tensor_on(view)
    if graph:
        return _lost_graph(made, graph)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(made, requires_grad=requires_grad)
    if kind is not torch.Tensor:
        return torch.Tensor._make_subclass(kind, made, requires_grad)
    return made.requires_grad_(requires_grad) if requires_grad else made


def _lost_graph(numbers: Any, graph: str) -> Any:
    """The same numbers, and an error for whoever needs how they came about."""
    torch = torch_here()

    class GraphIsGone(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, anchor: Any, numbers: Any) -> Any:
            ctx.mark_dirty(numbers)
            return numbers

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotResumable(
                f"the script goes backward through a tensor ({graph}) from before the resume, whose graph "
                "cannot be saved; nothing was saved since",
                remedy="end each graph in its own step (detach() what is kept), or make the step larger with "
                "--loop LINE",
            )

    with torch.inference_mode(False), torch.enable_grad():  # the program may stand where it needs none
        anchor = torch.zeros((), requires_grad=True)
        made = GraphIsGone.apply(anchor, numbers)
    made.grad_fn.metadata[_GONE] = graph
    return made


#: Where a node says which one it stands for.
_GONE = "sublet: the graph that is gone"


class DeviceGeneratorKind(Kind):
    """`torch.Generator`."""

    def content(self, thing: Any) -> Any:
        return bytes(thing.get_state().cpu().numpy())

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(thing), (str(thing.device),)

    @staticmethod
    def fill(thing: Any, content: bytes) -> None:
        torch = torch_here()
        thing.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))


class StorageKind(Kind):
    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch = torch_here()
        bare = torch.empty(0, dtype=torch.uint8, device=thing.device).set_(thing)
        view = _view(bare)
        BLOCKS[-1].shows(view[0], view[1], view[1] + thing.nbytes())
        return storage_of, (view,)

    def content(self, thing: Any) -> Any:
        return None

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        pass


def storage_of(view: tuple[Any, ...]) -> Any:
    return tensor_on(view).untyped_storage()


# --- random numbers -----------------------------------------------------------------------------------------


class PythonRandomKind(Kind):
    def content(self, thing: random.Random) -> Any:
        is_the_systems = isinstance(thing, random.SystemRandom)  # which has no state
        return None if is_the_systems else thing.getstate(), dict(vars(thing))

    def bare(self, thing: random.Random) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return random.Random.__new__, (type(thing),)

    @staticmethod
    def fill(thing: random.Random, content: Any) -> None:
        state, attributes = content
        if state is not None:
            random.Random.setstate(thing, state)
        vars(thing).clear()
        vars(thing).update(attributes)


class BitGeneratorKind(Kind):
    """Of NumPy: its state, and the seeds it may still spawn."""

    def parts(self, thing: Any) -> Parts:
        yield ".seed_seq", thing.seed_seq

    def content(self, thing: Any) -> Any:
        state, seeds = thing.__getstate__()
        return with_bytes(state), seeds

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(thing), (0,)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        state, seeds = content
        thing.__setstate__((with_arrays(state), seeds))


class NumpyGeneratorKind(Kind):
    def parts(self, thing: Any) -> Parts:
        yield ".bit_generator", thing.bit_generator

    def content(self, thing: Any) -> Any:
        return thing.bit_generator

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(thing), (thing.bit_generator,)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        pass


class RandomStateKind(Kind):
    def content(self, thing: Any) -> Any:
        return with_bytes(thing.get_state(legacy=False))

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(thing), (getattr(_numpy().random, type(thing._bit_generator).__name__)(0),)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        thing.set_state(with_arrays(content))


# --- JAX ----------------------------------------------------------------------------------------------------


class JaxArrayKind(Reduced):
    """It cannot change. Its numbers are a block like any other."""

    def content(self, thing: Any) -> Any:
        jax = sys.modules["jax"]
        if jax.dtypes.issubdtype(thing.dtype, jax.dtypes.prng_key):
            return _numpy().asarray(jax.random.key_data(thing)), False, str(jax.random.key_impl(thing))
        return _numpy().asarray(thing), bool(thing.weak_type), ""

    def parts(self, thing: Any) -> Parts:
        return ()


def jax_array(numbers: Any, weak_type: bool, key: str) -> Any:
    jax = import_module("jax")
    if key:
        return jax.random.wrap_key_data(numbers, impl=key)
    made = jax.numpy.array(numbers)
    return jax.lax.lax._convert_element_type(made, weak_type=True) if weak_type else made


NUMPY_ARRAY, TENSOR, STORAGE, JAX_ARRAY = NumpyArrayKind(), TensorKind(), StorageKind(), JaxArrayKind()
_PYTHON_RANDOM, _BIT_GENERATOR, _NUMPY_GENERATOR = (
    PythonRandomKind(),
    BitGeneratorKind(),
    NumpyGeneratorKind(),
)
_RANDOM_STATE, _DEVICE_GENERATOR = RandomStateKind(), DeviceGeneratorKind()


def kind_of_array(thing: Any) -> Kind | None:
    """The kind of arrays, tensors and generators of random numbers; None for everything else."""
    cls = type(thing)
    numpy, torch = numpy_here(), torch_here()
    if issubclass(cls, random.Random):
        return _PYTHON_RANDOM
    if numpy is not None:
        if issubclass(cls, numpy.ndarray):
            return NUMPY_ARRAY
        if issubclass(cls, (numpy.generic, numpy.dtype)):
            return _VALUE
        if issubclass(cls, numpy.random.Generator):
            return _NUMPY_GENERATOR
        if issubclass(cls, numpy.random.BitGenerator):
            return _BIT_GENERATOR
        if issubclass(cls, numpy.random.RandomState):
            return _RANDOM_STATE
    if torch is not None:
        if issubclass(cls, torch.Tensor):
            return TENSOR if _is_plain(torch, thing) else None
        if issubclass(cls, torch.Generator):
            return _DEVICE_GENERATOR
        if issubclass(cls, torch.UntypedStorage):
            return STORAGE
        if issubclass(cls, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)):
            return _VALUE
    jax = sys.modules.get("jax") if cls.__module__.startswith("jax") else None
    is_jax = jax is not None and isinstance(thing, jax.Array) and not isinstance(thing, jax.core.Tracer)
    return JAX_ARRAY if is_jax else None


def is_tensor_class(cls: type) -> bool:
    torch = torch_here()
    return torch is not None and issubclass(cls, torch.Tensor)


_VALUE = Value()


def _is_plain(torch: Any, tensor: Any) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and type(tensor).__torch_dispatch__
        in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
    )
