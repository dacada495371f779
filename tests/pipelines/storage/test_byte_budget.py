"""The byte budget: never above its limit, first come first served, nobody waits for ever."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorferry.pipelines.storage.byte_budget import ByteBudget, shared_budget


def _run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not [thread for thread in threads if thread.is_alive()], "a thread waits for ever"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 25), min_size=1, max_size=12), st.integers(1, 17))
def test_held_bytes_never_pass_the_limit_unless_one_item_runs_alone(requests, limit_bytes):
    budget = ByteBudget(limit_bytes)
    lock = threading.Lock()
    inside: list[int] = []
    wrong: list[list[int]] = []

    def work(nbytes):
        with budget.admit(nbytes):
            with lock:
                inside.append(nbytes)
                if sum(inside) > limit_bytes and sum(1 for each in inside if each) > 1:
                    wrong.append(inside[:])
            time.sleep(0.0005)
            with lock:
                inside.remove(nbytes)

    _run_all([threading.Thread(target=work, args=(nbytes,)) for nbytes in requests])
    assert wrong == []
    assert budget.used_bytes == 0
    assert min(max(requests), limit_bytes) <= budget.peak_bytes <= limit_bytes


def test_two_that_fit_are_inside_together():
    budget = ByteBudget(10)
    both = threading.Barrier(2, timeout=5)

    def work():
        with budget.admit(5):
            both.wait()

    _run_all([threading.Thread(target=work) for _ in range(2)])
    assert not both.broken
    assert budget.peak_bytes == 10


def test_a_big_request_is_not_overtaken_for_ever_by_small_ones():
    budget = ByteBudget(10)
    order: list[str] = []

    def work(name, nbytes):
        with budget.admit(nbytes):
            order.append(name)

    threads = [threading.Thread(target=work, args=args) for args in (("big", 10), ("small", 1))]
    with budget.admit(4):
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert order == []
    for thread in threads:
        thread.join(timeout=5)
    assert order == ["big", "small"]


def test_bytes_come_back_when_the_work_raises():
    budget = ByteBudget(8)
    with pytest.raises(RuntimeError), budget.admit(8):
        raise RuntimeError("work failed")
    assert budget.used_bytes == 0


def test_a_waiter_that_is_interrupted_leaves_the_queue(monkeypatch):
    budget = ByteBudget(8)

    def interrupted(*_args):
        raise KeyboardInterrupt

    with budget.admit(8):
        with monkeypatch.context() as patch:
            patch.setattr(budget._changed, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt), budget.admit(3):
                pass
    with budget.admit(8):
        assert budget.used_bytes == 8


def test_one_budget_per_run_in_a_process():
    assert shared_budget("run a", 100) is shared_budget("run a", 100)
    assert shared_budget("run a", 100) is not shared_budget("run b", 100)


@pytest.mark.parametrize(("limit_bytes", "nbytes"), [(0, 1), (-1, 1), (5, -1)])
def test_senseless_sizes_are_refused(limit_bytes, nbytes):
    with pytest.raises(ValueError, match=r"at least one byte|cannot admit"):
        with ByteBudget(limit_bytes).admit(nbytes):
            pass
