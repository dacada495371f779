"""Recognises weights of two E2M1 values a byte: MXFP4 and NVFP4 in all their spellings."""

from tensorferry.mappings.lowbit.companion_names import logical_name
from tensorferry.mappings.lowbit.fits import fit_blocks, grid_shape
from tensorferry.mappings.lowbit.near import Found, Near, bad_scale_dtype, disagreement, missing, no_scale, seen
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem

MX_GROUP, NV_GROUP = 32, 16


def find_fp4(values: StoredTensor, near: Near) -> Found:
    """The logical tensor of FP4 codes in bytes (or of dtype F4), or what is wrong with it."""
    scale = near.scale(values)
    if scale is None:
        return no_scale(values)
    if len(scale.shape) == 1 and len(values.shape) > 1 and scale.shape[0] > 1:
        return _swizzled(values, scale)
    if scale.dtype == "float8_e4m3fn":
        return _nvfp4(values, scale, near)
    if scale.dtype not in ("uint8", "float8_e8m0fnu"):
        return bad_scale_dtype(values, scale, "an FP4 scale in F8_E4M3 (NVFP4), U8 or E8M0 (MXFP4)")
    if near.companion(values, "scale_2") or near.companion(values, "global_scale"):
        return bad_scale_dtype(values, scale, "an NVFP4 scale in F8_E4M3 beside its global scale")
    return _grouped(values, scale, "mxfp4", {}, MX_GROUP, near)


def _nvfp4(values: StoredTensor, scale: StoredTensor, near: Near) -> Found:
    multiplies, divides = near.companion(values, "scale_2"), near.companion(values, "global_scale")
    if multiplies and divides:
        return Problem(
            name=values.name,
            expected="one global scale",
            found=f"both {multiplies.name} (multiplies) and {divides.name} (divides)",
            fix="The two conventions exclude each other.",
            file=values.file,
        )
    factor = multiplies or divides
    if factor is None:
        names = "weight_scale_2 (modelopt) or weight_global_scale (compressed-tensors)"
        return missing(values, names, "An NVFP4 weight without its global scale is wrong by that factor.")
    if not _is_global(factor, values):
        return bad_scale_dtype(values, factor, "a global scale of one number (or one per expert)")
    extra = {"global": factor}, "multiply" if multiplies else "divide"
    return _grouped(values, scale, "nvfp4", extra[0], NV_GROUP, near, extra[1])


def _is_global(factor: StoredTensor, values: StoredTensor) -> bool:
    count = 1
    for n in factor.shape:
        count *= n
    per_expert = len(values.shape) == 3 and factor.shape[:1] == values.shape[:1] and count == values.shape[0]
    return factor.dtype in ("float32", "bfloat16", "float16") and (count == 1 or per_expert)


def _grouped(
    values: StoredTensor,
    scale: StoredTensor,
    scheme: str,
    extra: dict[str, StoredTensor],
    group: int,
    near: Near,
    how: str = "",
) -> Found:
    claims = near.claims(values, "fp4", 4)
    if not claims and near.quant.exhaustive:
        return disagreement(values, near, f"{seen(values)} with scale {scale.name} {seen(scale)}, which is {scheme}")
    groups = [claim.block[-1] for claim in claims if claim.block] or [group]
    shape = fp4_shape(values)
    fit = next((f for g in groups if (f := fit_blocks(shape, scale.shape, (1, g)))), None)
    if fit is None or (claims and group not in groups):
        return packed_disagrees(values, scale, shape, groups, near)
    params = {
        "code": "fp4",
        "pack": 2,
        "blocks": list(fit.blocks),
        "scale_axes": list(fit.scale_axes),
        "encoding": "float8_e4m3fn" if scheme == "nvfp4" else "e8m0",
    }
    if how:
        params["global"] = how
    stored = {"values": _as_bytes(values), "scale": scale, **extra}
    return LogicalTensor(logical_name(values.name), shape, "float32", stored, scheme, params)


def fp4_shape(values: StoredTensor) -> tuple[int, ...]:
    """Shape in elements: the header counts bytes, except for dtype F4."""
    if values.dtype == "float4_e2m1fn":
        return values.shape
    return (*values.shape[:-1], values.shape[-1] * 2)


def _as_bytes(values: StoredTensor) -> StoredTensor:
    """The same run of bytes, counted in bytes: readers know whole bytes only."""
    if values.dtype != "float4_e2m1fn":
        return values
    shape = (*values.shape[:-1], values.shape[-1] // 2)
    return StoredTensor(values.name, "uint8", shape, values.file, values.offset)


def find_gpt_oss(values: StoredTensor, near: Near) -> Found:
    """``P_blocks`` [experts, outputs, groups, 16] and ``P_scales``: seen as P [experts, inputs, outputs]."""
    scale = near.tensors.get(values.name.removesuffix("_blocks") + "_scales")
    if scale is None:
        return no_scale(values)
    if near.quant.exhaustive and not near.claims(values, "fp4", 4):
        return disagreement(values, near, f"{seen(values)} with scale {scale.name} {seen(scale)}, which is mxfp4")
    if len(values.shape) != 4 or scale.shape != values.shape[:3] or values.shape[3] != MX_GROUP // 2:
        return packed_disagrees(values, scale, (*values.shape[:2], values.shape[2] * 32), [MX_GROUP], near)
    if scale.dtype not in ("uint8", "float8_e8m0fnu"):
        return bad_scale_dtype(values, scale, "an MXFP4 scale in U8 or E8M0")
    experts, outputs, groups, _ = values.shape
    params = {
        "code": "fp4",
        "pack": 2,
        "blocks": [1, 1, MX_GROUP],
        "scale_axes": [0, 1, 2],
        "encoding": "e8m0",
        "order": [0, 2, 1],
    }
    shape = (experts, groups * MX_GROUP, outputs)
    stored = {"values": values, "scale": scale}
    return LogicalTensor(logical_name(values.name), shape, "float32", stored, "mxfp4-blocks", params)


def packed_disagrees(
    values: StoredTensor, scale: StoredTensor, shape: tuple[int, ...], groups: list[int], near: Near
) -> Problem:
    """The packed shape, the scale's shape and the config's group do not belong together."""
    grids = " or ".join(f"{list(grid_shape(shape, (1, g)))} for groups of {g}" for g in groups)
    return Problem(
        name=values.name,
        expected=f"packed {list(values.shape)} = {list(shape)} in elements, so a scale of {grids} ({near.quant.where})",
        found=f"scale {scale.name} {seen(scale)}",
        fix="The packed shape and the scale disagree with the config: wrong config for this checkpoint?",
        file=values.file,
        rule="one scale per group of the unpacked row",
    )


def _swizzled(values: StoredTensor, scale: StoredTensor) -> Problem:
    return Problem(
        name=scale.name,
        expected=f"a scale with the {len(values.shape)} axes of {values.name} {seen(values)}",
        found=f"a one-dimensional {seen(scale)}: swizzled for a GPU kernel",
        fix="Swizzled NVFP4 scales are not supported: export the checkpoint with its linear scales.",
        file=scale.file,
        rule="the scale has the weight's axes",
    )
