import ml_dtypes
import numpy as np
import pytest
import xxhash
from tensorferry.transforms.digest import Digest, combine, digest


def test_known_value_of_nothing():
    assert digest(np.zeros(0, np.uint8)) == "xxh3-128:99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("dtype", ["uint8", "float32", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "bool"])
def test_is_of_the_c_order_bytes(dtype):
    array = np.arange(3 * 5 * 7).reshape(3, 5, 7).astype(dtype)
    assert digest(array) == "xxh3-128:" + xxhash.xxh3_128(array.tobytes()).hexdigest()


def test_scalar_array():
    assert digest(np.array(2.5, np.float32)) == digest(np.array([2.5], np.float32))


def test_blocks_equal_the_whole():
    array = np.arange(5 * 7, dtype=np.uint16).reshape(5, 7)
    whole = Digest()
    for start in range(0, 5, 2):
        whole.update(array[start : start + 2])
    assert whole.text() == digest(array)
    assert whole.text() != digest(array[::-1].copy())


def test_strided_arrays_are_refused():
    with pytest.raises(ValueError, match="C-contiguous"):
        digest(np.zeros((5, 7)).T)


def test_combined_digest_depends_on_values_order_and_count():
    a, b = (digest(np.array([n])) for n in (1, 2))
    combined = [combine(parts) for parts in ([a, b], [b, a], [a], [a, a], [])]
    assert len(set(combined)) == 5
    assert combine(iter([a, b])) == combined[0]
    assert combined[0].startswith("xxh3-128:")
    assert len(combined[0]) == len(a) == 41


NO_DIGESTS = ["", "deadbeef", "xxh3-128:abcd", "sha256:" + "00" * 16, "xxh3-128:" + "zz" * 16]


@pytest.mark.parametrize("text", NO_DIGESTS)
def test_only_own_digests_combine(text):
    with pytest.raises(ValueError):
        combine([text])
