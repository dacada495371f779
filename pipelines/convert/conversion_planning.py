"""From a source's headers to a plan: opens the checkpoint, finds the family, accounts for every tensor."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.convert.lora_merge import LoraMerge, open_merge
from tensorferry.pipelines.huggingface.checkpoint import Checkpoint, open_checkpoint
from tensorferry.pipelines.huggingface.low_bit_tensors import bad_scales, gptq_notes, understand
from tensorferry.pipelines.storage.byte_source import ByteSource, SourceError, open_source

LM_HEAD = "lm_head.weight"
LM_HEADS = ("auto", "tied", "stored")


@dataclass(frozen=True)
class ConversionOptions:
    """What a user decides about a conversion, besides where it runs.

    Attributes:
      source: path or URL of a Hugging Face checkpoint.
      family: a family's name, or ``auto`` to take it from config.json.
      mapping: choices about the mapping.
      target: choices about the target.
      lm_head: ``auto`` follows the checkpoint; ``tied`` leaves a stored head out; ``stored`` writes it although
        config.json ties it.
      lora_only: path or URL of a PEFT adapter that is converted alone; of the source only config and names count.
      lora: path or URL of a PEFT adapter that is merged into the weights.
    """

    source: str
    family: str = "auto"
    mapping: FamilyOptions = field(default_factory=FamilyOptions)
    target: PlanOptions = field(default_factory=PlanOptions)
    lm_head: str = "auto"
    lora_only: str = ""
    lora: str = ""


@dataclass(frozen=True)
class Conversion:
    """A checkpoint and the plan for it.

    Attributes:
      checkpoint: the source, opened by its headers.
      plan: what will be done.
      compare: pairs of stored tensors whose bytes must agree before anything is written (a stored head that
        config.json ties to the embedding).
      revision: the source's revision when it was planned; empty where it cannot tell.
      lora: MaxText's settings of an adapter that is converted alone; empty for a checkpoint.
      base: url of the model that such an adapter belongs to.
      merge: the adapter that is merged into the weights.
    """

    checkpoint: Checkpoint
    plan: Plan
    compare: tuple[tuple[str, str], ...] = ()
    revision: str = ""
    lora: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    merge: LoraMerge | None = None

    @property
    def source(self) -> ByteSource:
        return self.checkpoint.source

    def pinned(self, options: ConversionOptions) -> ConversionOptions:
        """The options with what was opened in the place of what was named: a branch of a hub is a commit then."""
        if options.lora_only:
            return replace(options, source=self.base, lora_only=self.source.url)
        return replace(options, source=self.source.url, lora=self.merge.url if self.merge else "")


def plan_conversion(options: ConversionOptions) -> Conversion:
    """Plans a conversion from headers only.

    Raises:
      PlanError: the source cannot be read as a checkpoint, its low-bit tensors do not add up, or its family is not
        known, or an adapter does not fit it. Anything that goes wrong after that is among the plan's problems.
      FerryError: the source's URL cannot be read.
    """
    if options.lora_only:
        from tensorferry.pipelines.convert.lora_planning import plan_adapter

        return plan_adapter(options)
    source = open_source(options.source)
    revision = _revision(source)
    checkpoint = open_checkpoint(source)
    found = understand(checkpoint)
    problems = found.problems or bad_scales(checkpoint, found)
    if problems:
        raise PlanError(problems)
    config = _with_head(Config(checkpoint.config), checkpoint, options.lm_head)
    _refuse_smaller_vocab(config, options.mapping.vocab_size)
    merge = open_merge(options.lora, found.logical) if options.lora else None
    tensors = merge.merged.tensors if merge else found.logical
    family = make_family(config, tensors.keys(), options.mapping, options.family)
    digest = f"{checkpoint.digest}/{options.lm_head}" + (f"/{merge.digest}" if merge else "")
    plan = make_plan(family, tensors, options.target, digest)
    ignored = {**plan.account.ignored, **dict(found.ignored)}
    account = replace(plan.account, ignored=ignored)
    plan = replace(plan, account=account, notes=(*plan.notes, *gptq_notes(checkpoint, found)))
    compare = plan.account.ties if options.lm_head == "auto" else ()
    plan = merge.checked(plan) if merge else plan
    return Conversion(checkpoint, plan, compare, revision, merge=merge)


def source_digest(options: ConversionOptions) -> str:
    """The digest of what a conversion reads, as it is now.

    Raises:
      PlanError: it is not there any more, or damaged.
    """
    if options.lora_only:
        return plan_conversion(options).checkpoint.digest
    return open_checkpoint(options.source).digest


def _refuse_smaller_vocab(config: Config, wanted: int | None) -> None:
    if wanted and wanted < config.size("vocab_size"):
        expected = f"at least {config.size('vocab_size')}, the vocab_size of config.json: rows are added, never cut"
        raise PlanError([Problem("--vocab-size", expected, str(wanted), "Leave it out, or give a larger one.")])


def _revision(source: ByteSource) -> str:
    try:
        return source.revision()
    except SourceError as error:
        raise PlanError([error.problem]) from error


def _with_head(config: Config, checkpoint: Checkpoint, lm_head: str) -> Config:
    """The config with the tie that the checkpoint really has: stored beats alias, alias beats config.json."""
    if lm_head != "auto":
        return config.with_tied(lm_head == "tied")
    if LM_HEAD not in checkpoint.tensors and _has_alias(checkpoint.metadata.values()):
        return config.with_tied(True)
    return config


def _has_alias(metadata: Collection[dict[str, Any]]) -> bool:
    """Whether a header's metadata says that the head is stored under the embedding's name."""
    return any(LM_HEAD in entries for entries in metadata)


def options_of(data: Mapping[str, Any], source: str) -> ConversionOptions:
    """The options that a manifest tells of, for the source at its present place."""
    mapping, target = FamilyOptions(**data["mapping"]), PlanOptions(**data["target"])
    adapters = data.get("lora_only", ""), data.get("lora", "")
    return ConversionOptions(source, data["family"], mapping, target, data["lm_head"], *adapters)
