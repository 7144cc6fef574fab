"""CUDA modules and the arguments of their kernels, without any library."""

from __future__ import annotations

import struct

import pytest

from sublet.core.errors import BadInput
from sublet.core.progress.kernel_arguments import Scalar, f32, f64, i32, i64, u32, u64
from sublet.devices.cuda_code import Memory, check_arguments, pack, read_signatures, source_kind
from tests.devices.cuda_shim import PTX


@pytest.mark.parametrize(
    ("args", "block", "offsets"),
    [
        ([], b"", ()),
        (
            [u64(42), u32(4), Memory(0x0102030405060708, 4)],
            struct.pack("<QI4xQ", 42, 4, 0x0102030405060708),
            (0, 8, 16),
        ),
        ([u32(1), f32(-0.0), u32(2)], struct.pack("<IfI", 1, -0.0, 2), (0, 4, 8)),
        ([f32(0.1), f64(0.1)], struct.pack("<f4xd", 0.1, 0.1), (0, 8)),
        ([i32(-1), i64(-1), i32(-2)], struct.pack("<i4xqi", -1, -1, -2), (0, 8, 16)),
    ],
    ids=["none", "recipe", "narrow", "reals", "signed"],
)
def test_arguments_are_as_wide_as_their_type_and_aligned_to_it(
    args: list[Scalar | Memory], block: bytes, offsets: tuple[int, ...]
) -> None:
    assert pack(args) == (block, offsets)


def test_a_source_is_known_by_its_content() -> None:
    ptx = PTX.read_text()
    assert source_kind(ptx) == source_kind(ptx.encode()) == "ptx"
    assert source_kind("/* made\n by hand */ // twice\n .version 8.0\n.target sm_70\n") == "ptx"
    assert source_kind(b"\x7fELF\x02\x01") == "cubin"
    assert source_kind('// .version 8.0 .target\nextern "C" __global__ void f() {}') == "cuda-c"
    for junk in (b"\xff\xfe\x00binary", "", " \n", b"\0"):
        with pytest.raises(BadInput, match=r"neither PTX|empty"):
            source_kind(junk)


def test_signatures_are_read_from_ptx() -> None:
    found = read_signatures("""
        // .entry commented(.param .u32 a)
        /* .entry commented_too() */
        .version 8.3
        .target sm_70
        .func helper(.param .u32 a) { ret; }
        .visible .entry plain(.param .u32 plain_0, .param .f64 plain_1) { ret; }
        .weak .entry pointers(
            .param .u64 .ptr .global .align 16 pointers_0, // the input
            .param .align 8 .b8 pointers_1[24],
            .param .b32 pointers_2
        )
        .maxntid 128, 1, 1
        { ret; }
        .entry bare { ret; }
        .entry $odd%name() { ret; }
    """)
    assert {name: [(p.type, p.size) for p in params] for name, params in found.items()} == {
        "plain": [("u32", 4), ("f64", 8)],
        "pointers": [("u64", 8), ("b8[24]", 24), ("b32", 4)],
        "bare": [],
        "$odd%name": [],
    }


MEMORY = Memory(4096, 16)


@pytest.mark.parametrize(
    ("kernel", "args", "words"),
    [
        ("train_step", [], "train_step takes 3 arguments, not 0: it takes (u64, u32, u64)"),
        ("train_step", [u64(1), u32(1), MEMORY, u32(1)], "takes 3 arguments, not 4"),
        ("train_step", [u32(1), u32(1), MEMORY], "argument 0 of train_step is u32, the kernel wants u64"),
        ("train_step", [u64(1), u64(1), MEMORY], "argument 1 of train_step is u64, the kernel wants u32"),
        (
            "train_step",
            [u64(1), MEMORY, u32(1)],
            "argument 1 of train_step is a buffer, the kernel wants u32",
        ),
        ("train_step", [f64(1), u32(1), MEMORY], "argument 0 of train_step is f64, the kernel wants u64"),
        ("saxpy", [u32(1), f64(1), MEMORY, MEMORY], "argument 1 of saxpy is f64, the kernel wants f32"),
        ("saxpy", [u32(1), u32(1), MEMORY, MEMORY], "argument 1 of saxpy is u32, the kernel wants f32"),
        ("saxpy", [f32(1), f32(1), MEMORY, MEMORY], "argument 0 of saxpy is f32, the kernel wants u32"),
        ("fill64", [MEMORY, u32(1), MEMORY], "argument 0 of fill64 is a buffer, the kernel wants f64"),
        ("takes_pair", [MEMORY, MEMORY], "argument 0 of takes_pair is a buffer, the kernel wants b8[16]"),
    ],
)
def test_arguments_a_kernel_does_not_take(kernel: str, args: list[Scalar | Memory], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_arguments(kernel, read_signatures(PTX.read_text())[kernel], args)
    assert words in refused.value.message
    assert "it takes (" in refused.value.message


def test_signed_numbers_go_where_ptx_says_unsigned() -> None:
    """PTX of a compiler spells both the same."""
    check_arguments("ramp", read_signatures(PTX.read_text())["ramp"], [i32(-1), i64(-1), u32(1), MEMORY])
