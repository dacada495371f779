"""Every scheme: resolve a small checkpoint, decode its weight, compare with an element-by-element oracle."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit_zoo import ZOO, Repo, block_fp8, gpt_oss, nvfp4, tensor_fp8
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.schemes import SCHEMES, expand
from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.regions.decode_region import decode_region


def stored_tensors(repo: Repo) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name, dtype, repo.shapes.get(name, array.shape), f"shard-{k}.safetensors", 0)
        for k, (name, (dtype, array)) in enumerate(repo.arrays.items())
    }


def resolved(repo: Repo):
    def peek(wanted):
        return {tensor.name: repo.arrays[tensor.name][1].tobytes() for tensor in wanted}

    resolution = resolve(stored_tensors(repo), repo.config, {}, peek)
    assert [str(problem) for problem in resolution.problems] == []
    return resolution.logical[repo.name]


def region(repo: Repo, name: str, box):
    dtype, array = repo.arrays[name]
    if dtype.startswith("float8"):
        array = array.view(np.uint8).view(getattr(ml_dtypes, dtype))
    return np.ascontiguousarray(array[tuple(slice(a, b) for a, b in box)]).reshape([b - a for a, b in box])


def decode(repo: Repo, logical, box, out_dtype="float32"):
    boxes = SCHEMES[logical.scheme].stored_box(logical, box)
    for role, stored in boxes.items():
        shape = logical.stored[role].shape
        assert all(0 <= a <= b <= n for (a, b), n in zip(stored, shape, strict=True)), (role, stored, shape)
    arrays = {role: region(repo, logical.stored[role].name, stored) for role, stored in boxes.items()}
    return decode_region(logical, box, arrays, out_dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def whole(shape):
    return tuple((0, n) for n in shape)


@pytest.mark.parametrize("kind", ZOO)
def test_whole_tensor_is_the_oracles_in_float32_and_rounded_once(kind):
    repo = ZOO[kind]()
    logical = resolved(repo)
    assert (logical.scheme, logical.dtype, logical.shape) == (repo.scheme, "float32", repo.expected.shape)
    assert same_bits(decode(repo, logical, whole(logical.shape)), repo.expected)
    rounded = repo.expected.astype(ml_dtypes.bfloat16)
    assert same_bits(decode(repo, logical, whole(logical.shape), "bfloat16"), rounded)


REPOS = {kind: build() for kind, build in ZOO.items()}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(REPOS)), st.data())
def test_any_box_is_the_slice_of_the_whole(kind, data):
    repo = REPOS[kind]
    logical = resolved(repo)
    box = []
    for n in logical.shape:
        start = data.draw(st.integers(0, n - 1))
        box.append((start, data.draw(st.integers(start + 1, n))))
    expected = np.ascontiguousarray(repo.expected[tuple(slice(a, b) for a, b in box)])
    assert same_bits(decode(repo, logical, tuple(box)), expected)


def test_rows_of_many_chunks_and_the_real_block_geometry():
    repo = block_fp8(576, 300, (128, 128))
    assert same_bits(decode(repo, resolved(repo), whole((576, 300))), repo.expected)


@pytest.mark.parametrize("rows", [192, 960])
def test_blocks_are_the_configs_and_not_the_rows_divided_by_the_grid(rows):
    """192 rows in 2 blocks of 128 are 128 + 64, not 96 + 96."""
    repo = block_fp8(rows, 130, (128, 128))
    assert same_bits(decode(repo, resolved(repo), whole((rows, 130))), repo.expected)


def test_both_nvfp4_conventions_give_the_same_weights():
    modelopt, compressed = nvfp4("modelopt", 0.25), nvfp4("compressed", 4.0)
    a = decode(modelopt, resolved(modelopt), whole((3, 48)))
    assert same_bits(a, decode(compressed, resolved(compressed), whole((3, 48))))


def test_scales_are_read_by_region():
    repo = block_fp8(9, 13, (4, 5))
    boxes = SCHEMES["fp8-block"].stored_box(resolved(repo), ((5, 8), (3, 11)))
    assert boxes == {"values": ((5, 8), (3, 11)), "scale": ((1, 2), (0, 3))}


def test_gpt_oss_regions_are_whole_groups_of_the_stored_order():
    logical = resolved(gpt_oss())
    boxes = SCHEMES[logical.scheme].stored_box(logical, ((1, 2), (32, 64), (2, 5)))
    assert boxes == {"values": ((1, 2), (2, 5), (1, 2), (0, 16)), "scale": ((1, 2), (2, 5), (1, 2))}
    assert SCHEMES[logical.scheme].granularity(logical) == (1, 32, 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.nan, "1 NaN of 1 scales"), (np.inf, "1 infinite of 1"), (0.0, "1 zero of 1"), (-0.5, "1 negative of 1")],
)
def test_impossible_scales_are_named_and_counted(value, words):
    repo = tensor_fp8()
    repo.arrays["a.weight_scale"] = ("float32", np.float32(value).reshape(()))
    with pytest.raises(FerryError) as error:
        decode(repo, resolved(repo), whole((5, 7)))
    assert "a.weight_scale (in shard-1.safetensors)" in str(error.value)
    assert words in str(error.value)


def test_e8m0_byte_255_is_refused_and_byte_0_is_exact():
    repo = block_fp8(scale_dtype="uint8")
    _, grid = repo.arrays["a.weight_scale_inv"]
    grid[0, 0] = 0
    decoded = decode(repo, resolved(repo), whole((9, 13)))
    assert decoded[0, 0] == np.float32(repo.expected[0, 0] * 0 + 1) * 0 or np.isfinite(decoded).all()
    grid[2, 1] = 255
    with pytest.raises(FerryError, match="1 NaN of 9 scales"):
        decode(repo, resolved(repo), whole((9, 13)))


def along(scale, axes, shape):
    """The scale's shape with one entry per element along some axes."""
    return tuple(shape[a] if a in axes else n for a, n in enumerate(scale.shape))


CARRIED = [k for k in ZOO if REPOS[k].scheme.startswith("fp8") or REPOS[k].scheme == "mxfp8"]


@pytest.mark.parametrize("kind", CARRIED)
@pytest.mark.parametrize("axes", [[], [0], [-1], "all"])
def test_carried_codes_times_their_scale_are_the_weights(kind, axes):
    repo = REPOS[kind]
    logical = resolved(repo)
    plan = SCHEMES[logical.scheme].carry(logical)
    if plan is None:
        assert "zero" in logical.stored
        return
    rank = len(logical.shape)
    axes = list(range(rank)) if axes == "all" else [axis % rank for axis in axes]
    scale = expand(plan.scale, along(plan.scale, axes, logical.shape))
    grid = decode(repo, scale, whole(scale.shape))
    for axis, (n, block) in enumerate(zip(logical.shape, plan.blocks, strict=True)):
        if grid.shape[axis] != n:
            grid = np.repeat(grid, block or n, axis=axis).take(range(n), axis=axis)
    codes = region(repo, plan.codes.stored["values"].name, whole(logical.shape)).astype(np.float32)
    assert same_bits(codes * grid, repo.expected)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([k for k in CARRIED if k != "group with zero points"]), st.data())
def test_any_box_of_a_carried_scale_is_the_slice_of_the_whole(kind, data):
    repo = REPOS[kind]
    logical = resolved(repo)
    plan = SCHEMES[logical.scheme].carry(logical)
    axes = data.draw(st.lists(st.integers(0, len(logical.shape) - 1), unique=True))
    scale = expand(plan.scale, along(plan.scale, axes, logical.shape))
    box = []
    for n in scale.shape:
        start = data.draw(st.integers(0, n - 1))
        box.append((start, data.draw(st.integers(start + 1, n))))
    expected = decode(repo, scale, whole(scale.shape))[tuple(slice(a, b) for a, b in box)]
    assert same_bits(decode(repo, scale, tuple(box)), np.ascontiguousarray(expected))
