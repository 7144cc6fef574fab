"""Runs small PTX kernels, thread by thread: the shim knows kernels by name, so only this looks at what their
bodies do.

It knows the few instructions our own kernels are written in, and stops at any other. Registers hold whole
numbers; a real number is only ever moved, as its bits. Memory is one bytearray, and a pointer is an offset
into it.
"""

from __future__ import annotations

import itertools
import re

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)\s*\{([^}]*)\}")
_PARAM = re.compile(r"\.param\s+\.\w(\d+)\s+(\w+)")
_ADDRESS = re.compile(r"\[(%?\w+)(?:\+(\d+))?\]")

Shape = tuple[int, int, int]


def run(
    text: str,
    kernel: str,
    args: list[bytes],
    memory: bytearray,
    *,
    grid: Shape = (1, 1, 1),
    block: Shape = (1, 1, 1),
) -> None:
    entries = {name: (params, body) for name, params, body in _ENTRY.findall(re.sub(r"//[^\n]*", "", text))}
    params, body = entries[kernel]
    declared = _PARAM.findall(params)
    assert [int(bits) // 8 for bits, _ in declared] == [len(a) for a in args], (
        "each argument as wide as declared"
    )
    values = {name: int.from_bytes(a, "little") for (_, name), a in zip(declared, args, strict=True)}
    lines = [line.strip() for line in re.split(r"[;\n]|(?<=:)", body) if line.strip()]
    code = [line for line in lines if not line.startswith(".reg")]
    for ctaid in itertools.product(*map(range, grid)):
        for tid in itertools.product(*map(range, block)):
            registers = {f"%ctaid.{a}": n for a, n in zip("xyz", ctaid, strict=True)}
            registers |= {f"%tid.{a}": n for a, n in zip("xyz", tid, strict=True)}
            registers |= {f"%ntid.{a}": n for a, n in zip("xyz", block, strict=True)}
            _thread(code, registers, values, memory)


def _thread(code: list[str], registers: dict[str, int], params: dict[str, int], memory: bytearray) -> None:
    at = 0
    while True:
        line = code[at]
        at += 1
        if line.endswith(":"):
            continue
        if line.startswith("@"):
            guard, line = line.split(None, 1)
            if not registers[guard[1:]]:
                continue
        verb, *rest = line.split(None, 1)
        if verb == "ret":
            return
        operands = [o.strip() for o in rest[0].split(",")]
        if verb == "bra":
            at = code.index(f"{operands[0]}:")
            continue
        _step(verb.split("."), operands, registers, params, memory)


def _step(
    verb: list[str], operands: list[str], registers: dict[str, int], params: dict[str, int], memory: bytearray
) -> None:
    name, size = verb[0], int(verb[-1][1:]) // 8

    def value(operand: str) -> int:
        return registers[operand] if operand.startswith("%") else int(operand)

    def place(operand: str) -> slice:
        match = _ADDRESS.fullmatch(operand)
        assert match is not None, operand
        begin = registers[match[1]] + int(match[2] or 0)
        assert begin % size == 0, "unaligned"
        assert begin + size <= len(memory), "out of memory"
        return slice(begin, begin + size)

    if name == "st":
        stored = value(operands[1]) % (1 << 8 * size)
        memory[place(operands[0])] = stored.to_bytes(size, "little")
        return
    target, *sources = operands
    if name == "ld" and verb[1] == "param":
        result = params[sources[0].strip("[]")]
    elif name == "ld":
        result = int.from_bytes(memory[place(sources[0])], "little")
    elif name == "atom":
        result = int.from_bytes(memory[place(sources[0])], "little")
        changed = (result + value(sources[1])) % (1 << 8 * size)
        memory[place(sources[0])] = changed.to_bytes(size, "little")
    else:
        a, b, c = (*map(value, sources), 0, 0, 0)[:3]
        result = {
            "mov": lambda: a,
            "cvt": lambda: a,
            "cvta": lambda: a,
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mad": lambda: a * b + c,
            "shr": lambda: a >> b,
            "xor": lambda: a ^ b,
            "or": lambda: a | b,
            "setp": lambda: {"ge": a >= b, "ne": a != b}[verb[1]],
        }[name]()
    width = int(verb[-2][1:]) // 8 if name == "cvt" else size
    registers[target] = result % (1 << 8 * width)
