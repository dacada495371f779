"""Regions of a source's tensors, read another way than `ferry` reads them: `verify` compares the two."""

import os
from dataclasses import replace

import numpy as np
from tensorferry.mappings.lowbit.schemes import is_merged, merged_base, scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.rules.geometry import Box
from tensorferry.pipelines.regions.adapter_bytes import WithAdapter
from tensorferry.pipelines.regions.boxes import Scratch, read_box
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.pipelines.storage.byte_source import ByteSource, LocalSource
from tensorferry.pipelines.verify.expected_lora import merged_region
from tensorferry.transforms.dtypes import numpy_dtype


def source_region(source: ByteSource, tensor: LogicalTensor, box: Box) -> np.ndarray:
    """A box of a logical tensor, by mapped files where they are local."""
    if is_merged(tensor):
        base = source_region(source, merged_base(tensor), box)
        return merged_region(tensor, box, base, lambda stored, part: _mapped(source, stored, part))
    scheme = scheme_of(tensor)
    if scheme is None:
        return _mapped(source, tensor.stored["values"], box)
    boxes = scheme.stored_box(tensor, box)
    arrays = {role: _mapped(source, tensor.stored[role], stored_box) for role, stored_box in boxes.items()}
    return decode_region(tensor, box, arrays)


def _mapped(source: ByteSource, stored: StoredTensor, box: Box) -> np.ndarray:
    source, file = source.place(stored.file) if isinstance(source, WithAdapter) else (source, stored.file)
    if not isinstance(source, LocalSource):
        return read_box(source, replace(stored, file=file), box, Scratch())
    path, dtype = os.path.join(source.root, file), numpy_dtype(stored.dtype)
    whole = np.memmap(path, np.uint8, "r", stored.offset, stored.nbytes).view(dtype).reshape(stored.shape)
    return np.array(whole[tuple(slice(*span) for span in box)])
