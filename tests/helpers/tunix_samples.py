"""Real Tunix runs unpacked, and what lies in a converted step by JSON and TensorStore alone: none of our code."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

DATA = Path(__file__).parents[1] / "data" / "tunix"


def unpack(where: Path) -> Path:
    """The bucket of samples; what they must become lies beside it in ``expected``."""
    for archive in ("bucket.tar.xz", "expected.tar.xz"):
        with tarfile.open(DATA / archive) as packed:
            packed.extractall(where, filter="data")
    return where / "bucket"


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder: path to digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def open_stored(item: Path, name: str) -> Any:
    """An array of an item, opened as the item's own metadata says."""
    metadata = json.loads((item / "_METADATA").read_bytes())
    base = f"file://{item}/"
    driver = "zarr3" if metadata["use_zarr3"] else "zarr"
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if metadata["use_ocdbt"] else f"{base}{name}/"
    return ts.open({"driver": driver, "kvstore": kvstore}).result()


def stored_tree(item: Path) -> dict[str, dict[str, Any]]:
    """Every leaf of a converted item, in the words of the expected trees, plus the kind of each key."""
    metadata = json.loads((item / "_METADATA").read_bytes())
    impls = _impls(item)
    leaves = {}
    for entry in metadata["tree_metadata"].values():
        names = [key["key"] for key in entry["key_metadata"]]
        told = _leaf(item, ".".join(names), entry["value_metadata"]["value_type"], impls)
        leaves["/".join(names)] = told | {"key_types": [key["key_type"] for key in entry["key_metadata"]]}
    return leaves


def _leaf(item: Path, name: str, value_type: str, impls: dict[str, str]) -> dict[str, Any]:
    if value_type not in ("np.ndarray", "jax.Array"):
        return {"empty": value_type}
    array = open_stored(item, name).read().result()
    octets = np.asarray(array, order="C").tobytes()
    told = {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": hashlib.sha256(octets).hexdigest()}
    if name not in impls:
        return told
    words = {"key_data_shape": told["shape"], "key_data_dtype": told["dtype"], "prng_impl": impls[name]}
    return told | words | {"shape": told["shape"][:-1], "dtype": "key<fry>"}


def _impls(item: Path) -> dict[str, str]:
    files = sorted((item / "array_metadatas").glob("process_*"))
    entries = [entry["array_metadata"] for file in files for entry in json.loads(file.read_bytes())["array_metadatas"]]
    return {each["param_name"]: each["ext_metadata"]["random_key_impl"] for each in entries if each["ext_metadata"]}


def expected_tree(bucket: Path, run: str, role: str, step: int) -> dict[str, dict[str, Any]] | None:
    """What a sample must become; None where the samples do not say."""
    file = bucket.parent / "expected" / (f"{run}__{role}" if role else run) / f"{step}.json"
    if not file.exists():
        return None
    wanted = json.loads(file.read_text())["expected_items"]
    # MaxText's own file lacks the router's bias where its loader asks for it.
    bias = "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"
    if f"nnx_aux/model/{bias}" in wanted:
        wanted[f"params/params/{bias}"] = wanted[f"nnx_aux/model/{bias}"]
    return wanted
