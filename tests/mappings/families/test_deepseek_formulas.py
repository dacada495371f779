"""DeepSeek where MaxText's converter leaves no values to compare: formulas by hand, odd sizes."""

import numpy as np
import pytest
from formulas import D, E, N, ferried, same, tensors_of
from in_memory import convert
from small_deepseek import GROUPS, HEAVY, JOINED, O_RANK, STREAMS, V3, V4, v3_tensors, v4_shapes
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.mappings.words.problems import PlanError

# ---- DeepSeek V4 ----


@pytest.mark.parametrize("scan", [True, False])
def test_deepseek4(scan: bool) -> None:
    tensors = tensors_of(v4_shapes(), float32=("gate.bias", "_fn", "_base", "_scale"))
    arrays = ferried(V4, tensors, scan)

    def leaf(layer: int, name: str, collection: str = "params", axis: int = 1) -> np.ndarray:
        """One layer's part of an array, wherever the mode puts it."""
        if not scan or layer < 3:
            return arrays[f"{collection}.decoder.layers_{layer}.{name}"]
        stacked = arrays[f"{collection}.decoder.scanned_blocks.layers_{(layer - 3) % 2}.{name}"]
        return np.take(stacked, (layer - 3) // 2, axis=axis)

    for layer in range(7):
        here = f"layers.{layer}."
        mix, base, scale = (tensors[f"{here}hc_ffn_{part}"] for part in ("fn", "base", "scale"))
        s = STREAMS
        same(leaf(layer, "mhc_mlp.pre_alpha"), mix[:s].T)
        same(leaf(layer, "mhc_mlp.post_alpha"), mix[s : 2 * s].T)
        same(leaf(layer, "mhc_mlp.res_alpha"), mix[2 * s :].T)
        same(leaf(layer, "mhc_mlp.post_beta"), base[s : 2 * s])
        same(leaf(layer, "mhc_mlp.res_beta"), base[2 * s :].reshape(s, s))
        same(leaf(layer, "mhc_mlp.post_alpha_scale"), scale[1:2])
        same(leaf(layer, "mhc_attention.mhc_norm.scale"), np.ones(JOINED))
        out = tensors[f"{here}attn.wo_a.weight"].reshape(GROUPS, O_RANK, N * D // GROUPS).transpose(0, 2, 1)
        same(leaf(layer, "self_attention.o_a_proj.kernel"), out)
        same(leaf(layer, "self_attention.wkv.kernel"), tensors[f"{here}attn.wkv.weight"].T.reshape(E, 1, D))
        same(leaf(layer, "mlp.MoeBlock_0.wo")[2], tensors[f"{here}ffn.experts.2.w2.weight"].T)
        same(leaf(layer, "mlp.shared_experts.wi_1.kernel"), tensors[f"{here}ffn.shared_experts.w3.weight"].T)
    same(leaf(4, "self_attention.csa_compressor.position_bias"), tensors["layers.4.attn.compressor.ape"])
    same(leaf(6, "self_attention.csa_compressor.indexer.q_proj.kernel"), tensors["layers.6.attn.indexer.wq_b.weight"].T)
    same(leaf(5, "self_attention.hca_compressor.kv_proj.kernel"), tensors["layers.5.attn.compressor.wkv.weight"].T)
    same(leaf(5, "mlp.MoeBlock_0.gate.bias", "MoEBiasVar", axis=0), tensors["layers.5.ffn.gate.bias"])
    table = arrays["Tid2EidVar.decoder.layers_1.mlp.MoeBlock_0.tid2eid"]
    assert table.dtype == np.float32
    same(table, tensors["layers.1.ffn.gate.tid2eid"])


def test_deepseek4_scans_its_own_cycle_only() -> None:
    config = V4 | {"compress_ratios": [0, 0, 4, 4, HEAVY, 4, HEAVY]}
    with pytest.raises(PlanError, match=r"compress_ratios.*--no-scan-layers"):
        make_family(Config(config), v4_shapes(), FamilyOptions(scan_layers=True))
    make_family(Config(config), v4_shapes(), FamilyOptions(scan_layers=False))


# ---- DeepSeek V3 with prediction layers ----


@pytest.mark.parametrize("scan", [True, False])
def test_prediction_layers_are_kept_on_demand(scan: bool) -> None:
    tensors = v3_tensors()
    arrays = ferried(V3, tensors, scan, mtp=True)
    block = "params.mtp_block.mtp_layer_2.mtp_2_"
    same(arrays[f"{block}projection.kernel"], tensors["model.layers.5.eh_proj.weight"].T)
    same(arrays[f"{block}hidden_state_norm.scale"], tensors["model.layers.5.hnorm.weight"])
    layer = f"{block}transformer_layer."
    same(arrays[f"{layer}self_attention.wkv_b.kernel"],
         tensors["model.layers.5.self_attn.kv_b_proj.weight"].T.reshape(8, N, 15))  # fmt: skip
    same(
        arrays[f"{layer}DeepSeekMoeBlock_0.MoeBlock_0.wi_1"][1],
        tensors["model.layers.5.mlp.experts.1.up_proj.weight"].T,
    )


def test_prediction_layers_are_left_out_with_a_reason() -> None:
    tensors = {n: LogicalTensor.plain(StoredTensor(n, "bfloat16", t.shape, "f", 0)) for n, t in v3_tensors().items()}
    plan = make_plan(make_family(Config(V3), tensors, FamilyOptions()), tensors, PlanOptions())
    assert not plan.problems
    assert plan.account.ignored.keys() == {n for n in tensors if n.startswith(("model.layers.4.", "model.layers.5."))}
    assert all("--mtp" in why for why in plan.account.ignored.values())


def test_router_bias_stays_float32() -> None:
    """By default; MaxText's converter rounds it."""
    tensors = v3_tensors()
    for match, dtype in ((False, "float32"), (True, "bfloat16")):
        family = make_family(Config(V3), tensors, FamilyOptions(match_maxtext=match))
        arrays = convert(family, tensors, PlanOptions())
        bias = arrays["params.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"]
        assert bias.dtype.name == dtype
        wanted = np.stack([tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] for n in (1, 2, 3)])
        same(bias, wanted.astype(bias.dtype))
