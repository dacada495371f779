"""W + scale B A: against exact fractions, the same bits however it is cut, and far more exact than float32."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorferry.pipelines.verify.expected_lora import expected_merged
from tensorferry.transforms.lowrank import add_product, limb_bits, limbs

PLAIN = {"transposed": False, "experts": 1}


def random_case(rows: int, cols: int, rank: int, spread: int, seed: int) -> tuple[np.ndarray, ...]:
    """Weights and factors; the magnitudes of the factors' entries spread over so many powers of two."""
    random = np.random.default_rng(seed)

    def factor(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * np.exp2(random.integers(-spread, spread + 1, shape))).astype(np.float32)

    return random.normal(size=(rows, cols)).astype(ml_dtypes.bfloat16), factor(rank, cols), factor(rows, rank)


def merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, dtype=np.float32, **how) -> np.ndarray:
    out = np.empty(w.shape, dtype)
    add_product(out, w, a, b, scale=scale, rank=len(a) if w.ndim == 2 else how.pop("rank"), **how)
    return out


@settings(max_examples=30, deadline=None)
@given(rank=st.integers(1, 70), spread=st.integers(0, 9), seed=st.integers(0, 99))
def test_it_is_the_exact_product_rounded(rank, spread, seed):
    w, a, b = random_case(3, 4, rank, spread, seed)
    found = merged(w, a, b, 1.7)
    for row in range(3):
        for col in range(4):
            terms = [Fraction(float(b[row, k])) * Fraction(float(a[k, col])) for k in range(rank)]
            exact = float(Fraction(1.7) * sum(terms))
            size = sum(abs(term) for term in terms)
            near = np.float32(w[row, col]) + np.float32(exact)
            # One more rounding where the limbs' error crosses a boundary of float32.
            slack = np.spacing(np.float32(abs(exact))) + np.spacing(abs(near)) + 2.0**-35 * float(size)
            assert abs(float(found[row, col]) - float(near)) <= slack


@settings(max_examples=30, deadline=None)
@given(rank=st.integers(1, 40), spread=st.sampled_from([0, 12, 40]), seed=st.integers(0, 99), data=st.data())
def test_any_region_has_the_same_bits(rank, spread, seed, data):
    w, a, b = random_case(9, 11, rank, spread, seed)
    whole = merged(w, a, b, 0.3)
    rows = sorted(data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True)))
    cols = sorted(data.draw(st.lists(st.integers(0, 11), min_size=2, max_size=2, unique=True)))
    here = slice(*rows), slice(*cols)
    part = merged(w[here], a[:, here[1]], b[here[0]], 0.3)
    assert part.tobytes() == whole[here].tobytes()


@settings(max_examples=30, deadline=None)
@given(rank=st.integers(1, 40), spread=st.sampled_from([0, 3, 30]), seed=st.integers(0, 99))
def test_the_other_road_has_the_same_bits(rank, spread, seed):
    w, a, b = random_case(5, 7, rank, spread, seed)
    for transposed, values in ((False, w), (True, np.ascontiguousarray(w.T))):
        found = merged(values, a, b, 1.3, transposed=transposed)
        other = expected_merged(values, a, b, {**PLAIN, "transposed": transposed, "rank": rank, "scale": 1.3}, 0)
        assert found.tobytes() == other.tobytes()


@settings(max_examples=30, deadline=None)
@given(cols=st.sets(st.integers(0, 17), max_size=4), rows=st.sets(st.integers(0, 18), max_size=4), data=st.data())
def test_few_low_limbs_multiplied_apart_give_the_same_bits(cols, rows, data):
    """Factors in bfloat16 have a low limb only beside an entry that is far larger."""
    random = np.random.default_rng(len(cols) * 5 + len(rows))
    w, a, b = (random.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((19, 18), (3, 18), (19, 3)))
    a[1, sorted(cols)] *= ml_dtypes.bfloat16(2.0**-21)
    b[sorted(rows), 2] *= ml_dtypes.bfloat16(2.0**-23)
    found = merged(w, a, b, 1.3)
    other = expected_merged(w, a, b, {**PLAIN, "rank": 3, "scale": 1.3}, 0)
    assert found.tobytes() == other.tobytes()
    first, last = sorted(data.draw(st.lists(st.integers(0, 18), min_size=2, max_size=2, unique=True)))
    part = merged(w[:, first:last], a[:, first:last], b, 1.3)
    assert part.tobytes() == found[:, first:last].tobytes()


def test_sums_of_limbs_are_exact_in_any_order():
    _, a, b = random_case(6, 8, 33, 20, 1)
    left, right = np.split(limbs(b, 1), 2, axis=1), np.split(limbs(a, 0), 2)[::-1]
    assert (abs(left[0] + left[1] - b) <= 2.0**-45 * abs(b).max(1, keepdims=True)).all()
    order = np.random.default_rng(2).permutation(33)
    for one, other in ((0, 0), (0, 1), (1, 0)):
        there = left[one] @ right[other]
        assert (there == left[one][:, order] @ right[other][order]).all()
        assert (there == sum(np.outer(left[one][:, k], right[other][k]) for k in order)).all()


@pytest.mark.parametrize("rank", [1, 2, 3, 32, 33, 64, 65, 512, 1000])
def test_limbs_leave_room_for_the_sum(rank):
    bits = limb_bits(rank)
    assert rank * 4**bits <= 2**53 < rank * 4 ** (bits + 1)


def test_experts_side_by_side():
    """B keeps the experts of a rank together: column r * experts + e."""
    random = np.random.default_rng(4)
    w = random.normal(size=(2, 5, 6)).astype(np.float32)
    a, b = random.integers(-3, 4, (2 * 4, 6)), random.integers(-3, 4, (5, 4 * 3))
    found = merged(w, a.astype(np.float32), b.astype(np.float32), 2.0, rank=4, experts=3, first_expert=1)
    product = np.einsum("ore,eri->eoi", b.reshape(5, 4, 3)[:, :, 1:], a.reshape(2, 4, 6))
    np.testing.assert_array_equal(found, w + np.float32(2) * product.astype(np.float32))


def test_zeros_have_one_sign():
    w = np.full((2, 3), -0.0, np.float32)
    a, b = np.full((2, 3), -1.0, np.float32), np.zeros((2, 2), np.float32)
    found = merged(w, a, b, 1.0)
    assert not np.signbit(found).any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_rounded_once_and_in_place(dtype):
    w, a, b = random_case(300, 700, 5, 0, 3)
    wide = merged(w, a, b, 0.01)
    assert (merged(w, a, b, 0.01, dtype) == wide.astype(dtype)).all()
    values = w.astype(np.float32)
    add_product(values, values, a, b, scale=0.01, rank=5)
    assert values.tobytes() == wide.tobytes()
