import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.plan import resources
from tensorferry.mappings.plan.resources import recommend

GIB = 1 << 30


def test_the_example():
    assert not doctest.testmod(resources).failed


def test_deepseek_v3_from_fp8_to_bfloat16():
    # 688 GB read, 1,342 GB written, in 21,000 work items of 64 MiB.
    found = recommend(688 * 10**9, 1342 * 10**9, 21_000, 144 << 20, GIB)
    assert (found.machine_type, found.workers, found.threads) == ("n2-standard-8", 2, 7)
    assert 15 * 60 < found.seconds < 20 * 60


def test_beam_options_of_it():
    args = recommend(10**12, 10**12, 20_000, 144 << 20, GIB).beam_args()
    assert args == ("--machine_type=n2-standard-8", "--num_workers=2", "--max_num_workers=2",
                    "--number_of_worker_harness_threads=7", "--resource_hints=min_ram=3GiB")  # fmt: skip


@pytest.mark.parametrize(("memory", "cores"), [(1, 4), (20, 8), (40, 16), (90, 32)])
def test_the_machine_has_the_memory(memory, cores):
    assert recommend(10**9, 10**9, 100, 1, memory * GIB).machine_type == f"n2-standard-{cores}"


@given(st.integers(0, 10**14), st.integers(0, 10**14), st.integers(0, 10**6), st.integers(0, 1 << 40),
       st.integers(1, 1 << 36))  # fmt: skip
def test_bounds(read, write, items, largest, memory):
    found = recommend(read, write, items, largest, memory)
    assert found.workers >= 1
    assert 1 <= found.threads <= 16
    assert found.threads == 1 or found.threads * largest <= memory
    assert found.workers == 1 or found.workers * found.threads * 4 <= items
    assert found.seconds > 0
