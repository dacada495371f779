"""Reads one Orbax item: the tree in its metadata, the true shapes in its arrays' metadata, and its completeness."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tensorferry.mappings.tunix.classify import unwrap_value
from tensorferry.mappings.tunix.step_tree import ItemTree, Key, KeyKind, Leaf, LeafKind, Path
from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.orbax.chunk_codecs import chunk_codecs
from tensorferry.pipelines.storage.tree_store import TreeStore

if TYPE_CHECKING:
    import tensorstore as ts

_METADATA = "_METADATA"
_ARRAY_METADATA = "array_metadatas/"
_KEY_KINDS: dict[int, KeyKind] = {1: "sequence", 2: "dict"}
_ARRAY_TYPES = frozenset({"jax.Array", "np.ndarray", "scalar"})
_EMPTY_KINDS: dict[str, LeafKind] = {
    "None": "none",
    "Dict": "empty_dict",
    "List": "empty_list",
    "Tuple": "empty_tuple",
    "NamedTuple": "empty_tuple",
}
_LOST = "The save did not finish, or files were lost."


def leaf_spec(url: str, use_ocdbt: bool, use_zarr3: bool, array_name: str) -> dict[str, Any]:
    """The TensorStore spec of one array of an item.

    Args:
      url: the item's folder, with a slash at the end.
      use_ocdbt: the item is one OCDBT database.
      use_zarr3: the arrays are zarr v3.
      array_name: keys of the leaf joined by dots.
    """
    folder = f"{array_name}/"
    kvstore: Mapping[str, Any] | str = (
        {"driver": "ocdbt", "base": url, "path": folder} if use_ocdbt else f"{url}{folder}"
    )
    return {"driver": "zarr3" if use_zarr3 else "zarr", "kvstore": kvstore, "open": True}


class ItemReader:
    """Reads one item; finds all its faults, not the first only."""

    def __init__(
        self,
        store: TreeStore,
        folder: str,
        name: str,
        counters: Collection[str] = (),
        check_files: bool = True,
    ) -> None:
        """Prepares the reading.

        Args:
          store: the tree that holds the item.
          folder: the item's folder, relative to the store's root.
          name: the item's name.
          counters: last names of 0-d integer arrays whose value to read.
          check_files: compare the files with what the arrays need; lists the item's files.
        """
        self.store, self.folder, self.name = store, folder, name
        self.counters, self.check_files = counters, check_files
        self.problems: list[Problem] = []
        self.use_ocdbt = self.use_zarr3 = self.stores_all = False

    def read(self) -> tuple[ItemTree, list[Problem]]:
        """The item's tree, and everything that is wrong with it (the tree is then not to be trusted)."""
        metadata = self._metadata()
        self.use_ocdbt = bool(metadata.get("use_ocdbt", True))
        self.use_zarr3 = bool(metadata.get("use_zarr3", False))
        self.stores_all = bool(metadata.get("store_array_data_equal_to_fill_value", False))
        leaves = self._bare_leaves(metadata)
        if not self.problems:
            leaves = self._with_arrays(leaves)
        if self.check_files and not self.problems:
            self._check_files(leaves)
        return ItemTree(self.name, tuple(leaves), self.use_ocdbt, self.use_zarr3), self.problems

    def _problem(self, name: str, expected: str, found: str, fix: str = _LOST) -> None:
        self.problems.append(Problem(name, expected, found, fix, self.folder or self.name))

    def _path(self, file: str) -> str:
        return f"{self.folder}/{file}" if self.folder else file

    def _metadata(self) -> dict[str, Any]:
        try:
            metadata = json.loads(self.store.read(self._path(_METADATA)))
            if isinstance(metadata, dict) and isinstance(metadata.get("tree_metadata"), dict):
                return metadata
            self._problem(_METADATA, "the tree of an Orbax item", "JSON of another kind")
        except FileNotFoundError:
            self._problem(_METADATA, "the tree of an Orbax item", "no such file")
        except ValueError as error:
            self._problem(_METADATA, "the tree of an Orbax item as JSON", f"text that is not JSON ({error})")
        return {}

    def _bare_leaves(self, metadata: dict[str, Any]) -> list[Leaf]:
        try:
            entries = metadata.get("tree_metadata", {}).values()
            return [_bare_leaf(self.name, entry) for entry in entries]
        except (KeyError, TypeError, AttributeError) as error:
            self._problem(_METADATA, "keys and value type of every leaf", f"an entry without {error}")
            return []

    def _with_arrays(self, leaves: list[Leaf]) -> list[Leaf]:
        marks = self._prng_marks()
        kvstore = self._kvstore()
        file = "zarr.json" if self.use_zarr3 else ".zarray"
        reads = {leaf: kvstore.read(f"{leaf.array_name}/{file}") for leaf in leaves if leaf.kind == "array"}
        known = {leaf: self._array(leaf, read, marks) for leaf, read in reads.items()}
        return [self._with_value(known.get(leaf, leaf)) for leaf in leaves]

    def _array(self, leaf: Leaf, read: Any, marks: dict[str, str]) -> Leaf:
        expected = "the metadata of its array"
        try:
            result = read.result()
            if result.state != "value" or not result.value:
                self._problem(leaf.array_name, expected, "nothing")
                return leaf
            stored = json.loads(result.value)
            shape, chunks, dtype = _array_metadata(stored)
        except (ValueError, KeyError, TypeError) as error:
            self._problem(leaf.array_name, expected, f"something unreadable ({_first_line(error)})")
            return leaf
        mark = marks.get(leaf.array_name, "")
        codecs = chunk_codecs(stored)
        return replace(leaf, shape=shape, chunk_shape=chunks, dtype=dtype, prng_impl=mark, codecs=codecs)

    def _with_value(self, leaf: Leaf) -> Leaf:
        name = unwrap_value(leaf.path)[-1].name
        if leaf.kind != "array" or leaf.shape or name not in self.counters or "int" not in leaf.dtype:
            return leaf
        import tensorstore as ts

        url = self.store.kvstore_url(self.folder)
        try:
            array = ts.open(leaf_spec(url, self.use_ocdbt, self.use_zarr3, leaf.array_name)).result()
            return replace(leaf, value=int(array.read().result()))
        except ValueError as error:
            self._problem(leaf.array_name, "a readable counter", _first_line(error))
            return leaf

    def _prng_marks(self) -> dict[str, str]:
        """Array name to key implementation, from every process's file; nothing else marks a typed key."""
        marks: dict[str, str] = {}
        try:
            names = self.store.list(self._path("array_metadatas")).files
            for name in names:
                marks.update(_marks(json.loads(self.store.read(self._path(_ARRAY_METADATA + name)))))
        except FileNotFoundError:
            return marks
        except (ValueError, KeyError, TypeError):
            self._problem(_ARRAY_METADATA, "JSON that describes the arrays", "something unreadable")
        return marks

    def _kvstore(self) -> "ts.KvStore":
        import tensorstore as ts

        url = self.store.kvstore_url(self.folder)
        return ts.KvStore.open({"driver": "ocdbt", "base": url} if self.use_ocdbt else url).result()

    def _check_files(self, leaves: list[Leaf]) -> None:
        sizes = self.store.sizes(self.folder)
        keys = self._database_keys(sizes) if self.use_ocdbt else sizes
        self.problems += list(self._missing_chunks(leaves, Counter(key.split("/", 1)[0] for key in keys)))
        if not self.use_ocdbt:
            for file in sorted(file for file, size in sizes.items() if not size):
                self._problem(file, "the bytes of a chunk", "an empty file")

    def _database_keys(self, sizes: dict[str, int]) -> list[str]:
        import tensorstore as ts
        from tensorferry.pipelines.orbax.ocdbt_files import missing_files, referenced_files

        try:
            needed = referenced_files(ts.KvStore.open(self.store.kvstore_url(self.folder)).result())
            keys = [key.decode() for key in self._kvstore().list().result()]
        except ValueError as error:
            self._problem("manifest.ocdbt", "a readable index of the arrays", _first_line(error))
            return []
        for file, (end, found) in missing_files(needed, sizes).items():
            self._problem(file, f"{end} bytes", "no such file" if found is None else f"{found} bytes")
        return keys

    def _missing_chunks(self, leaves: list[Leaf], files: Counter[str]) -> Iterator[Problem]:
        """Arrays of which a chunk is not stored, where the item says that every chunk is."""
        if not self.stores_all or self.problems:
            return
        for leaf in leaves:
            wanted = _chunk_count(leaf) if leaf.kind == "array" else 0
            found = files[leaf.array_name] - 1
            if wanted and found < wanted:
                yield Problem(leaf.array_name, f"{wanted} chunks", f"{found}", _LOST, self.folder or self.name)


def _bare_leaf(item: str, entry: dict[str, Any]) -> Leaf:
    path: Path = tuple(Key(str(key["key"]), _KEY_KINDS.get(key["key_type"], "dict")) for key in entry["key_metadata"])
    value_type = entry["value_metadata"]["value_type"]
    kind = _EMPTY_KINDS.get(value_type, "array" if value_type in _ARRAY_TYPES else "unsupported")
    return Leaf(item, path, kind, value_type)


def _marks(metadata: dict[str, Any]) -> dict[str, str]:
    arrays = [entry["array_metadata"] for entry in metadata["array_metadatas"]]
    return {
        array["param_name"]: array["ext_metadata"]["random_key_impl"]
        for array in arrays
        if "random_key_impl" in (array.get("ext_metadata") or {})
    }


def _array_metadata(stored: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Shape, chunk shape and dtype name, from zarr v2's or v3's own metadata."""
    if stored["zarr_format"] == 3:
        chunks = stored["chunk_grid"]["configuration"]["chunk_shape"]
        return tuple(stored["shape"]), tuple(chunks), stored["data_type"]
    return tuple(stored["shape"]), tuple(stored["chunks"]), _zarr2_dtype(stored["dtype"])


def _zarr2_dtype(code: str) -> str:
    """The dtype name of numpy's code (``<f4``); what numpy has no code for is spelt out already."""
    import numpy as np

    return np.dtype(code).name if code[:1] in "<>|" else code


def _chunk_count(leaf: Leaf) -> int:
    return math.prod(-(-size // chunk) for size, chunk in zip(leaf.shape, leaf.chunk_shape, strict=True))


def _first_line(error: Exception) -> str:
    from tensorferry.pipelines.storage.relay import spoken

    return spoken(error).split("\n", 1)[0][:200]
