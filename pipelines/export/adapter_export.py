"""Exporting an adapter alone: low-rank factors in an Orbax checkpoint become the folder that PEFT loads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensorferry.mappings.export.export_plan import make_export_plan
from tensorferry.mappings.export.parameter_tree import Parameters
from tensorferry.mappings.export.shards import Shard
from tensorferry.mappings.export.wanted import Wanted
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lora.adapter_family import AdapterFamily, Wish, adapter_family, weight_names
from tensorferry.mappings.lora.factor_tree import alpha_of, find_factors, kernels_of, rank_of
from tensorferry.mappings.lora.factors import WEIGHT
from tensorferry.mappings.lora.peft_files import ADAPTER_CONFIG, ADAPTER_FILE, module_name, peft_config, target_modules
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.export.export_output import ExportOutcome, ExportOutput
from tensorferry.pipelines.export.export_planning import Export, ExportOptions, scanned_layers
from tensorferry.pipelines.export.export_run import ExportRun, Say, build
from tensorferry.pipelines.export.export_source import ExportSource, open_export_source
from tensorferry.pipelines.huggingface.fp8_source import Fp8Source
from tensorferry.pipelines.huggingface.repository import Repository, open_repository
from tensorferry.pipelines.output.export_manifest import ADAPTER_KIND, export_manifest
from tensorferry.pipelines.output.overlap import refuse_overlap
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.local_files import write_json

_HEAD = "params-decoder-logits_dense-kernel_lora_b"
_WHOLE = 1 << 62


@dataclass(frozen=True)
class AdapterOptions(ExportOptions):
    """What a user decides about the export of an adapter.

    Attributes:
      lora_alpha: the adapter's alpha, where the checkpoint does not tell it.
    """

    lora_alpha: float | None = None


def plan_adapter_export(options: AdapterOptions) -> Export:
    """Plans the export of an adapter from metadata and headers only; ``config`` is that of the adapter.

    Raises:
      PlanError: source or repository cannot be read as what they are, or rank or alpha are not known. Anything that
        goes wrong after that is among the plan's problems.
      FerryError: there is no such source, or its layers are not as metadata or a flag say.
    """
    source, repository = open_export_source(options.source, find_factors, options.step), open_repository(options.config)
    arrays = source.parameters.arrays
    scanned = scanned_layers(source.parameters, source.custom, options.scan_layers)
    rank = rank_of(arrays)
    alpha = alpha_of(source.custom, rank, options.lora_alpha)
    base = _base_family(source, repository, options, scanned)
    kernels = kernels_of(arrays)
    family, problems = adapter_family(base, scanned, rank, Wish.of_kernels(kernels))
    problems += _without_rule(kernels, source.parameters, base, scanned)
    if problems:
        raise PlanError(problems)
    wanted = Wanted(
        dtype=options.dtype, shard_bytes=_WHOLE, scan_layers=scanned, worker_memory_bytes=options.worker_memory_bytes,
        chunk_bytes=options.chunk_bytes,
    )  # fmt: skip
    digest = f"{source.digest}/{repository.digest}/{alpha!r}"
    plan = make_export_plan(family, source.tensors, source.chunks, wanted, digest)
    shards = tuple(Shard(ADAPTER_FILE, shard.tensors) for shard in plan.shards)
    config = _config(options, repository, family, base, rank, alpha)
    notes = (*source.notes, *(f"left out: {told}" for told in source.parameters.left_out))
    bare = replace(repository, files={})
    return Export(source, bare, Fp8Source(), replace(plan, shards=shards), config, notes)


def _base_family(source: ExportSource, repository: Repository, options: AdapterOptions, scanned: bool) -> Family:
    """The family of the model that the adapter belongs to."""
    told = source.manifest.get("options", {})
    mapping, config = told.get("mapping", {}), Config(repository.config)
    _refuse_nameless(repository)
    head = source.parameters.arrays.get(_HEAD)
    rows = head.shape[-1] if head else 0
    lanes = options.rope_lanes if options.rope_lanes != "auto" else mapping.get("rope_lanes", "auto")
    wanted = FamilyOptions(
        scan_layers=scanned,
        vocab_size=rows if rows > config.get("vocab_size", rows) else None,
        rope_lanes=lanes,
        multimodal=mapping.get("multimodal", any("vision_encoder" in name for name in source.parameters.arrays)),
        mtp=mapping.get("mtp", any("mtp" in name for name in source.parameters.arrays)),
    )
    family = options.family if options.family != "auto" else told.get("family", "auto")
    base = make_family(config, frozenset(repository.names), wanted, family)
    return replace(base, rules=tuple(replace(one, source=module_name(one.source, base.name)) for one in base.rules))


def _refuse_nameless(repository: Repository) -> None:
    """Refuses to guess how the modules of a model with several towers are called."""
    nested = "text_config" in repository.config or "thinker_config" in repository.config
    if nested and not repository.names:
        fix = "Give the repository with model.safetensors.index.json: names of modules come from there."
        expected = "the names of the model's weights (--config)"
        raise PlanError([Problem(repository.source.url, expected, "config.json of a multimodal model alone", fix)])


def _without_rule(kernels: frozenset[str], parameters: Parameters, base: Family, scanned: bool) -> list[Problem]:
    """Factors of which the family has no kernel."""
    known = {
        rule.target.fill(base.dims, at)
        for rule in base.plain_rules(scanned)
        for at in base.dims.positions(rule.target.atoms(base.dims))
    }
    expected = f"factors of a kernel that a {base.name} model of config.json's sizes has"
    fix = "Is --config the model that was trained?"
    return [
        Problem(f"{name}_lora_a", expected, str(list(parameters.arrays[f"{name}_lora_a"].shape)), fix)
        for name in sorted(kernels - known)
    ]


def _config(
    options: AdapterOptions, repository: Repository, family: AdapterFamily, base: Family, rank: int, alpha: float
) -> bytes:
    """The bytes of adapter_config.json."""
    stored = {module_name(name, base.name) for name in repository.names}
    known = {name.removesuffix(WEIGHT) for name in weight_names(base) | stored if name.endswith(WEIGHT)}
    targets = target_modules(family.modules, known)
    config = peft_config(_base_name(options.config, repository), rank, alpha, targets)
    return (json.dumps(config, indent=2) + "\n").encode()


def _base_name(url: str, repository: Repository) -> str:
    """What PEFT may load the base model from: the hub's name, what config.json says, or the path itself."""
    if url.startswith("hf://"):
        return url.removeprefix("hf://").partition("@")[0]
    return str(repository.config.get("_name_or_path") or url)


def export_adapter(options: AdapterOptions, output: ExportOutput, say: Say) -> ExportOutcome:
    """Exports an adapter into a folder that ``PeftModel.from_pretrained`` loads.

    Args:
      options: what to export.
      output: where it goes; a local directory.
      say: shows the user a line.

    Raises:
      PlanError: the plan does not add up; nothing was written.
      FerryError: anything else; nothing was committed, and the same command resumes.
    """
    export = plan_adapter_export(options)
    export.plan.require()
    refuse_overlap(export, options, output.output)
    options = export.pinned(options)
    if not is_local(output.output):
        fix = "Export to a local folder, then copy it: an adapter is small."
        raise PlanError([Problem("--output", "a local directory for an adapter", output.output, fix)])
    return build(export, options, output, output.output, say, _AdapterRun)


class _AdapterRun(ExportRun):
    """The run of an adapter's export: one file of factors, and PEFT's config beside it."""

    def source_digest(self) -> str:
        assert isinstance(self.options, AdapterOptions)
        return plan_adapter_export(self.options).plan.source_digest

    def write_small_files(self) -> dict[str, Any]:
        (self.run.files_dir / ADAPTER_CONFIG).write_bytes(self.export.config)
        manifest = adapter_manifest(self.export, self.options, self.run.receipts.finished())
        write_json(self.run.files_dir / MANIFEST_NAME, manifest)
        return manifest


def adapter_manifest(
    export: Export, options: ExportOptions, receipts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The manifest of an exported adapter, kept in its folder."""
    return export_manifest(export, options, receipts) | {"kind": ADAPTER_KIND}
