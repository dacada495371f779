"""Recognises weights of one byte a value: FP8 of every granularity, MXFP8, int8."""

from tensorferry.mappings.lowbit.claims import Claim
from tensorferry.mappings.lowbit.companion_names import logical_name
from tensorferry.mappings.lowbit.fits import Fit, fit_blocks, fit_broadcast, grid_shape, part_rows
from tensorferry.mappings.lowbit.near import (
    Found,
    Near,
    bad_scale_dtype,
    disagreement,
    encoding_of,
    no_scale,
    seen,
)
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem

MX_BLOCK = (1, 32)


def find_one_byte(values: StoredTensor, near: Near) -> Found:
    """The logical tensor of FP8 or int8 codes, or what is wrong with it."""
    scale = near.scale(values)
    if scale is None:
        return no_scale(values)
    encoding = encoding_of(scale)
    if encoding not in ("float", "e8m0"):
        return bad_scale_dtype(values, scale, "a scale in float32, bfloat16, float16, E8M0 or U8")
    kind = "int" if values.dtype == "int8" else "fp8"
    claims = near.claims(values, kind, 8)
    if not claims and near.quant.exhaustive:
        return disagreement(values, near, f"{seen(values)} with scale {scale.name} {seen(scale)}")
    fit = _fit(values, scale, encoding, claims, near)
    return fit if isinstance(fit, Problem) else _logical(values, scale, encoding, fit, near)


def _fit(values: StoredTensor, scale: StoredTensor, encoding: str, claims: tuple[Claim, ...], near: Near):
    """A Fit, the edges of fused parts, or a Problem."""
    blocks = [claim.block for claim in claims if claim.block]
    if encoding == "e8m0" and MX_BLOCK not in blocks:
        blocks.append(MX_BLOCK)
    for block in blocks:
        fit = fit_blocks(values.shape, scale.shape, block)
        if fit is not None:
            return fit
    fits = fit_broadcast(values.shape, scale.shape)
    if len(fits) > 1:
        return _ambiguous(values, scale)
    if not fits:
        edges = _parts(values, scale, near)
        if edges and _agree("tensor", claims):
            return edges
        return _no_fit(values, scale, blocks, near)
    one_row = fits[0].kind in ("tensor", "expert") and values.shape[-2:-1] == (1,)
    kind = "channel" if one_row else fits[0].kind
    if not (_agree(fits[0].kind, claims) or _agree(kind, claims)):
        return _contradiction(values, scale, claims, near)
    return fits[0]


def _agree(kind: str, claims: tuple[Claim, ...]) -> bool:
    """Whether a kind of fit is one the config speaks of; one scale per stacked expert is per tensor."""
    said = {claim.strategy for claim in claims}
    return not said or "" in said or {"expert": "tensor"}.get(kind, kind) in said


def _parts(values: StoredTensor, scale: StoredTensor, near: Near) -> list[int] | None:
    """Row edges of a fused matrix with one scale per part: ``[parts]``, or ``[experts, parts]``."""
    leading = values.shape[:-2]
    if len(values.shape) < 2 or len(scale.shape) != len(leading) + 1 or scale.shape[:-1] != leading:
        return None
    return part_rows(values.name, values.shape[-2], scale.shape[-1], dict(near.config))


def _logical(values: StoredTensor, scale: StoredTensor, encoding: str, fit: Fit | list[int], near: Near) -> Found:
    code = values.dtype
    stored = {"values": values, "scale": scale}
    if isinstance(fit, list):
        leading = len(values.shape) - 2
        params = {"blocks": [1] * leading + [0, 0], "scale_axes": list(range(leading + 1)), "row_starts": fit}
        kind = "parts"
    else:
        params, kind = {"blocks": list(fit.blocks), "scale_axes": list(fit.scale_axes)}, fit.kind
    zero = near.companion(values, "zero_point")
    if zero is not None:
        if zero.shape != scale.shape or isinstance(fit, list):
            return _bad_zero(values, scale, zero)
        stored["zero"] = zero
    params |= {"code": code, "encoding": encoding}
    scheme = _scheme(code, kind, encoding, fit)
    return LogicalTensor(logical_name(values.name), values.shape, "float32", stored, scheme, params)


def _scheme(code: str, kind: str, encoding: str, fit: Fit | list[int]) -> str:
    if code == "int8":
        return "int8"
    if kind == "group" and encoding == "e8m0" and isinstance(fit, Fit) and fit.blocks[-1] == MX_BLOCK[1]:
        return "mxfp8"
    return f"fp8-{kind}"


def _ambiguous(values: StoredTensor, scale: StoredTensor) -> Problem:
    return Problem(
        name=values.name,
        expected=f"a scale whose axis is told by its shape (scale {scale.name})",
        found=f"{seen(scale)} for {seen(values)}: axes 1 and 2 are equally long, so the scale may follow either",
        fix="Ambiguous scale axis: store the scale with three axes, [experts, rows, 1] or [experts, 1, columns].",
        file=values.file,
        rule="a scale's axis is never guessed",
    )


def _no_fit(values: StoredTensor, scale: StoredTensor, blocks: list, near: Near) -> Problem:
    if not blocks and len(values.shape) > 1 and len(scale.shape) == len(values.shape) - 1:
        return Problem(
            name=values.name,
            expected="one scale, one per row, or one per part of a fused matrix whose widths are in config.json",
            found=f"scale {scale.name} {seen(scale)} for {seen(values)}",
            fix="The rows that each scale belongs to cannot be deduced.",
            file=values.file,
            rule="a scale's rows are never guessed",
        )
    if not blocks:
        return Problem(
            name=values.name,
            expected=f"a block size for the scale grid {list(scale.shape)} of {scale.name} ({near.quant.where})",
            found=f"{seen(values)} and no weight_block_size, block_structure or group_size",
            fix="The block size is missing and cannot be deduced from dividing shapes: add it to the config.",
            file=values.file,
            rule="the block size comes from the config",
        )
    grids = " or ".join(f"{list(grid_shape(values.shape, b))} for block {list(b)}" for b in blocks)
    return Problem(
        name=scale.name,
        expected=f"a scale grid of ceil({list(values.shape)} / block) = {grids} ({near.quant.where})",
        found=f"{seen(scale)} beside {seen(values)}",
        fix="The scale grid does not match the weight: wrong config for this checkpoint, or a damaged file?",
        file=scale.file,
        rule="the scale grid is ceil(shape / block)",
    )


def _contradiction(values: StoredTensor, scale: StoredTensor, claims: tuple[Claim, ...], near: Near) -> Problem:
    if any(claim.block for claim in claims):
        return _no_fit(values, scale, [claim.block for claim in claims if claim.block], near)
    return disagreement(values, near, f"scale {scale.name} {seen(scale)} for {seen(values)}")


def _bad_zero(values: StoredTensor, scale: StoredTensor, zero: StoredTensor) -> Problem:
    return Problem(
        name=zero.name,
        expected=f"zero points of the scale's shape {list(scale.shape)}",
        found=f"{seen(zero)} for {seen(values)}",
        fix="This form of zero points is not supported.",
        file=zero.file,
    )
