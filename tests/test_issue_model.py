# SPDX-License-Identifier: Apache-2.0
"""The issue model on SASS written by hand: what it counts can be counted on paper.

tests/kernels/test_hot_loop.py has the loops of our kernels, counted by kind.
"""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from benchmarks.issue_model import nvdisasm
from benchmarks.issue_model.__main__ import main
from benchmarks.issue_model.chips import AD102, GA102, GH100
from benchmarks.issue_model.hot_path import main_loop
from benchmarks.issue_model.pipes import pipe_clocks
from benchmarks.issue_model.registers import access
from benchmarks.issue_model.sass import Instruction, parse
from benchmarks.issue_model.scheduler import Warps, clocks_a_pass

_ONE_WARP = Warps(thread_blocks=1, each=1)


def listing_of(body: str) -> str:
    """As nvdisasm prints a kernel, after one that is another's."""
    lines = [
        line if line.startswith(".") or not line.strip() else f"        /*{16 * at:04x}*/  {line}"
        for at, line in enumerate(body.splitlines())
    ]
    other = '\t.section\t.text.other,"ax",@progbits\n        /*0000*/    EXIT ;\n'
    return other + '\t.section\t.text.attend,"ax",@progbits\n' + "\n".join(lines)


def instruction(text: str) -> Instruction:
    return parse(listing_of(f"{text} ;"), "attend").instructions[0]


def path(*texts: str) -> list[Instruction]:
    return [instruction(text) for text in texts]


def test_a_kernel_without_products_or_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no loop"):
        main_loop(parse(listing_of("EXIT ;"), "attend"))
    with pytest.raises(ValueError, match="no kernel score"):
        parse(listing_of("EXIT ;"), "score")


def test_pipes_are_filled_for_the_clocks_of_their_rates() -> None:
    few = path(
        "IMMA.16832.S8.S8 R12, R4.ROW, R8.COL, R12",
        "LDSM.16.M88.4 R8, [R2]",
        "SHFL.BFLY PT, R16, R12, 0x1, 0x1f",
        "MUFU.EX2 R17, R16",
        "IMAD R1, R2, R3, R4",
    )
    # 4,096 multiply-adds at 256 a scheduler; LDSM 512 bytes, SHFL 128, at 32 a scheduler.
    assert pipe_clocks(few, GA102) == {
        "issue": 5, "tensor": 16, "XU": 8, "FMA": 2, "ALU": 0, "shared memory": 16 + 4,
    }  # fmt: skip
    assert pipe_clocks(few, GH100)["tensor"] == pytest.approx(6.4)


def test_products_with_float32_sums_take_twice_as_long_on_geforce() -> None:
    ada = [
        AD102.product_clocks(Instruction(opcode))
        for opcode in ("HMMA.16816.F32", "HMMA.16816.F16", "QMMA.16832.F32.E4M3.E4M3")
    ]
    assert ada == [32, 16, 32]
    for unknown in ("QMMA.16832.F32.E4M3.E4M3", "QMMA.SF.16832.F32.E4M3.E4M3.E8"):
        with pytest.raises(ValueError, match=r"QMMA.*not known"):
            GA102.product_clocks(Instruction(unknown))


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("FFMA R12, R31.reuse, R52, R12", "R31 R52 R12", "R12"),
        ("@!P1 LDS.64 R28, [R15+UR4+0x10]", "P1 R15 UR4", "R28 R29"),
        ("STS.64 [R28+0x8640], R26", "R28 R26 R27", ""),
        ("LDGSTS.E.BYPASS.128 [R31], desc[UR10][R24.64]", "R31 UR10 R24 R25", ""),
        ("LDSM.16.M88.4 R40, [R28+0x800]", "R28", "R40 R41 R42 R43"),
        ("ISETP.GE.AND P0, PT, R2, UR4, P3", "R2 UR4 P3", "P0"),
        ("LOP3.LUT P0, R111, R112, RZ, R113, 0xa0, !PT", "R112 R113", "P0 R111"),
        ("IADD3.X R27, P1, R27, c[0x0][0x1f4], RZ, P2, !PT", "R27 P2", "R27 P1"),
        ("SHFL.BFLY PT, R51, R50, 0x1, 0x1f", "R50", "R51"),
        ("VOTE.ANY P0, P1", "P1", "P0"),
        ("IMAD.WIDE R26, R31, 0x1000, R24", "R31 R24 R25", "R26 R27"),
        ("SEL R50, R105.reuse, R50, P0", "R105 R50 P0", "R50"),
        ("@P0 BRA P1, `(.L_x_252)", "P0 P1", ""),
        (
            "IMMA.16832.S8.S8 R44, R20.reuse.ROW, R68.COL, R72",
            "R20 R21 R22 R23 R68 R69 R72 R73 R74 R75",
            "R44 R45 R46 R47",
        ),
        ("HMMA.16816.F16 R44, R20, R68, RZ", "R20 R21 R22 R23 R68 R69", "R44 R45"),
    ],
)
def test_registers_of_an_instruction(text: str, reads: str, writes: str) -> None:
    used = access(instruction(text))
    assert (" ".join(used.reads), " ".join(used.writes)) == (reads, writes)


@pytest.mark.parametrize(
    ("texts", "warps", "clocks"),
    [
        (["NOP"] * 10, Warps(3, 1), 10),  # one instruction a clock
        (["FADD R1, R2, R3", "FADD R4, R5, R6"], Warps(4, 1), 2),  # two pipes of two clocks
        (["IMAD R1, R2, R3, R4", "IMAD R5, R6, R7, R8"], Warps(4, 1), 4),  # one of them
        (["FADD R1, R1, R2"] * 5, _ONE_WARP, 20),  # each waits for the one before
        (["FADD R1, R1, R2"] * 5, Warps(2, 1), 10),  # two warps hide half of that
        (["IMMA.16832.S8.S8 R4, R8, R12, RZ"] * 3, Warps(3, 1), 48),  # tensor cores are full
        (["IMMA.16832.S8.S8 R4, R8, R12, R4"] * 3, _ONE_WARP, 3 * 34),
        (["NOP", "BAR.SYNC 0x0"], _ONE_WARP, 31),
        (["NOP", "BAR.SYNC 0x0"], Warps(1, 2), 16.5),  # the second warp's issue, then both wait
    ],
)
def test_clocks_of_a_pass(texts: list[str], warps: Warps, clocks: float) -> None:
    assert clocks_a_pass(path(*texts), GA102, warps) == pytest.approx(clocks, rel=0.02)


def test_without_the_disassembler_the_tool_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-nvdisasm"):
        main([])


def test_the_wheels_disassembler_is_found(monkeypatch, tmp_path) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (folder / "nvdisasm").touch()
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    spec = importlib.util.spec_from_file_location(
        "nvidia",
        tmp_path / "nvidia" / "__init__.py",
        submodule_search_locations=[str(tmp_path / "nvidia")],
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert nvdisasm.program() == str(folder / "nvdisasm")


def test_a_kernel_that_is_not_built_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "sm_86", "--element", "INT8_E4M3"])
    assert "attend-sm_86-d64-int8_e4m3 is not built" in capsys.readouterr().err
