"""How repositories name the companions of a weight. Names are aliases only: they say which, never what."""

from collections.abc import Container

PACKED_LEAVES = ("weight", "weight_packed")

# Beside `X.weight` or `X.weight_packed`; the `_inv` is part of a name, the scale multiplies all the same.
_SCALES_OF_WEIGHT = ("weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight")
# Beside a parameter without a `.weight` (fused experts): `experts.gate_up_proj_scale_inv`.
_SCALES_OF_PARAMETER = ("_scale_inv", "_scale")

# Scales of activations and caches: real numbers of the checkpoint that no weight needs.
IGNORED_LEAVES = {
    "input_scale": "scale of the inputs, used at run time only",
    "input_scale_ub": "upper bound of the input scale, used at run time only",
    "input_global_scale": "scale of the inputs, used at run time only",
    "input_zero_point": "zero point of the inputs, used at run time only",
    "activation_scale": "scale of the inputs, used at run time only",
    "qscale_act": "scale of the inputs, used at run time only",
    "w13_input_scale": "scale of the inputs, used at run time only",
    "w2_input_scale": "scale of the inputs, used at run time only",
    "output_scale": "scale of the outputs or of the key/value cache, used at run time only",
    "output_zero_point": "zero point of the outputs, used at run time only",
    "k_scale": "scale of the key/value cache, used at run time only",
    "v_scale": "scale of the key/value cache, used at run time only",
    "kv_scale": "scale of the key/value cache, used at run time only",
    "q_scale": "scale of the attention, used at run time only",
    "prob_scale": "scale of the attention, used at run time only",
    "weight_format": "a tag of bitsandbytes, not a weight",
}

# These change what a weight means; dropping one would be silent damage.
FOLDED_LEAVES = ("pre_quant_scale", "act_pre_scale")

# Companions by name alone: one that no weight claimed is an orphan.
_ORPHAN_LEAVES = {
    "weight_scale_inv",
    "weight_scale",
    "scale_inv",
    "qscale_weight",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "qzeros",
    "SCB",
    "absmax",
    "nested_absmax",
    "quant_map",
    "nested_quant_map",
}
_ORPHAN_ENDINGS = ("_scale_inv", "_weight_scale", "_weight_scale_2", "_weight_global_scale")


def stem_of(name: str) -> str:
    """The module's name with its dot: ``X.`` of ``X.weight`` and ``X.weight_packed``, else ``name`` itself.

    >>> stem_of("a.b.weight_packed"), stem_of("experts.gate_up_proj")
    ('a.b.', 'experts.gate_up_proj')
    """
    head, dot, leaf = name.rpartition(".")
    return head + dot if leaf in PACKED_LEAVES else name


def scale_of(name: str, names: Container[str]) -> str | None:
    """The name of the scale that belongs to stored codes called ``name``, among the checkpoint's ``names``.

    Whether ``name`` holds codes at all is the caller's knowledge (its dtype has one byte): the
    ``norm.scale`` of a norm is never asked for, because no ``norm.weight`` of one byte stands beside it.
    """
    return next((alias for alias in scale_aliases(name) if alias in names), None)


def scale_aliases(name: str) -> tuple[str, ...]:
    """Every name under which the scale of ``name`` may be stored, the most common first."""
    stem = stem_of(name)
    endings = _SCALES_OF_PARAMETER if stem == name else _SCALES_OF_WEIGHT
    return tuple(stem + ending for ending in endings)


def companion(name: str, suffix: str) -> str:
    """The name of another companion: ``X.weight_scale_2`` or ``experts.w13_weight_scale_2`` for ``scale_2``."""
    stem = stem_of(name)
    return f"{stem}weight_{suffix}" if stem != name else f"{name}_{suffix}"


def companions(name: str) -> tuple[str, ...]:
    """Every name that a companion of the codes ``name`` may have, whatever the scheme."""
    head = name.rpartition(".")[0]
    suffixes = ("scale_2", "global_scale", "zero_point", "g_idx", "shape")
    siblings = ("scales", "qzeros", "g_idx", "SCB")
    inner = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    return (
        *scale_aliases(name),
        *(companion(name, suffix) for suffix in suffixes),
        *(f"{head}.{leaf}" for leaf in siblings),
        *(f"{name}.{leaf}" for leaf in inner),
        name.removesuffix("_blocks") + "_scales",
    )


def logical_name(name: str) -> str:
    """The name that mappings match: the weight's own, whatever its packed form is called.

    >>> logical_name("a.weight_packed"), logical_name("a.qweight"), logical_name("e.down_proj_blocks")
    ('a.weight', 'a.weight', 'e.down_proj')
    """
    head, dot, leaf = name.rpartition(".")
    if leaf in ("weight_packed", "qweight"):
        return f"{head}{dot}weight"
    return name.removesuffix("_blocks")


def looks_orphaned(name: str, dtype: str, names: Container[str]) -> bool:
    """Whether a tensor that no weight claimed can only be a companion of a quantised weight."""
    head, _, leaf = name.rpartition(".")
    if leaf in _ORPHAN_LEAVES or leaf.endswith(_ORPHAN_ENDINGS) or dtype.startswith("float8_"):
        return True
    if leaf in ("scales", "g_idx"):
        return f"{head}.qweight" in names
    return leaf.endswith("_scales") and dtype == "uint8"
