"""What values of a kernel take of registers: the facts that all estimates share."""

from __future__ import annotations

import pytest

from kgen.codegen.machines import MOST_REGISTERS, programs_by_registers, thread_registers
from kgen.codegen.values import most_alive, packed_words, quotients, value_words
from kgen.dsl import ir
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, target

TEXT = """kernel k(x: T[*M, N], d: f64[*M, N]) -> (y: T[*M, N], z: f64[*M, N], c: i32[*M]):
    parallel m in M
    tile n in N
    big = x[m, n] > max(x[m, n], n) / 2.0
    c[m] = sum(i32(big), n)
    y[m, n] = x[m, n] / 3.0
    z[m, n] = d[m, n]
"""


@pytest.fixture(scope="module")
def kernel() -> ir.Kernel:
    module = parse_text(TEXT)
    return target(module, module.kernels[0], Choices(dims={"N": 64}, dtype="bf16")).scheduled("triton").kernel


def test_the_last_use_makes_room_for_what_is_made_there() -> None:
    assert most_alive([(0, 2, 4), (2, 3, 5)]) == 5
    assert most_alive([(0, 3, 4), (2, 3, 5)]) == 9
    assert most_alive([(0, 1, 7), (0, 4, 2), (1, 3, 1), (3, 4, 6)]) == 9


def test_what_nobody_uses_takes_nothing() -> None:
    assert most_alive([(1, 1, 100), (0, 2, 1)]) == 1
    assert most_alive([]) == 0


def test_words_of_an_element(kernel: ir.Kernel) -> None:
    loads = {e.tensor: e for s in kernel.body if isinstance(e := s.value, ir.Load)}
    assert [packed_words(kernel, loads[t]) for t in ("x", "d")] == [0.5, 2.0]
    assert [value_words(loads[t]) for t in ("x", "d")] == [1, 2]
    bools = [e for s in kernel.body for e in ir.walk(s.value) if isinstance(e, ir.Op) and e.fn == "gt"]
    assert [value_words(e) for e in bools] == [1]


def test_quotients_are_those_of_elements(kernel: ir.Kernel) -> None:
    """That of the maximum is a row's."""
    (found,) = quotients(kernel.body, {"n"})
    assert isinstance(found.args[1], ir.Const) and found.args[1].value == 3.0


def test_registers_of_a_thread_and_of_programs() -> None:
    assert [thread_registers(n) for n in (128, 256, 512, 1024)] == [MOST_REGISTERS, MOST_REGISTERS, 128, 64]
    assert thread_registers(256, 4) == 64
    assert [programs_by_registers(256, n) for n in (64, 65, 255, 257)] == [4, 3, 1, 0]
