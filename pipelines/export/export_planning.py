"""From an Orbax checkpoint and a repository's config to the plan of an export. Nothing of the weights is read."""

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tensorferry.mappings.export.carried import carried_pairs
from tensorferry.mappings.export.declared import declared_low_bit
from tensorferry.mappings.export.export_plan import ExportPlan, make_export_plan
from tensorferry.mappings.export.parameter_tree import Parameters
from tensorferry.mappings.export.wanted import SHARD_BYTES, Wanted
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.plan.target_arrays import FLOATS
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.export.export_source import ExportSource, open_export_source
from tensorferry.pipelines.huggingface.fp8_source import Fp8Source, open_fp8_source, open_own_scheme, quantisation_of
from tensorferry.pipelines.huggingface.repository import Repository, exported_config, open_repository

_EMBEDDING = "params-token_embedder-embedding"
_SHOWN = 4
Options = TypeVar("Options", bound="ExportOptions")


@dataclass(frozen=True)
class ExportOptions:
    """What a user decides about an export, besides where it runs.

    Attributes:
      source: path or URL of an Orbax checkpoint.
      config: path or URL of a Hugging Face repository of the same model.
      family: a family's name, or ``auto``.
      dtype: dtype of the weights; empty takes what the repository has.
      scan_layers: whether the source's layers are stacked; None finds out.
      rope_lanes: the lane order of the source; ``auto`` as for a conversion.
      fp8_from: path or URL of an FP8 checkpoint whose codes and scales are kept where weights are unchanged.
      shard_bytes: bound on the tensor bytes of one file.
      chunk_bytes: aim for the bytes of one work item.
      worker_memory_bytes: bound on tensor bytes per worker process.
      step: which step of a folder of steps; None takes the latest that is committed.
      streamed: whether files are written front to back, whole, as buckets take them.
    """

    source: str
    config: str
    family: str = "auto"
    dtype: str = ""
    scan_layers: bool | None = None
    rope_lanes: str = "auto"
    fp8_from: str = ""
    shard_bytes: int = SHARD_BYTES
    chunk_bytes: int = 64 << 20
    worker_memory_bytes: int = 1 << 30
    step: int | None = None
    streamed: bool = False


@dataclass(frozen=True)
class Export:
    """A source, a repository, and the plan that joins them.

    Attributes:
      source: the Orbax checkpoint.
      repository: what ``--config`` names.
      fp8: what ``--fp8-from`` names.
      plan: what will be done.
      config: the bytes of the exported config.json.
      notes: what a user should know beside the plan.
      constants: arrays that Hugging Face has no tensor for, and what each of their elements must be.
    """

    source: ExportSource
    repository: Repository
    fp8: Fp8Source
    plan: ExportPlan
    config: bytes = field(repr=False)
    notes: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)

    def pinned(self, options: Options) -> Options:
        """The options with the step that was found: later there may be a newer one."""
        return options if self.source.step is None else replace(options, step=self.source.step)


def plan_export(options: ExportOptions) -> Export:
    """Plans an export from metadata and headers only.

    Raises:
      PlanError: source or repository cannot be read as what they are, or the family is not known. Anything that
        goes wrong after that is among the plan's problems.
      FerryError: there is no such source, or its layers are not as metadata or a flag say.
    """
    source, repository = open_export_source(options.source, step=options.step), open_repository(options.config)
    scanned = scanned_layers(source.parameters, source.custom, options.scan_layers)
    stays = not options.dtype and repository.quantised and bool(carried_pairs(source.tensors))
    fp8 = open_own_scheme(repository) if stays and not options.fp8_from else open_fp8_source(options.fp8_from)
    family = _family(source, repository, fp8, options, scanned)
    source = source.renamed(_array_names(family, scanned))
    if stays and not fp8.low_bit and not repository.dtypes:
        fp8 = _declared(family, scanned, source, repository)
    constants = constant_arrays(family, source.tensors, scanned)
    tensors = {name: tensor for name, tensor in source.tensors.items() if name not in constants}
    digest = "/".join(filter(None, (source.digest, repository.digest, fp8.digest)))
    wanted = Wanted(
        dtype=options.dtype,
        dtypes={**repository.dtypes, **fp8.dtypes},
        default_dtype=repository.default_dtype,
        order=fp8.order or repository.names,
        low_bit=fp8.low_bit,
        scales_at_hand=fp8.checkpoint is not None,
        copied=fp8.copied,
        shard_bytes=options.shard_bytes,
        scan_layers=scanned,
        worker_memory_bytes=options.worker_memory_bytes,
        chunk_bytes=options.chunk_bytes,
        streamed=options.streamed,
    )
    plan = make_export_plan(family, tensors, source.chunks, wanted, digest)
    config, changed = exported_config(repository, _main_dtype(plan) or repository.default_dtype, fp8.config)
    left_out = [f"left out: {told}" for told in source.parameters.left_out]
    left_out += [f"not copied from --config: {told}" for told in repository.left_out]
    notes = (*source.notes, *left_out, *_carried(plan), *changed, *_names(plan, family, repository))
    return Export(source, repository, fp8, plan, config, notes, constants)


def _carried(plan: ExportPlan) -> Iterator[str]:
    """What becomes of FP8 codes that the source carries."""
    kept = sum(array.spec.dtype.startswith("float8") for array in plan.arrays)
    decoded = sum(tensor.scheme != "plain" for tensor in plan.tensors.values())
    if kept and plan.finishes:
        yield f"FP8: {kept:,} weights leave with the codes and scales that the source carries"
    if decoded:
        yield f"FP8: {decoded:,} arrays of the source are dequantised"


def _declared(family: Family, scanned: bool, source: ExportSource, repository: Repository) -> Fp8Source:
    """The FP8 scheme as config.json alone declares it.

    Raises:
      PlanError: it does not say enough.
    """
    rules = [compile_rule(rule, family.dims) for rule in family.plain_rules(scanned)]
    low_bit, problems = declared_low_bit(rules, source.tensors, repository.config, frozenset(repository.names))
    if problems:
        raise PlanError(problems)
    return Fp8Source(low_bit=low_bit, config=quantisation_of(repository.config))


def _array_names(family: Family, scanned: bool) -> frozenset[str]:
    """Every array of the family's tree."""
    plain = (*family.plain_rules(scanned), *family.plain_constants(scanned))
    return frozenset(name for rule in plain for name, _ in compile_rule(rule, family.dims).targets())


def constant_arrays(family: Family, names: Collection[str], scanned: bool) -> dict[str, float]:
    """Arrays of the source for which Hugging Face has no tensor, and what each of their elements must be."""
    rules = [compile_rule(rule, family.dims) for rule in family.plain_constants(scanned)]
    found = {name: rule.rule.value or 0.0 for rule in rules for name, _ in rule.targets()}
    return {name: value for name, value in found.items() if name in names}


def scanned_layers(parameters: Parameters, custom: Mapping[str, Any], flag: bool | None) -> bool:
    """Whether the layers are stacked, from the tree; metadata and flag must not say otherwise.

    Raises:
      FerryError: they do.
    """
    found = parameters.scan_layers
    told = custom.get("scan_layers")
    if found is None:
        return bool(flag if flag is not None else (True if told is None else told))
    if flag is not None and flag != found:
        fix = "Leave the flag out: the tree tells."
        raise FerryError(str(Problem(_flag(flag), _layers(flag), _layers(found), fix)))
    if flag is None and isinstance(told, bool) and told != found:
        fix = f"The metadata is wrong, or the tree is another model's; {_flag(found)} goes by the tree."
        name = f"custom metadata scan_layers={str(told).lower()}"
        raise FerryError(str(Problem(name, _layers(told), _layers(found), fix)))
    return found


def _flag(scanned: bool) -> str:
    return "--scan-layers" if scanned else "--no-scan-layers"


def _layers(scanned: bool) -> str:
    return "stacked layers (layers/…) in the tree" if scanned else "separate layers (layers_0/…) in the tree"


def _family(
    source: ExportSource, repository: Repository, fp8: Fp8Source, options: ExportOptions, scanned: bool
) -> Family:
    arrays = source.parameters.arrays
    told = source.manifest.get("options", {})
    mapping = told.get("mapping", {})
    config = _with_head(Config(repository.config), told)
    rows = arrays[_EMBEDDING].shape[0] if _EMBEDDING in arrays else 0
    lanes = options.rope_lanes if options.rope_lanes != "auto" else mapping.get("rope_lanes", "auto")
    wanted = FamilyOptions(
        scan_layers=scanned,
        vocab_size=rows if rows > config.get("vocab_size", rows) else None,
        rope_lanes=lanes,
        multimodal=mapping.get("multimodal", any("vision_encoder" in name for name in arrays)),
        mtp=mapping.get("mtp", any("mtp" in name for name in arrays)),
    )
    family = options.family if options.family != "auto" else told.get("family", "auto")
    return make_family(config, frozenset(repository.names or fp8.order), wanted, family)


def _with_head(config: Config, told: Mapping[str, Any]) -> Config:
    """The config with the tie that the conversion had; only its manifest can overrule config.json."""
    head = told.get("lm_head", "auto")
    return config if head == "auto" else config.with_tied(head == "tied")


def _main_dtype(plan: ExportPlan) -> str:
    """The dtype of most exported elements."""
    counts: Counter[str] = Counter()
    for array in plan.arrays:
        plain = array.spec.dtype in FLOATS and not array.spec.dtype.startswith("float8")
        if plain and array.name not in plan.low_bit and array.name not in plan.finishes:
            counts[array.spec.dtype] += array.spec.nbytes
    return counts.most_common(1)[0][0] if counts else ""


def _names(plan: ExportPlan, family: Family, repository: Repository) -> Iterator[str]:
    """Tensors that the repository has and the export has not, and the other way round, with reasons."""
    if not repository.names or plan.problems:
        return
    ours = {spec.key for spec in plan.specs} | {array.name for array in plan.arrays}
    absent = [name for name in repository.names if name not in ours]
    reasons: dict[str, list[str]] = {}
    ties = {tie.name: tie.to for tie in family.ties}
    for name in absent:
        known = (rule.why for rule in family.ignores if fnmatch.fnmatchcase(name, rule.pattern))
        why = f"tied to {ties[name]}, written once" if name in ties else next(known, "")
        reasons.setdefault(why or "not in the source, or stored companions of other tensors", []).append(name)
    for why, names in reasons.items():
        yield f"in --config's weights and not exported: {_some(names)}: {why}"
    scales = {one.stored.name for one in plan.finishes.values()} | {one.scale.name for one in plan.low_bit.values()}
    added = [name for name in ours - scales - plan.finishes.keys() if name not in set(repository.names)]
    if added:
        yield f"exported and not in --config's weights: {_some(sorted(added))}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def options_of(data: Mapping[str, Any], **places: str) -> ExportOptions:
    """The options that a manifest tells of, for source and repository at their present places."""
    return replace(ExportOptions(**data), **{key: place for key, place in places.items() if place})
