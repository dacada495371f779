"""The worked example of mappings/README.md is run as it stands, and its printed plan is what the tool prints."""

import re
from pathlib import Path

import pytest
from tensorferry.mappings.families import family, registry
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.mappings.plan.plan_report import plan_text

README = Path(__file__).parents[3] / "mappings" / "README.md"
LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 3, 10, 4, 2, 6, 14, 22
CONFIG = {
    "model_type": "zephyrine",
    "num_hidden_layers": LAYERS,
    "hidden_size": EMBED,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
}
LAYER_SHAPES = {
    "input_layernorm.weight": (EMBED,),
    "post_attention_layernorm.weight": (EMBED,),
    "self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, EMBED),
    "self_attn.o_proj.weight": (EMBED, HEADS * HEAD_DIM),
    "mlp.gate_up_proj.weight": (2 * MLP, EMBED),
    "mlp.down_proj.weight": (EMBED, MLP),
}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, EMBED),
    "model.norm.weight": (EMBED,),
    "lm_head.weight": (VOCAB, EMBED),
    **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER_SHAPES.items()},
}


def block_after(mark: str) -> str:
    """The fenced block after a comment of the README."""
    found = re.search(rf"<!-- {mark} -->\n```\w*\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"no block after <!-- {mark} --> in {README}"
    return found.group(1)


@pytest.fixture
def zephyrine(monkeypatch):
    registry.family_names()
    for name in ("MAKERS", "MODEL_TYPES"):
        copy = dict(getattr(family, name))
        monkeypatch.setattr(family, name, copy)
        monkeypatch.setattr(registry, name, copy)
    exec(compile(block_after("family"), str(README), "exec"), {})
    return make_family(Config(CONFIG), SHAPES, FamilyOptions())


def tensors(shapes):
    return {
        name: LogicalTensor.plain(StoredTensor(name, "bfloat16", shape, "model.safetensors", 0))
        for name, shape in shapes.items()
    }


def test_the_example_adds_up_and_prints_the_plan_that_the_readme_shows(zephyrine):
    plan = make_plan(zephyrine, tensors(SHAPES), PlanOptions())
    assert not plan.problems
    shown = plan_text(plan).split("plan digest")[0].rstrip()
    assert block_after("plan").rstrip() == shown


def test_the_parts_of_the_fused_projection_are_separate_arrays(zephyrine):
    plan = make_plan(zephyrine, tensors(SHAPES), PlanOptions())
    shapes = {array.name.removeprefix("params-decoder-layers-"): array.spec.shape for array in plan.arrays}
    assert shapes["self_attention-query-kernel"] == (EMBED, LAYERS, HEADS, HEAD_DIM)
    assert shapes["self_attention-key-kernel"] == (EMBED, LAYERS, KV_HEADS, HEAD_DIM)
    assert shapes["mlp-wi_1-kernel"] == (EMBED, LAYERS, MLP)


def test_a_forgotten_part_is_named(zephyrine):
    from dataclasses import replace

    kept = tuple(rule for rule in zephyrine.rules if "qkv.v" not in rule.layout)
    plan = make_plan(replace(zephyrine, rules=kept), tensors(SHAPES), PlanOptions())
    sentences = [str(problem) for problem in plan.problems]
    assert len(sentences) == LAYERS
    assert all("every element used exactly once; found elements 36 to 48 are used by no rule" in s for s in sentences)
