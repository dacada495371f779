"""Verifying an exported adapter: re-reads factors and files by other code than wrote them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tensorferry.mappings.lora.peft_files import ADAPTER_CONFIG, ADAPTER_FILE
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.export.adapter_export import AdapterOptions, plan_adapter_export
from tensorferry.pipelines.export.export_planning import Export
from tensorferry.pipelines.huggingface.headers import read_header
from tensorferry.pipelines.storage.byte_source import MissingFileError, open_source
from tensorferry.pipelines.verify.difference import Difference
from tensorferry.pipelines.verify.findings import open_findings
from tensorferry.pipelines.verify.verify_conversion import Verdict
from tensorferry.pipelines.verify.verify_export import compare_tensors, header_differences, plan_differences


def verify_adapter(
    manifest: Mapping[str, Any],
    source: str,
    output: str,
    config: str,
    sample: float,
    beam_args: tuple[str, ...],
    show_progress: bool,
) -> Verdict:
    """Compares an exported adapter with the Orbax checkpoint that it came from. See `verify_export`."""
    options = AdapterOptions(**manifest["options"])
    places = {key: place for key, place in (("source", source), ("config", config)) if place}
    export = plan_adapter_export(replace(options, **places))
    export.plan.require()
    found = [*plan_differences(export, manifest), *_file_differences(export, output)]
    if found:
        return Verdict(output, 0, 0, 0, tuple(found))
    with open_findings(output, not choose_engine(beam_args).is_local) as findings:
        return compare_tensors(export, output, manifest, sample, findings, beam_args, show_progress)


def _file_differences(export: Export, output: str) -> Iterator[Difference]:
    files = open_source(output)
    try:
        header = read_header(files, ADAPTER_FILE)
        yield from header_differences(
            export.plan, {tensor.name: tensor for tensor in header.tensors}, {ADAPTER_FILE: header.metadata}
        )
        if files.read(ADAPTER_CONFIG, 0, files.size(ADAPTER_CONFIG)) != export.config:
            yield Difference(ADAPTER_CONFIG, "", "rank, alpha and modules as the plan has them", "other bytes")
    except MissingFileError as error:
        yield Difference(output, "", f"{ADAPTER_FILE} and {ADAPTER_CONFIG}", str(error))
