"""Assembling parts by blocks against the plain way of numpy, with cuts and blocks of every size."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_family import headers, small_family
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.mappings.rules.geometry import AxisGeometry, Factor
from tensorferry.pipelines.regions import assemble as module
from tensorferry.pipelines.regions.assemble import assemble, blocks
from tensorferry.pipelines.verify.expected import expected_parts
from tensorferry.transforms.dtypes import numpy_dtype

FAMILY = small_family()
HEADERS = headers(FAMILY)
VALUES = {
    name: np.random.default_rng(n).standard_normal(tensor.shape, np.float32).astype(numpy_dtype(tensor.dtype))
    for n, (name, tensor) in enumerate(HEADERS.items())
}


def region(tensor, box, wanted=""):
    return VALUES[tensor.name][tuple(slice(*span) for span in box)].copy()


@pytest.fixture
def block_bytes(monkeypatch):
    return lambda nbytes: monkeypatch.setattr(module, "BLOCK_BYTES", nbytes)


@pytest.mark.parametrize("nbytes", [2, 7, 24, 100, 4 << 20])
@pytest.mark.parametrize(("chunk_bytes", "dtype"), [(30, "bfloat16"), (200, "float32"), (1 << 20, "source")])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_blocks_of_every_size_give_what_plain_numpy_gives(scan, dtype, chunk_bytes, nbytes, block_bytes):
    block_bytes(nbytes)
    plan = make_plan(FAMILY, HEADERS, PlanOptions(scan, dtype, chunk_bytes))
    plan.require()
    for item in plan.items():
        found = assemble(item, region, [junk(part) for part in item.parts])
        for part, one, other in zip(item.parts, found, expected_parts(item, region), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tobytes() == other.tobytes(), (part.spec.key, part.grid)


def junk(part) -> np.ndarray:
    """Memory whose forgotten elements would show."""
    octets = np.full(part.nbytes, 0xA5, np.uint8)
    return octets.view(numpy_dtype(part.spec.dtype)).reshape(part.spec.box_shape(part.grid))


def axis(*dims: tuple[str, int]) -> AxisGeometry:
    return AxisGeometry(tuple(Factor(size, 0, (name,), (size,)) for name, size in dims))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 150), st.data())
@settings(max_examples=60)
def test_blocks_tile_the_ranges_in_order_and_stay_below_the_limit(sizes, limit, data):
    names = "abcd"[: len(sizes)]
    starts = [data.draw(st.integers(0, size - 1)) for size in sizes]
    ranges = {n: (s, data.draw(st.integers(s + 1, size))) for n, s, size in zip(names, starts, sizes, strict=True)}
    geometry = tuple(axis((name, size)) for name, size in zip(names, sizes, strict=True))
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    found = []
    for block in blocks(geometry, ranges, limit):
        part = positions[tuple(slice(*block[name]) for name in names)]
        assert 0 < part.size <= limit
        found += part.reshape(-1).tolist()
    assert found == positions[tuple(slice(*ranges[name]) for name in names)].reshape(-1).tolist()
