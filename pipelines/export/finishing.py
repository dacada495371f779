"""The last step of a carried scale: one entry per block, its factor taken out, in the dtype that is stored."""

import numpy as np
from tensorferry.mappings.export.scale_finish import Finish
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.regions.boxes import Scratch, box_shape, read_box
from tensorferry.pipelines.regions.decode_region import check_scales
from tensorferry.pipelines.storage.byte_source import ByteSource
from tensorferry.transforms.decode.scales import scale_values
from tensorferry.transforms.requantise import stored_scales
from tensorferry.transforms.unfold import unfold

_FIX = "The scales were changed since; export with --dtype bfloat16, which dequantises."


def finish_scale(entries: np.ndarray, finish: Finish, source: ByteSource | None) -> np.ndarray:
    """The scale as the FP8 checkpoint stores it.

    Args:
      entries: float32, an entry per even part of a block.
      finish: what to do.
      source: the FP8 checkpoint, where its own scale is to be looked at.

    Returns:
      The region of the stored scale that ``finish.box`` names, in the stored dtype.

    Raises:
      FerryError: the entries of a block differ, or the dtype cannot hold one.
    """
    kept = [finish.kept(axis) for axis in range(entries.ndim)]
    chosen = entries[np.ix_(*kept)] if kept else entries
    if not (_spread(chosen, entries.shape, kept) == entries).all():
        raise _refused(finish, "one scale for each of its blocks", "scales that differ inside a block")
    chosen = _in_stored_order(chosen, finish)
    scales = unfold(np.asarray(chosen, np.float32), finish.factors, _known(finish, source))
    made = stored_scales(scales, finish.encoding, finish.stored.dtype)
    check_scales(finish.scale, {"scale": made})
    if not finish.factors and not (scale_values(made, finish.encoding) == scales).all():
        raise _refused(finish, f"scales that {finish.stored.dtype} holds exactly", "others")
    return np.asarray(made).reshape(box_shape(finish.box()))


def _known(finish: Finish, source: ByteSource | None) -> np.ndarray | None:
    """The scale of the FP8 checkpoint, where it helps."""
    if finish.source is None or source is None:
        return None
    return scale_values(read_box(source, finish.source, finish.box(), Scratch()), finish.encoding)


def _spread(chosen: np.ndarray, shape: tuple[int, ...], kept: list[list[int]]) -> np.ndarray:
    """Every entry of a block from the one that is kept."""
    index = [np.searchsorted(first, np.arange(n), side="right") - 1 for first, n in zip(kept, shape, strict=True)]
    return chosen[np.ix_(*index)] if index else chosen


def _in_stored_order(chosen: np.ndarray, finish: Finish) -> np.ndarray:
    """The kept entries with the axes of the stored scale; axes that it has not have one entry."""
    followed = [axis for axis in finish.scale.params["scale_axes"] if axis >= 0]
    rest = [axis for axis in range(chosen.ndim) if axis not in followed]
    return chosen.transpose([*followed, *rest]).reshape(box_shape(finish.box()))


def _refused(finish: Finish, expected: str, found: str) -> FerryError:
    return FerryError(str(Problem(finish.stored.name, expected, found, _FIX)))
