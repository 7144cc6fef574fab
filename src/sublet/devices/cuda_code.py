"""The code of CUDA modules: the kind of a source, its kernels' parameters, argument layout, and NVRTC.

Rules of this file:
- It needs no GPU and no driver library; NVRTC is imported only when CUDA C is compiled.
- Signatures come from PTX. Arguments are checked against them before the device reads them, because it would
  read whatever it finds there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sublet.core.errors import BadInput, CompileFailed, MissingExtra
from sublet.core.progress.kernel_arguments import Scalar

INSTALL_NVRTC = "pip install nvidia-cuda-nvrtc"


@dataclass(frozen=True, slots=True)
class Param:
    """One argument a kernel takes: its PTX type without the dot, and its size in bytes."""

    type: str
    size: int

    def takes(self, arg: Scalar | Memory) -> bool:
        if isinstance(arg, Memory):
            return self.size == 8 and self.type[0] in "ub"
        if self.size != len(arg.encoded()) or "[" in self.type:
            return False
        return self.type[0] == "b" or (self.type[0] == "f") == (arg.kind[0] == "f")


@dataclass(frozen=True, slots=True)
class Memory:
    """One buffer."""

    address: int
    size: int


@dataclass(slots=True)
class Code:
    """One module. `signatures` is known when its PTX is; each function is looked up once."""

    handle: Any
    signatures: Mapping[str, tuple[Param, ...]] | None
    functions: dict[str, tuple[Any, tuple[Param, ...] | None]] = field(default_factory=dict)


ELF = b"\x7fELF"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PTX = re.compile(r"\s*\.version\s+\d+\.\d+\s+\.target\s")
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([usbf])(\d+)\b[^\[,]*(?:\[(\d+)\])?")


def source_kind(source: str | bytes) -> str:
    """Return 'ptx', 'cubin' or 'cuda-c', by content."""
    if isinstance(source, bytes) and source.startswith(ELF):
        return "cubin"
    try:
        text = source.decode() if isinstance(source, bytes) else source
    except UnicodeDecodeError as e:
        raise BadInput("the module is neither PTX, a cubin nor CUDA C: it is binary, and not ELF") from e
    if not text.strip("\0 \t\r\n"):
        raise BadInput("the module is empty: give PTX, a cubin or CUDA C")
    return "ptx" if _PTX.match(_COMMENT.sub(" ", text)) else "cuda-c"


def read_signatures(ptx: str) -> dict[str, tuple[Param, ...]]:
    """Return the parameters of each `.entry` of a PTX text, in order."""
    found: dict[str, tuple[Param, ...]] = {}
    for name, params in _ENTRY.findall(_COMMENT.sub(" ", ptx)):
        found[name] = tuple(
            Param(f"{kind}{bits}[{count}]", int(bits) // 8 * int(count))
            if count
            else Param(f"{kind}{bits}", int(bits) // 8)
            for kind, bits, count in _PARAM.findall(params)
        )
    return found


def check_arguments(kernel: str, params: tuple[Param, ...], args: Sequence[Scalar | Memory]) -> None:
    takes = f"it takes ({', '.join(p.type for p in params)})"
    if len(params) != len(args):
        raise BadInput(f"{kernel} takes {len(params)} arguments, not {len(args)}: {takes}")
    for place, (param, arg) in enumerate(zip(params, args, strict=True)):
        if not param.takes(arg):
            given = arg.kind if isinstance(arg, Scalar) else "a buffer"
            raise BadInput(f"argument {place} of {kernel} is {given}, the kernel wants {param.type}: {takes}")


def pack(args: Sequence[Scalar | Memory]) -> tuple[bytes, tuple[int, ...]]:
    """Lay the arguments out as the device does, each as wide as its type and aligned to that; also return
    where each begins."""
    block, offsets = bytearray(), []
    for arg in args:
        value = arg.encoded() if isinstance(arg, Scalar) else arg.address.to_bytes(8, "little")
        block += bytes(-len(block) % len(value))
        offsets.append(len(block))
        block += value
    return bytes(block), tuple(offsets)


def compile_cuda_c(source: str | bytes, arch: str) -> tuple[bytes, bytes]:
    """Compile CUDA C to PTX and cubin for an architecture such as 'sm_90', through NVRTC. Needs no GPU."""
    try:
        nvrtc: Any = import_module("cuda.bindings.nvrtc")
        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as e:
        raise MissingExtra(
            "this source is CUDA C, and NVRTC that would compile it is not installed "
            "(the package nvidia-cuda-nvrtc)",
            remedy=f"{INSTALL_NVRTC}, or load PTX or a cubin",
        ) from e
    text = source.encode() if isinstance(source, str) else source
    code, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], [])
    if int(code):
        raise CompileFailed(f"NVRTC did not take the source: {_nvrtc_words(nvrtc, code)}")
    try:
        options = [f"--gpu-architecture={arch}".encode()]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code):
            log = _nvrtc_text(nvrtc, "ProgramLog", program).strip(b"\0 \n").decode(errors="replace")
            raise CompileFailed(
                f"NVRTC {major}.{minor} did not compile the source for {arch}: "
                f"{_nvrtc_words(nvrtc, code)}\n{log}"
            )
        return _nvrtc_text(nvrtc, "PTX", program), _nvrtc_text(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc_words(nvrtc: Any, code: Any) -> str:
    return str(nvrtc.nvrtcGetErrorString(code)[1].decode(errors="replace"))


def _nvrtc_text(nvrtc: Any, what: str, program: Any) -> bytes:
    code, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    text = bytes(size)  # NVRTC writes into it; nobody else has seen it yet
    if not int(code):
        (code,) = getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    if int(code):
        raise CompileFailed(f"NVRTC gave no {what}: {_nvrtc_words(nvrtc, code)}")
    return text
