"""A Hugging Face checkpoint seen from its config and headers: what it holds, no weight read."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.huggingface.headers import scan_header
from tensorferry.pipelines.huggingface.shard_index import Scan, ShardForm, Shards, listed, resolve_shards
from tensorferry.pipelines.storage.byte_source import ByteSource, SourceError, open_source
from tensorferry.pipelines.storage.strict_json import parse_object

_CONFIG = "config.json"
_QUANT_CONFIGS = ("hf_quant_config.json", "quantize_config.json")
_HEADER_THREADS = 16
_ORBAX_FILES = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}


@dataclass(frozen=True)
class FileInfo:
    """A shard that tensors are read from.

    Attributes:
      bytes: size of the file.
      header_digest: SHA-256 (hex) of its header.
      etag: the hub's name of its content, SHA-256 (hex) for what git LFS holds; empty where nobody tells.
    """

    bytes: int
    header_digest: str
    etag: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint, checked: index, headers, file sizes and config agree.

    Attributes:
      root: the path or URL that it was opened from.
      config: content of ``config.json``.
      quant_config_files: content of ``hf_quant_config.json`` and ``quantize_config.json``, those that exist.
      tensors: by name, in the order of file and offset.
      files: the shards that tensors are read from.
      metadata: free text of each shard's header (``{"format": "pt"}``, tied names, …).
      unindexed: names that shards hold and the index does not name; not part of the checkpoint.
      unindexed_files: shards that lie in the folder and are not part of the checkpoint.
      superseded: stale copies of tensors that the index places in another shard; never read.
      digest: SHA-256 (hex) of configs, headers, file sizes and the place of each tensor; the same wherever
        the folder lies. Weights are not read, so a change of their values alone does not change it.
    """

    root: str
    config: dict[str, Any]
    quant_config_files: dict[str, dict[str, Any]]
    tensors: dict[str, StoredTensor]
    files: dict[str, FileInfo]
    metadata: dict[str, dict[str, str]]
    unindexed: tuple[str, ...]
    unindexed_files: tuple[str, ...]
    superseded: tuple[StoredTensor, ...]
    digest: str
    source: ByteSource = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(source: str | ByteSource) -> Checkpoint:
    """Opens a checkpoint by its configs, index and headers, and checks them against each other.

    Args:
      source: path or URL of the folder, or the byte source of it.

    Raises:
      PlanError: with everything that is wrong, not the first fault only.
      FerryError: the URL's scheme cannot be read.
    """
    opened = open_source(source) if isinstance(source, str) else source
    try:
        listing, folders = opened.list(), opened.folders()
    except SourceError as error:
        raise PlanError([error.problem]) from error
    form = _form(listing)
    if form is None:
        raise PlanError([_not_a_checkpoint(opened.url, listing, folders)])
    config, quant_configs, problems = _configs(opened, listing)
    shards, found = resolve_shards(opened, listing, form)
    problems += found + _unfit(shards)
    if problems:
        raise PlanError(problems)
    return _checkpoint(opened, config, quant_configs, shards)


def _checkpoint(
    source: ByteSource, config: dict[str, Any], quant_configs: dict[str, dict[str, Any]], shards: Shards
) -> Checkpoint:
    etags = source.etags()
    files = {
        file: FileInfo(shards.sizes[file], header.digest, etags.get(file, ""))
        for file, header in shards.headers.items()
    }
    return Checkpoint(
        root=source.url,
        config=config,
        quant_config_files=quant_configs,
        tensors=shards.tensors,
        files=files,
        metadata={file: header.metadata for file, header in shards.headers.items()},
        unindexed=shards.unindexed,
        unindexed_files=shards.unindexed_files,
        superseded=shards.superseded,
        digest=_digest(config, quant_configs, files, shards.tensors),
        source=source,
    )


def _digest(
    config: dict[str, Any],
    quant_configs: dict[str, dict[str, Any]],
    files: dict[str, FileInfo],
    tensors: dict[str, StoredTensor],
) -> str:
    shards = {file: [info.bytes, info.header_digest] for file, info in files.items()}
    places = {name: tensor.file for name, tensor in tensors.items()}
    text = json.dumps([config, quant_configs, shards, places], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _form(listing: Mapping[str, int]) -> ShardForm | None:
    """Safetensors wherever there are any; PyTorch's pickles only without them."""
    safetensors = ShardForm(re.compile(r".+\.safetensors"), "model.safetensors.index.json", _scan_safetensors)
    torch = ShardForm(re.compile(r"pytorch_model.*\.bin"), "pytorch_model.bin.index.json", _scan_torch)
    for form in (safetensors, torch):
        if form.index in listing or form.shards(listing):
            return form
    return None


def _scan_safetensors(source: ByteSource, sizes: Mapping[str, int]) -> dict[str, Scan]:
    with ThreadPoolExecutor(_HEADER_THREADS, "headers") as threads:
        scans = threads.map(lambda file: scan_header(source, file, sizes[file]), sizes)
        return dict(zip(sizes, scans, strict=True))


def _scan_torch(source: ByteSource, sizes: Mapping[str, int]) -> dict[str, Scan]:
    from tensorferry.pipelines.huggingface.torch_shards import scan_torch_shards

    return scan_torch_shards(source, sizes)


def _configs(
    source: ByteSource, listing: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[Problem]]:
    problems: list[Problem] = [] if _CONFIG in listing else [_no_config(source.url)]
    contents: dict[str, dict[str, Any]] = {}
    for file in (_CONFIG, *_QUANT_CONFIGS):
        if file in listing:
            content, found = _read_config(source, file, listing[file])
            problems += found
            contents[file] = content or {}
    return contents.pop(_CONFIG, {}), contents, problems


def _read_config(source: ByteSource, file: str, size_bytes: int) -> tuple[dict[str, Any] | None, list[Problem]]:
    try:
        return parse_object(source.read(file, 0, size_bytes), file, "config", unique_keys=False)
    except SourceError as error:
        return None, [error.problem]


def _unfit(shards: Shards) -> list[Problem]:
    return [_zero_size(tensor) for tensor in shards.tensors.values() if 0 in tensor.shape]


def _zero_size(tensor: StoredTensor) -> Problem:
    shape = list(tensor.shape)
    fix = "Orbax cannot save an array without elements: remove this tensor from the checkpoint."
    return Problem(tensor.name, "at least one element", f"shape {shape}", fix, tensor.file)


def _no_config(root: str) -> Problem:
    fix = "Copy the model's config.json there: all sizes come from it."
    return Problem(_CONFIG, f"the model's config in {root}", "no such file", fix)


def _not_a_checkpoint(root: str, listing: Iterable[str], folders: tuple[str, ...]) -> Problem:
    expected = "a Hugging Face checkpoint (config.json and *.safetensors or pytorch_model*.bin)"
    names = sorted(listing) + [f"{folder}/" for folder in folders]
    return Problem(root, expected, _what(names, folders), _what_to_do(names, folders))


def _what(names: list[str], folders: tuple[str, ...]) -> str:
    if not names:
        return "an empty folder"
    kind = "an Orbax checkpoint: " if _is_orbax(names, folders) else ""
    return f"{kind}{listed(names, 10)}"


def _what_to_do(names: list[str], folders: tuple[str, ...]) -> str:
    if _is_orbax(names, folders):
        return "Orbax checkpoints are read by `tensorferry export`, `migrate` and `inspect`."
    if "snapshots" in folders:
        return "Give the folder of one revision, inside snapshots/."
    return "Give the folder that holds the shards themselves."


def _is_orbax(names: Iterable[str], folders: tuple[str, ...]) -> bool:
    """A step, an item of one, or a folder of steps, which Orbax names by number."""
    marked = not _ORBAX_FILES.isdisjoint(names)
    return marked or "items" in folders or any(folder.isdecimal() for folder in folders)
