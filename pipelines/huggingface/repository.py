"""The Hugging Face repository that an export follows: its config, names and dtypes of its tensors, its small files."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.export.shards import INDEX_FILE
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.plan.target_arrays import FLOATS
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.huggingface.checkpoint import open_checkpoint
from tensorferry.pipelines.huggingface.copied_files import CONFIG as CONFIG
from tensorferry.pipelines.huggingface.copied_files import choose_files
from tensorferry.pipelines.storage.byte_source import ByteSource, open_source
from tensorferry.pipelines.storage.strict_json import parse_object

QUANTISATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Repository:
    """What ``--config`` says.

    Attributes:
      source: its files.
      raw: the bytes of config.json.
      config: their content.
      files: small files that are copied, also of folders, with their sizes.
      dtypes: tensor name to the dtype of its values, from the headers; empty without weights.
      names: tensor names, from headers or index, in their order; empty without either.
      quantised: whether its weights are stored in a scheme that an export does not write.
      left_out: what is not copied and might be missed, as sentences.
    """

    source: ByteSource = field(repr=False)
    raw: bytes = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    files: Mapping[str, int]
    dtypes: Mapping[str, str] = field(default_factory=dict, repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)
    quantised: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def default_dtype(self) -> str:
        """The dtype of most of its weights, or what config.json says; empty when neither is known."""
        floats = Counter(dtype for dtype in self.dtypes.values() if dtype in FLOATS)
        if floats:
            return floats.most_common(1)[0][0]
        declared = str(Config(self.config).get("dtype", "")).removeprefix("torch.")
        return declared if declared in FLOATS else ""

    @property
    def digest(self) -> str:
        """Changes when anything changes that the plan takes from it."""
        text = json.dumps([self.raw.decode("utf-8", "replace"), sorted(self.files.items()), list(self.dtypes.items()),
                           self.names])  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()


def open_repository(url: str) -> Repository:
    """Opens the repository by config.json, headers and listing.

    Raises:
      PlanError: there is no readable config.json, or its weights' headers are damaged.
      FerryError: the URL cannot be read.
    """
    source = open_source(url)
    listing = source.list()
    if CONFIG not in listing:
        fix = "Give the model's own Hugging Face repository: its sizes and its tokenizer come from there."
        raise PlanError([Problem(url, "a folder with config.json (--config)", "none", fix)])
    raw = source.read(CONFIG, 0, listing[CONFIG])
    config, problems = parse_object(raw, CONFIG, "config", unique_keys=False)
    if config is None or problems:
        raise PlanError(problems)
    dtypes, names, quantised = _tensors(source, listing)
    quantised = quantised or any(Config(config).get(key) for key in QUANTISATION_KEYS)
    copied = choose_files(source, listing, quantised)
    return Repository(source, raw, config, copied.files, dtypes, names, quantised, copied.left_out)


def _tensors(source: ByteSource, listing: Mapping[str, int]) -> tuple[dict[str, str], tuple[str, ...], bool]:
    """Dtypes, names in order, and whether some are quantised; an index alone gives names."""
    if any(name.endswith(".safetensors") for name in listing):
        indexed = _index_names(source, listing)
        if not indexed or _is_whole(source, listing):
            return _from_headers(source)
    names = _index_names(source, listing)
    return {}, names, False


def _is_whole(source: ByteSource, listing: Mapping[str, int]) -> bool:
    """Whether every shard of the index is there: a download of small files alone has none or some."""
    index = json.loads(source.read(INDEX_FILE, 0, listing[INDEX_FILE]))
    return set(index.get("weight_map", {}).values()) <= listing.keys()


def _index_names(source: ByteSource, listing: Mapping[str, int]) -> tuple[str, ...]:
    if INDEX_FILE not in listing:
        return ()
    index, _ = parse_object(source.read(INDEX_FILE, 0, listing[INDEX_FILE]), INDEX_FILE, "index", unique_keys=False)
    weights = (index or {}).get("weight_map")
    return tuple(weights) if isinstance(weights, dict) else ()


def _from_headers(source: ByteSource) -> tuple[dict[str, str], tuple[str, ...], bool]:
    checkpoint = open_checkpoint(source)
    found = resolve(checkpoint.tensors, checkpoint.config, checkpoint.quant_config_files)
    dtypes, quantised = {}, False
    for name, tensor in found.logical.items():
        low_bit = tensor.scheme != "plain" or tensor.dtype.startswith("float8")
        quantised = quantised or low_bit
        dtypes[name] = "bfloat16" if low_bit else tensor.dtype
    return dtypes, tuple(dtypes), quantised


def exported_config(
    repository: Repository, dtype: str, quantisation: Mapping[str, Any] | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """config.json for the exported weights: the same bytes unless dtype or quantisation change.

    Args:
      repository: whose config.json it is.
      dtype: the dtype of most exported weights.
      quantisation: quantisation keys that it must have at its top level; None when weights are plain.

    Returns:
      The file's bytes, and what was changed, as sentences.
    """
    config = json.loads(repository.raw)
    told: list[str] = []
    for where, part in _parts(config):
        _set_dtype(part, dtype, where, told)
        for key in QUANTISATION_KEYS:
            if quantisation is None and key in part:
                del part[key]
                told.append(f"config.json: {where}{key} removed, the weights are {dtype}")
    for key, value in (quantisation or {}).items():
        if config.get(key) != value:
            config[key] = value
            told.append(f"config.json: {key} as in --fp8-from")
    if not told:
        return repository.raw, ()
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(), tuple(told)


def _parts(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    nested = [
        (f"{key}.", value) for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)
    ]
    return [("", config), *((where, part) for where, part in nested if where[:-1] not in QUANTISATION_KEYS)]


def _set_dtype(part: dict[str, Any], dtype: str, where: str, told: list[str]) -> None:
    for key in ("dtype", "torch_dtype"):
        before = part.get(key)
        if isinstance(before, str) and before.removeprefix("torch.") not in (dtype, "auto"):
            part[key] = dtype
            told.append(f"config.json: {where}{key} {before} becomes {dtype}")
