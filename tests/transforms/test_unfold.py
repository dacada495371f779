"""A factor folded into scales comes out again: exactly, wherever one scale only could have given what is there."""

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.transforms.unfold import fold, unfold

FACTOR = st.sampled_from([8**-0.5, 128**-0.5, 0.3, 0.25, 1.75, 64**-0.5])
SCALES = st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=1, max_size=40)


@given(SCALES, FACTOR)
def test_what_comes_out_folds_to_what_was_there(scales, factor):
    folded = fold(np.array(scales, np.float32), [factor])
    again = unfold(folded, [factor])
    assert fold(again, [factor]).tobytes() == folded.tobytes()
    np.testing.assert_allclose(again, np.array(scales, np.float32), rtol=1.3e-7)


@given(SCALES, FACTOR)
def test_scales_of_bfloat16_are_back_exactly(scales, factor):
    original = np.array(scales, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert unfold(fold(original, [factor]), [factor]).tobytes() == original.tobytes()


@given(SCALES, FACTOR)
def test_known_scales_are_back_exactly(scales, factor):
    original = np.array(scales, np.float32)
    assert unfold(fold(original, [factor]), [factor], original).tobytes() == original.tobytes()


def test_known_scales_count_only_where_they_fold_to_what_is_there():
    folded = fold(np.array([3.0, 5.0], np.float32), [0.3])
    assert unfold(folded, [0.3], np.array([3.0, 6.0], np.float32)).tolist() == [3.0, 5.0]


def test_nothing_folded():
    assert unfold(np.full((), 0.7, np.float32), []).shape == ()
