"""A made-up family of odd sizes that uses every kind of rule: stacks, splits, uneven parts, padding, ties, ignores."""

import math

from tensorferry.mappings.families.family import Family, make_dims
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.rules.compiled import compile_rule, source_shape
from tensorferry.mappings.rules.dims import Concat
from tensorferry.mappings.rules.rule import Block, Ignore, Rule, Tie
from tensorferry.transforms.ops import Pad, Scale

LAYER = "model.layers.{layer}"
HERE = "params-decoder-[layer]"


def small_family(layers: int = 3, experts: int = 4, embed: int = 6) -> Family:
    """A decoder with a fused q/k/v of uneven parts and interleaved experts."""
    return Family(
        name="small",
        dims=make_dims({
            "layer": range(layers), "expert": range(experts), "part": ("wi_0", "wi_1"), "vocab": 10, "embed": embed,
            "heads": 5, "kv_heads": 1, "lane": 2, "mlp": 7, "qkv": Concat.of(q=10, k=2, v=2),
        }),
        blocks={"layer": Block("layers", "layers_{layer}")},
        rules=(
            Rule("model.embed.weight", "params-embedding", "vocab embed -> vocab embed", (Pad("vocab", to=12),)),
            Rule(f"{LAYER}.norm.weight", f"{HERE}-norm-scale", "embed -> embed layer", dtype="float32"),
            Rule(f"{LAYER}.qkv.weight", f"{HERE}-query", "qkv.q(heads lane) embed -> embed layer heads lane",
                 (Scale(0.5),)),
            Rule(f"{LAYER}.qkv.weight", f"{HERE}-key", "qkv.k(kv_heads lane) embed -> embed layer kv_heads lane"),
            Rule(f"{LAYER}.qkv.weight", f"{HERE}-value", "qkv.v(kv_heads lane) embed -> embed layer kv_heads lane"),
            Rule(f"{LAYER}.experts.{{expert}}.up", f"{HERE}-{{part}}",
                 "embed (mlp part) -> expert layer embed mlp"),
        ),
        ties=(Tie("head.weight", to="model.embed.weight"),),
        ignores=(Ignore("*inv_freq", why="recomputed"),),
        sizes_from={"embed": "hidden_size", "mlp": "intermediate_size"},
    )  # fmt: skip


def headers(family: Family, file: str = "one.safetensors") -> dict[str, LogicalTensor]:
    """The headers that the family's rules ask for, one tensor after the other in one file."""
    tensors: dict[str, LogicalTensor] = {}
    offset = 8
    for rule in family.plain_rules(True):
        compiled = compile_rule(rule, family.dims)
        shape = source_shape(compiled)
        for name in compiled.sources():
            if name not in tensors:
                tensors[name] = LogicalTensor.plain(StoredTensor(name, "bfloat16", shape, file, offset))
                offset += 2 * math.prod(shape)
    return tensors
