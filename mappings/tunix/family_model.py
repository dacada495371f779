"""The model that a config.json describes, through our own families: a pure function, no checkpoint needed."""

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.rules.geometry import shape_of
from tensorferry.mappings.tunix.model_check import ModelTree, Shape


def family_model(config: Config, scan_layers: bool, origin: str = "config.json") -> ModelTree:
    """Names and shapes of every weight of the family's model at the config's sizes.

    Args:
      config: the model's config.json.
      scan_layers: layers stacked in one array per block, or an array for each.
      origin: where the config comes from, for messages.

    Raises:
      PlanError: the family is not known, or the config lacks a size.
    """
    family = make_family(config, (), FamilyOptions(scan_layers=scan_layers))
    weights: dict[str, Shape] = {}
    for rule in family.plain_rules(scan_layers):
        compiled = compile_rule(rule, family.dims)
        weights |= {model_name(name): shape_of(compiled.target) for name, _ in compiled.targets()}
    return ModelTree(weights, origin=f"{origin} ({family.name})")


def model_name(array_name: str) -> str:
    """A rule's name of an array as the model says it: without the collection, levels joined by ``/``.

    >>> model_name("params-decoder-decoder_norm-scale")
    'decoder/decoder_norm/scale'
    """
    return array_name.partition("-")[2].replace("-", "/")
