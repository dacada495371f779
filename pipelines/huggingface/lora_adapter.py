"""A PEFT adapter opened by its config and header, and told from any other by its content."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lora.peft_adapter import CONFIG_FILE, TENSORS_FILE, Adapter, read_adapter
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.huggingface.headers import Header, scan_header
from tensorferry.pipelines.storage.byte_source import ByteSource, SourceError, open_source
from tensorferry.pipelines.storage.strict_json import parse_object

_PICKLE = "adapter_model.bin"
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter and where it lies.

    Attributes:
      source: its folder.
      config: content of ``adapter_config.json``.
      adapter: what config and header say.
      digest: SHA-256 (hex) of its config and of all its factors, or of what the source calls their content.
      revision: of the source when it was opened; empty where it cannot tell.
    """

    source: ByteSource = field(repr=False)
    config: dict[str, Any]
    adapter: Adapter
    digest: str
    revision: str = ""


def open_adapter(url: str) -> OpenAdapter:
    """Opens a folder that PEFT saved.

    Args:
      url: a path, ``gs://bucket/path``, ``hf://org/repo[@revision]`` or ``https://host/path/``.

    Raises:
      PlanError: with everything that is wrong with config, header and tensors.
      FerryError: the URL's scheme cannot be read.
    """
    source = open_source(url)
    try:
        listing, revision = source.list(), source.revision()
    except SourceError as error:
        raise PlanError([error.problem]) from error
    if missing := [_missing(source.url, file, listing) for file in (CONFIG_FILE, TENSORS_FILE) if file not in listing]:
        raise PlanError(missing)
    config, problems = _config(source, listing[CONFIG_FILE])
    header, found = scan_header(source, TENSORS_FILE, listing[TENSORS_FILE])
    problems += found
    if config is None or header is None or problems:
        raise PlanError(problems)
    adapter, problems = read_adapter(config, {tensor.name: tensor for tensor in header.tensors})
    if problems:
        raise PlanError(problems)
    content = revision or _content(source, listing[TENSORS_FILE])
    return OpenAdapter(source, config, adapter, _digest(config, header, content), revision)


def _config(source: ByteSource, size_bytes: int) -> tuple[dict[str, Any] | None, list[Problem]]:
    try:
        raw = source.read(CONFIG_FILE, 0, size_bytes)
    except SourceError as error:
        return None, [error.problem]
    return parse_object(raw, CONFIG_FILE, "config", unique_keys=False)


def _content(source: ByteSource, size_bytes: int) -> str:
    """SHA-256 (hex) of the factors: steps of one training have the same headers."""
    digest = hashlib.sha256()
    for start in range(0, size_bytes, _PIECE_BYTES):
        digest.update(source.read(TENSORS_FILE, start, min(_PIECE_BYTES, size_bytes - start)))
    return digest.hexdigest()


def _digest(config: dict[str, Any], header: Header, content: str) -> str:
    text = json.dumps([config, header.digest, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _missing(root: str, file: str, listing: dict[str, int]) -> Problem:
    if file == TENSORS_FILE and _PICKLE in listing:
        return Problem(root, file, f"{_PICKLE} alone", "Save the adapter with safe_serialization=True.")
    return Problem(root, f"a PEFT adapter's folder, with {file}", "no such file", "Give the folder that PEFT saved.")
