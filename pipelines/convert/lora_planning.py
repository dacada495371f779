"""From an adapter's folder and its base model's config to the plan of moving the adapter alone."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lora.factors import WEIGHT
from tensorferry.mappings.lora.moved_adapter import MovedAdapter, lora_path, move_adapter
from tensorferry.mappings.lora.peft_adapter import TENSORS_FILE
from tensorferry.mappings.lora.peft_files import maxtext_lora
from tensorferry.mappings.plan.conversion_plan import Plan, plan_rules
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.words.problems import PlanError
from tensorferry.pipelines.convert.conversion_planning import Conversion, ConversionOptions
from tensorferry.pipelines.huggingface.checkpoint import Checkpoint, FileInfo
from tensorferry.pipelines.huggingface.headers import read_header
from tensorferry.pipelines.huggingface.lora_adapter import OpenAdapter, open_adapter
from tensorferry.pipelines.huggingface.repository import Repository, open_repository


def plan_adapter(options: ConversionOptions) -> Conversion:
    """Plans the conversion of an adapter alone; of the base model only config.json and names are read.

    Raises:
      PlanError: adapter or base cannot be read, or a factor has no place in MaxText's model. Anything that goes wrong
        after that is among the plan's problems.
      FerryError: a URL cannot be read.
    """
    opened, base = open_adapter(options.lora_only), open_repository(options.source)
    moved, problems = move_adapter(opened.adapter, _family(opened, base, options), options.mapping.scan_layers)
    if moved is None:
        raise PlanError(problems)
    lora = maxtext_lora(moved.rank, moved.alpha, moved.family.module_path)
    checkpoint = _checkpoint(opened, base)
    plan = _plan(moved, lora, options, checkpoint.digest)
    return Conversion(checkpoint, plan, (), opened.revision, lora, base.source.url)


def _family(opened: OpenAdapter, base: Repository, options: ConversionOptions) -> Family:
    config = Config(base.config)
    config = config if options.lm_head == "auto" else config.with_tied(options.lm_head == "tied")
    names = base.names or _names(opened)
    return make_family(config, frozenset(names), options.mapping, options.family)


def _names(opened: OpenAdapter) -> Collection[str]:
    """Names that tell how a base without weights is spelt: its modules', and the embedding beside its layers."""
    modules = [pair.module for pair in opened.adapter.pairs]
    before = {module.partition("layers.")[0] for module in modules if "layers." in module}
    return {*(f"{module}{WEIGHT}" for module in modules), *(f"{one}embed_tokens{WEIGHT}" for one in before)}


def _plan(moved: MovedAdapter, lora: dict, options: ConversionOptions, digest: str) -> Plan:
    family = replace(moved.family, settings={**moved.family.settings, "lora": lora})
    family = replace(family, notes=(*family.notes, *moved.notes))
    rules = [compile_rule(rule, family.dims) for rule in family.plain]
    plan = plan_rules(family, rules, moved.tensors, options.target, digest, lora_path)
    account = replace(plan.account, ignored={**plan.account.ignored, **moved.ignored})
    return replace(plan, account=account)


def _checkpoint(opened: OpenAdapter, base: Repository) -> Checkpoint:
    """The adapter in the place of a checkpoint: its factors, and the base model's config."""
    header = read_header(opened.source, TENSORS_FILE)
    digest = hashlib.sha256(json.dumps([opened.digest, base.config], sort_keys=True).encode())
    return Checkpoint(
        root=opened.source.url,
        config=dict(base.config),
        quant_config_files={},
        tensors={tensor.name: tensor for tensor in header.tensors},
        files={TENSORS_FILE: FileInfo(opened.source.size(TENSORS_FILE), header.digest)},
        metadata={TENSORS_FILE: header.metadata},
        unindexed=(),
        unindexed_files=(),
        superseded=(),
        digest=digest.hexdigest(),
        source=opened.source,
    )
