"""Which files of ``--config`` are copied: what a model needs beside its weights, and nothing of other formats."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tensorferry.pipelines.storage.byte_source import ByteSource

CONFIG = "config.json"
_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
    "*.npz", "*.tflite", "*.mlmodel", "*.engine",
)  # fmt: skip
# What speaks of this very repository rather than of the model.
_OF_THE_REPOSITORY = ("*.index.json", "tensorferry.manifest.json", ".*", "README*")
_PICTURES = ("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4", "*.md")
_QUANTISATION_FILES = frozenset({"hf_quant_config.json", "quantize_config.json"})
# Folders that belong to the same weights in another format, whether or not those were downloaded.
_OTHER_FORMATS = frozenset({"original", "onnx", "openvino", "metal", "gguf", "coreml", "flax", "tf", "mlx", "adapters"})
_LARGEST_COPY_BYTES = 256 << 20


@runtime_checkable
class HasFolders(Protocol):
    """A source that can list its folders."""

    def files_in(self, folder: str) -> dict[str, int]:
        """Files directly in a folder of the root: path relative to the root, to size in bytes."""
        ...


@dataclass(frozen=True)
class Copied:
    """What is copied and what is not.

    Attributes:
      files: path relative to the repository, to size in bytes.
      left_out: sentences about what a reader might miss.
    """

    files: Mapping[str, int]
    left_out: tuple[str, ...] = ()


def choose_files(source: ByteSource, listing: Mapping[str, int], quantised: bool) -> Copied:
    """The files to copy, from the root and the folders directly in it.

    Args:
      source: the repository.
      listing: files of its root, with their sizes.
      quantised: whether its weights are quantised, and files tell how.
    """
    files = {name: size for name, size in listing.items() if _is_copied(name, size, quantised)}
    left_out = [f"{name}: more than {_LARGEST_COPY_BYTES >> 20} MiB" for name in _huge(listing)]
    if not isinstance(source, HasFolders):
        return Copied(files, tuple(left_out))
    for folder in source.folders():
        if folder.startswith((".", "__")):
            continue
        nested = source.files_in(folder)
        why = _why_not(folder, nested)
        if why:
            left_out.append(f"{folder}/: {why}")
            continue
        files |= {path: size for path, size in nested.items() if _is_copied_nested(path, size)}
    return Copied(files, tuple(left_out))


def _is_copied(name: str, size: int, quantised: bool) -> bool:
    if name == CONFIG or size > _LARGEST_COPY_BYTES or (quantised and name in _QUANTISATION_FILES):
        return False
    return not _matches(name, (*_WEIGHTS, *_OF_THE_REPOSITORY))


def _is_copied_nested(path: str, size: int) -> bool:
    name = path.rpartition("/")[2]
    return size <= _LARGEST_COPY_BYTES and not _matches(name, (*_OF_THE_REPOSITORY, *_PICTURES))


def _why_not(folder: str, nested: Mapping[str, int]) -> str:
    """Why a folder is left out; empty when it is copied, or holds nothing to speak of."""
    if folder.lower() in _OTHER_FORMATS:
        return "the model in another format"
    if any(_matches(path.rpartition("/")[2], _WEIGHTS) for path in nested):
        return "weights of its own"
    return ""


def _huge(listing: Mapping[str, int]) -> Iterator[str]:
    others = (*_WEIGHTS, *_OF_THE_REPOSITORY)
    return (name for name, size in listing.items() if size > _LARGEST_COPY_BYTES and not _matches(name, others))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
