"""Which shard each tensor comes from: the index decides, and index and disk are compared both ways."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.huggingface.headers import Header
from tensorferry.pipelines.storage.byte_source import ByteSource, MissingFileError, SourceError, is_inside
from tensorferry.pipelines.storage.strict_json import parse_object, shown

Scan = tuple[Header | None, list[Problem]]
_SERIES = re.compile(r"(.+)-(\d+)-of-(\d+)\.(?:safetensors|bin)")
# Mistral's repositories hold a second copy of all weights under this name, with names of their own.
_SECOND_COPY = "consolidated"


@dataclass(frozen=True)
class ShardForm:
    """How a kind of shard is named and read.

    Attributes:
      pattern: matches the file name of a shard.
      index: file name of the index.
      scan: headers and problems of the given files (path to bytes), by path.
    """

    pattern: re.Pattern[str]
    index: str
    scan: Callable[[ByteSource, Mapping[str, int]], dict[str, Scan]]

    def shards(self, listing: Iterable[str]) -> list[str]:
        return sorted(file for file in listing if self.pattern.fullmatch(file))


@dataclass(frozen=True)
class Shards:
    """The shards of a checkpoint, resolved to one place per tensor.

    Attributes:
      tensors: the authoritative copy of each tensor, in order of file and offset.
      headers: of the files that tensors are read from.
      sizes: bytes of those files.
      unindexed: names that shards hold and the index does not name.
      unindexed_files: shards in the folder that are not part of the checkpoint.
      superseded: copies of tensors that the index places elsewhere; never read.
    """

    tensors: dict[str, StoredTensor]
    headers: dict[str, Header]
    sizes: dict[str, int]
    unindexed: tuple[str, ...] = ()
    unindexed_files: tuple[str, ...] = ()
    superseded: tuple[StoredTensor, ...] = ()


def resolve_shards(source: ByteSource, listing: Mapping[str, int], form: ShardForm) -> tuple[Shards, list[Problem]]:
    """Reads all headers and places every tensor; the problems are those of files, index and both together."""
    if form.index not in listing:
        return _by_folder(source, listing, form)
    weight_map, problems = _weight_map(source, form.index, listing[form.index])
    shards, found = _by_index(source, listing, form, weight_map)
    return shards, problems + found


def _by_index(
    source: ByteSource, listing: Mapping[str, int], form: ShardForm, weight_map: dict[str, str]
) -> tuple[Shards, list[Problem]]:
    sizes, problems = _named_sizes(source, listing, form.index, weight_map)
    strays = [file for file in form.shards(listing) if file not in sizes]
    if problems and strays:
        problems.append(_disagreement(form.index, len(problems), strays))
    scans = form.scan(source, sizes | {file: listing[file] for file in strays})
    problems += [problem for file in sizes for problem in scans[file][1]]
    held = {file: {one.name: one for one in header.tensors} for file, (header, _) in scans.items() if header}
    problems += _misplaced(form.index, weight_map, held)
    tensors = [held[file][name] for name, file in weight_map.items() if name in held.get(file, ())]
    extras = [one for here in held.values() for one in here.values()]
    unindexed = {one.name: None for one in extras if one.name not in weight_map}
    superseded = tuple(one for one in extras if weight_map.get(one.name, one.file) != one.file)
    headers = _headers(scans, sizes)
    return Shards(_by_place(tensors), headers, sizes, tuple(unindexed), tuple(strays), superseded), problems


def _by_folder(source: ByteSource, listing: Mapping[str, int], form: ShardForm) -> tuple[Shards, list[Problem]]:
    """Without an index every shard counts, except a second copy under Mistral's names."""
    files = form.shards(listing)
    main = [file for file in files if not file.startswith(_SECOND_COPY)] or files
    sizes = {file: listing[file] for file in main}
    scans = form.scan(source, {file: listing[file] for file in files})
    problems = [problem for file in main for problem in scans[file][1]] + _incomplete_series(main)
    held = [one for file in main for one in _tensors(scans[file])]
    problems += _stored_twice(held)
    second = [file for file in files if file not in sizes]
    names = {one.name for one in held}
    unindexed = {one.name: None for file in second for one in _tensors(scans[file]) if one.name not in names}
    superseded = tuple(one for file in second for one in _tensors(scans[file]) if one.name in names)
    headers = _headers(scans, sizes)
    return Shards(_by_place(held), headers, sizes, tuple(unindexed), tuple(second), superseded), problems


def _weight_map(source: ByteSource, index: str, size_bytes: int) -> tuple[dict[str, str], list[Problem]]:
    try:
        content, problems = parse_object(source.read(index, 0, size_bytes), index, "index")
    except SourceError as error:
        return {}, [error.problem]
    if content is None:
        return {}, problems
    entries = content.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        expected = "a weight_map: tensor names to shard names"
        return {}, [*problems, Problem(index, expected, shown(entries), "Fetch the index again.")]
    bad = [name for name, file in entries.items() if not (isinstance(file, str) and is_inside(file))]
    problems += [_bad_entry(index, name, entries[name]) for name in bad]
    return {name: file for name, file in entries.items() if name not in set(bad)}, problems


def _named_sizes(
    source: ByteSource, listing: Mapping[str, int], index: str, weight_map: dict[str, str]
) -> tuple[dict[str, int], list[Problem]]:
    sizes, problems = {}, []
    for file, names in _grouped((file, name) for name, file in weight_map.items()):
        try:
            sizes[file] = listing[file] if file in listing else source.size(file)
        except MissingFileError:
            problems.append(_missing_shard(index, file, names))
        except SourceError as error:
            problems.append(error.problem)
    return sizes, problems


def _misplaced(index: str, weight_map: dict[str, str], held: dict[str, dict[str, StoredTensor]]) -> list[Problem]:
    """Tensors that the index names and their shard lacks, told with the shards that do hold them."""
    absent = [(name, file) for name, file in weight_map.items() if file in held and name not in held[file]]
    places = (((file, _holders(name, held)), name) for name, file in absent)
    return [_absent(index, file, holders, names) for (file, holders), names in _grouped(places)]


def _holders(name: str, held: dict[str, dict[str, StoredTensor]]) -> tuple[str, ...]:
    return tuple(file for file, tensors in held.items() if name in tensors)


def _stored_twice(tensors: list[StoredTensor]) -> list[Problem]:
    files: dict[str, list[str]] = defaultdict(list)
    for one in tensors:
        files[one.name].append(one.file)
    twice = ((tuple(places), name) for name, places in files.items() if len(places) > 1)
    return [_in_several(places, names) for places, names in _grouped(twice)]


def _incomplete_series(files: list[str]) -> list[Problem]:
    """Shards number themselves (2 of 3), so a missing one shows even where there is no index."""
    parts = [match for file in files if (match := _SERIES.fullmatch(file))]
    numbers = _grouped(((match[1], int(match[3])), int(match[2])) for match in parts)
    return [
        _gap(stem, total, total - len(set(present))) for (stem, total), present in numbers if len(set(present)) < total
    ]


def _headers(scans: dict[str, Scan], files: Iterable[str]) -> dict[str, Header]:
    return {file: header for file in files if (header := scans[file][0])}


def _tensors(scan: Scan) -> tuple[StoredTensor, ...]:
    return scan[0].tensors if scan[0] else ()


def _by_place(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    return {one.name: one for one in sorted(tensors, key=lambda one: (one.file, one.offset, one.name))}


def _grouped(pairs: Iterable[tuple]) -> list[tuple]:
    groups: dict = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return list(groups.items())


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Names for a sentence, at most ``limit`` of them and a count of the rest."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + rest


def _missing_shard(index: str, file: str, names: list[str]) -> Problem:
    expected = f"a shard with {len(names)} tensors, as {index} says ({listed(names, 3)})"
    return Problem(shown(file), expected, "no such file", "Fetch this shard.")


def _disagreement(index: str, missing: int, strays: list[str]) -> Problem:
    found = f"{missing} of its shards missing, and here but not in it: {listed(strays)}"
    fix = "The index belongs to other files: fetch index and shards of one revision."
    return Problem(index, "the names of the shards in this folder", found, fix)


def _bad_entry(index: str, name: str, file: object) -> Problem:
    return Problem(shown(name), "a file name inside the folder", shown(file), "Correct the index.", index)


def _absent(index: str, file: str, holders: tuple[str, ...], names: list[str]) -> Problem:
    found = f"it in {listed(holders)} instead" if holders else "it in no file here"
    fix = "The index belongs to other files: fetch index and shards of one revision."
    return Problem(listed(names), f"to be in {file}, as {index} says", found, fix)


def _in_several(files: tuple[str, ...], names: list[str]) -> Problem:
    fix = "Keep one of the files, or add the index that says which one counts."
    return Problem(listed(names), "to be stored once", f"it in {listed(files)}", fix)


def _gap(stem: str, total: int, missing: int) -> Problem:
    expected = f"{total} shards, as their names say"
    return Problem(f"{stem}-*", expected, f"{missing} of them missing", "Fetch the missing shards.")
