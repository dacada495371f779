"""DeepSeek V4. Names: the published repositories' own, which transformers reads and writes too.

Compressed attention of two kinds in turn, hyper-connections between several residual streams, experts chosen by the
token itself in the first layers. Router biases and expert tables are collections of their own beside ``params``.
"""

from collections.abc import Collection, Iterable
from typing import Any

from tensorferry.mappings.families import mtp, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.dims import Concat
from tensorferry.mappings.rules.rule import Block, Constant, Rule, Tie
from tensorferry.mappings.words.problems import PlanError, Problem

_EXPERTS = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}
_NORMS = {"attn_norm": "pre_self_attention_layer_norm", "ffn_norm": "post_self_attention_layer_norm"}
# Compression ratio to MaxText's name: sparse at 4, heavy above.
_SPARSE = 4


@register("deepseek4", "deepseek_v4", "DeepseekV4ForCausalLM")
def deepseek4(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """DeepSeek V4: scanned, pairs of a heavily and a sparsely compressed layer behind the first, hashed ones."""
    groups = _groups(config)
    if options.scan_layers:
        _refuse_other_cycles(config, groups)
    layer_rules = [rule for word in groups for rule in _layer(word, options)]
    return Family(
        name="deepseek4",
        dims=make_dims(_dims(config) | groups),
        blocks={word: _block(word) for word in groups},
        rules=(*_tokens(config, options), *shared.Spelling(prefix="").rules(layer_rules)),
        ties=(Tie("head.weight", to="embed.weight"),),
        ignores=(shared.ROTARY, mtp.unsupported("mtp.*")),
        constants=tuple(constant for word in groups for constant in _constants(word)),
        settings=_settings(config, options),
        sizes_from=_SIZES_FROM,
        notes=("norms of the hyper-connections are 1: the checkpoint's have no scale",),
    )


def _groups(config: Config) -> dict[str, list[int]]:
    """Layers by how they choose experts (``hashed``, ``routed``) and compress keys (``plain``, ``csa``, ``hca``)."""
    ratios, hashed = list(config.get("compress_ratios") or []), int(config.get("num_hash_layers", 0))
    groups: dict[str, list[int]] = {}
    for layer in range(config.size("num_hidden_layers")):
        ratio = ratios[layer] if layer < len(ratios) else 0
        kind = "plain" if not ratio else "csa" if ratio == _SPARSE else "hca"
        groups.setdefault(f"{'hashed' if layer < hashed else 'routed'}_{kind}", []).append(layer)
    return groups


def _block(word: str) -> Block:
    place = {"routed_hca": 0, "routed_csa": 1}.get(word)
    alone = f"layers_{{{word}}}"
    return Block(alone, alone, stacked=False) if place is None else Block(f"scanned_blocks-layers_{place}", alone)


def _tokens(config: Config, options: FamilyOptions) -> tuple[Rule, ...]:
    pad = shared.pad_vocab(config, options)
    return (
        Rule("embed.weight", "params-token_embedder-embedding", "vocab embed -> vocab embed", pad),
        Rule("norm.weight", "params-decoder-decoder_norm-scale", "embed -> embed"),
        Rule("head.weight", "params-decoder-logits_dense-kernel", "vocab embed -> embed vocab", pad),
        Rule("hc_head_fn", "params-decoder-hc_head-hc_fn", "stream joined -> joined stream"),
        Rule("hc_head_base", "params-decoder-hc_head-hc_base", "stream -> stream"),
        Rule("hc_head_scale", "params-decoder-hc_head-hc_scale", "one -> one"),
    )


def _layer(word: str, options: FamilyOptions) -> tuple[Rule, ...]:
    leaves = [*_attention(word), *_connections("attn", "attention", word), *_connections("ffn", "mlp", word)]
    kind = word.partition("_")[2]
    if kind == "csa":
        leaves += _compressor("attn.compressor", "csa_compressor", word, "ratio", "head_dims", "head_dim")
        leaves += _compressor(
            "attn.indexer.compressor", "csa_compressor-indexer", word, "ratio", "index_dims", "index_dim"
        )
        leaves += _indexer(word)
    elif kind == "hca":
        leaves += _compressor("attn.compressor", "hca_compressor", word, "heavy_ratio", "head_dim", "head_dim")
    rules = tuple(shared.layer_rule(hf, maxtext, layout, layer=word) for hf, maxtext, layout in leaves)
    return (*shared.norms(_NORMS, layer=word), *rules, *_moe(word, options))


def _attention(word: str) -> Iterable[tuple[str, str, str]]:
    leaves = (
        ("wq_a.weight", "wq_a-kernel", f"q_rank embed -> embed {word} q_rank"),
        ("q_norm.weight", "q_norm-scale", f"q_rank -> q_rank {word}"),
        ("wq_b.weight", "wq_b-kernel", f"(heads head_dim) q_rank -> q_rank {word} heads head_dim"),
        ("wkv.weight", "wkv-kernel", f"(kv_heads head_dim) embed -> embed {word} kv_heads head_dim"),
        ("kv_norm.weight", "kv_norm-scale", f"head_dim -> head_dim {word}"),
        ("attn_sink", "sinks", f"heads -> heads {word}"),
        ("wo_a.weight", "o_a_proj-kernel", f"(out_group o_rank) group_dim -> out_group {word} group_dim o_rank"),
        ("wo_b.weight", "o_b_proj-kernel", f"embed (out_group o_rank) -> (out_group o_rank) {word} embed"),
    )
    return [(f"attn.{hf}", f"self_attention-{maxtext}", layout) for hf, maxtext, layout in leaves]


def _compressor(
    hf: str, maxtext: str, word: str, ratio: str, width: str, normed: str
) -> Iterable[tuple[str, str, str]]:
    """Keys of ``ratio`` neighbouring tokens made one."""
    leaves = (
        ("wgate.weight", "gate_proj-kernel", f"{width} embed -> embed {word} {width}"),
        ("wkv.weight", "kv_proj-kernel", f"{width} embed -> embed {word} {width}"),
        ("norm.weight", "kv_norm-scale", f"{normed} -> {normed} {word}"),
        ("ape", "position_bias", f"{ratio} {width} -> {ratio} {word} {width}"),
    )
    return [(f"{hf}.{a}", f"self_attention-{maxtext}-{b}", layout) for a, b, layout in leaves]


def _indexer(word: str) -> Iterable[tuple[str, str, str]]:
    target = "self_attention-csa_compressor-indexer"
    return [
        ("attn.indexer.weights_proj.weight", f"{target}-weights_proj-kernel",
         f"index_heads embed -> embed {word} index_heads"),
        ("attn.indexer.wq_b.weight", f"{target}-q_proj-kernel",
         f"(index_heads index_dim) q_rank -> q_rank {word} (index_heads index_dim)"),
    ]  # fmt: skip


def _connections(hf: str, maxtext: str, word: str) -> Iterable[tuple[str, str, str]]:
    """Hyper-connections: what goes in, out and across the residual streams, stored in one matrix, bias and scale."""
    source, target = f"hc_{hf}", f"mhc_{maxtext}"
    leaves = [
        (f"{source}_fn", f"{target}-res_alpha", f"mix.res(row col) joined -> joined {word} (row col)"),
        (f"{source}_base", f"{target}-res_beta", f"mix.res(row col) -> row {word} col"),
        (f"{source}_scale", f"{target}-res_alpha_scale", f"mix_scale.res(one) -> one {word}"),
    ]
    for part in ("pre", "post"):
        leaves += [
            (f"{source}_fn", f"{target}-{part}_alpha", f"mix.{part}(stream) joined -> joined {word} stream"),
            (f"{source}_base", f"{target}-{part}_beta", f"mix.{part}(stream) -> stream {word}"),
            (f"{source}_scale", f"{target}-{part}_alpha_scale", f"mix_scale.{part}(one) -> one {word}"),
        ]
    return leaves


def _constants(word: str) -> tuple[Constant, ...]:
    return tuple(
        Constant(f"params-decoder-[{word}]-mhc_{module}-mhc_norm-scale", f"joined {word}", 1.0)
        for module in ("attention", "mlp")
    )


def _moe(word: str, options: FamilyOptions) -> tuple[Rule, ...]:
    """Routed experts and a shared one; which token goes where is looked up in hashed layers.

    The table of expert numbers is float32, as MaxText keeps it; so is the router's bias, which decides near ties,
    unless MaxText's converter is followed bit for bit.
    """
    rounded = "bfloat16" if options.match_maxtext else "float32"
    leaf = ("tid2eid", "Tid2EidVar", "tid2eid", f"vocab chosen -> vocab {word} chosen")
    if word.startswith("routed"):
        leaf = ("bias", "MoEBiasVar", "gate-bias", f"expert -> {word} expert")
    hf, collection, maxtext, layout = leaf
    return (
        *shared.routed_experts("ffn", "mlp-MoeBlock_0", _EXPERTS, word),
        *(shared.layer_rule(f"ffn.shared_experts.{name}.weight", f"mlp-shared_experts-{wi}-kernel",
                            f"{rows} {cols} -> {cols} {word} {rows}", layer=word)
          for wi, name, rows, cols in (("wi_0", "w1", "shared_mlp", "embed"), ("wi_1", "w3", "shared_mlp", "embed"),
                                       ("wo", "w2", "embed", "shared_mlp"))),
        Rule(f"model.layers.{{{word}}}.ffn.gate.{hf}", f"{collection}-decoder-[{word}]-mlp-MoeBlock_0-{maxtext}",
             layout, dtype=rounded, whole="int64" if hf == "tid2eid" else ""),
    )  # fmt: skip


def _dims(config: Config) -> dict[str, Any]:
    streams, embed = config.size("hc_mult"), config.size("hidden_size")
    heads, head_dim, groups = config.size("num_attention_heads"), config.size("head_dim"), config.size("o_groups")
    ratios = [ratio for ratio in config.get("compress_ratios") or [] if ratio > _SPARSE]
    index_dim, expert_mlp = config.size("index_head_dim"), config.size("moe_intermediate_size")
    return {
        "vocab": config.size("vocab_size"),
        "embed": embed,
        "joined": streams * embed,
        "stream": streams,
        "row": streams,
        "col": streams,
        "one": 1,
        "mix": Concat.of(pre=streams, post=streams, res=streams * streams),
        "mix_scale": Concat.of(pre=1, post=1, res=1),
        "heads": heads,
        "kv_heads": config.kv_heads,
        "head_dim": head_dim,
        # Sparse compression overlaps: each stretch of tokens makes two keys.
        "head_dims": 2 * head_dim,
        "q_rank": config.size("q_lora_rank"),
        "out_group": groups,
        "group_dim": heads * head_dim // groups,
        "o_rank": config.size("o_lora_rank"),
        "ratio": _SPARSE,
        "heavy_ratio": max(ratios, default=0),
        "index_heads": config.size("index_n_heads"),
        "index_dim": index_dim,
        "index_dims": 2 * index_dim,
        "expert": range(config.size("n_routed_experts")),
        "chosen": config.size("num_experts_per_tok"),
        "expert_mlp": expert_mlp,
        "shared_mlp": config.size("n_shared_experts") * expert_mlp,
    }


_SIZES_FROM = shared.SIZES_FROM | {
    "joined": "hc_mult * hidden_size",
    "stream": "hc_mult",
    "q_rank": "q_lora_rank",
    "o_rank": "o_lora_rank",
    "out_group": "o_groups",
    "group_dim": "num_attention_heads * head_dim / o_groups",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "heavy_ratio": "compress_ratios",
    "expert": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "shared_mlp": "n_shared_experts * moe_intermediate_size",
}
_SETTINGS = {
    "base_mlp_dim": "moe_intermediate_size",
    "base_moe_mlp_dim": "moe_intermediate_size",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "mhc_expansion_rate": "hc_mult",
    "indexer_head_dim": "index_head_dim",
    "indexer_n_heads": "index_n_heads",
    "indexer_topk": "index_topk",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window_size": "sliding_window",
    "max_position_embeddings": "max_position_embeddings",
}


def _settings(config: Config, options: FamilyOptions) -> dict[str, Any]:
    filled = config.with_defaults({"intermediate_size": config.size("moe_intermediate_size")})
    return shared.common_settings(filled, options, "deepseek4") | shared.settings_from(config, _SETTINGS) | {
        "first_num_hash_layers": int(config.get("num_hash_layers", 0)),
        "compress_ratios": list(config.get("compress_ratios") or [])[: config.size("num_hidden_layers")],
        "mlp_activations_limit": config.get("swiglu_limit", -1),
        "routed_score_func": config.get("scoring_func", "sqrtsoftplus"),
        "routed_bias": True,
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
        "routed_scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
        "attention_type": "compressed",
        "use_indexer": True,
        # MaxText's compressed attention has a rotary embedding of its own, without YaRN.
        "rope_type": "default",
        "compressed_rope_max_timescale": config.get("compress_rope_theta", 160_000),
        "original_max_position_embeddings": config.rope.get("original_max_position_embeddings", 65_536),
    }  # fmt: skip


def _refuse_other_cycles(config: Config, groups: dict[str, list[int]]) -> None:
    """Scanned, MaxText runs pairs behind the hashed layers: heavily compressed, then sparsely."""
    hashed, layers = int(config.get("num_hash_layers", 0)), config.size("num_hidden_layers")
    heavy, sparse = range(hashed, layers, 2), range(hashed + 1, layers, 2)
    found = [groups.get(word, []) for word in ("routed_hca", "routed_csa")]
    if found != [list(heavy), list(sparse)] or len(heavy) != len(sparse):
        raise PlanError([Problem(
            "config.json key compress_ratios",
            f"behind the {hashed} hashed layers, pairs of a ratio above {_SPARSE} and {_SPARSE}: the cycle that "
            "MaxText scans",
            str(list(config.get("compress_ratios") or [])[hashed:]),
            "Convert with --no-scan-layers.",
            file="config.json",
        )])  # fmt: skip
