"""Where the workers of a verification leave what they find: a scratch folder, or one beside the output that workers on
other machines reach too. It is removed at the end, whatever the end is; what a killed verification left is removed by
the next, once nothing was written there for `_STALE_SECONDS`.

    gs://bucket/output/.tensorferry-verify-TOKEN/items.jsonl   the work items
    gs://bucket/output/.tensorferry-verify-TOKEN/found/        what was found, one object for each
"""

import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorferry.mappings.plan.work import WorkItem
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.receipt_count import ReceiptCount
from tensorferry.pipelines.engine.runner import RunOptions
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.sinks.sink import make_directory
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.objects import Objects
from tensorferry.pipelines.storage.remote_source import BucketSource

_ITEMS = "items.jsonl"
_NAME = ".tensorferry-verify-"
# Longer than any single comparison takes: each leaves a finding.
_STALE_SECONDS = 3600.0
_STEP = re.compile(r"(?P<output>.+)/\d+/[^/]+")


@dataclass(frozen=True)
class Findings:
    """The folders of one verification.

    Attributes:
      scratch: of this machine.
      shared: url of the folder that every worker reaches.
    """

    scratch: Path
    shared: str

    @property
    def receipts(self) -> Receipts | BucketReceipts:
        """What was found, by work item id."""
        folder = f"{self.shared}/found"
        return Receipts(folder) if is_local(self.shared) else BucketReceipts(folder)

    @property
    def local_items(self) -> str:
        """The file of work items on this machine."""
        return str(self.scratch / _ITEMS)

    def share_items(self, lines: str) -> str:
        """Writes the work items, one a line; returns the url under which every worker finds them."""
        Path(self.local_items).write_text(lines)
        if self.shared == str(self.scratch):
            return self.local_items
        if is_local(self.shared):
            shutil.copy(self.local_items, self.shared)
        else:
            Objects(self.shared).write(_ITEMS, lines.encode())
        return f"{self.shared}/{_ITEMS}"

    def how(self, items: Iterable[WorkItem], beam_args: tuple[str, ...], show_progress: bool) -> RunOptions:
        """How to run the verification of work items."""
        return RunOptions(
            beam_args=beam_args,
            state_dir=str(self.scratch),
            local_items=self.local_items,
            show_progress=show_progress,
            count_done=ReceiptCount(self.receipts, {item.id: item.write_bytes for item in items}),
        )


@contextmanager
def open_findings(output: str, are_elsewhere: bool) -> Iterator[Findings]:
    """Makes the folders, and removes them with the ``with`` block.

    Args:
      output: what is verified: a step's item, or a repository.
      are_elsewhere: whether workers run on other machines, which see the output and not this machine's scratch.

    Raises:
      FerryError: the output's folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="tensorferry-verify-") as scratch:
        if not are_elsewhere:
            yield Findings(Path(scratch), scratch)
            return
        _remove_stale(_around(output))
        shared = f"{_around(output)}/{_NAME}{uuid.uuid4().hex[:12]}"
        if is_local(shared):
            make_directory(shared)
        try:
            yield Findings(Path(scratch), shared)
        finally:
            _remove(shared)


def _around(output: str) -> str:
    """The folder that holds the steps, for a step's item; the output itself otherwise."""
    match = _STEP.fullmatch(output.rstrip("/"))
    return match["output"] if match else output.rstrip("/")


def _remove_stale(around: str) -> None:
    """Removes folders of verifications that were killed; what refuses stays."""
    now = time.time()
    for folder, newest in (_local_folders if is_local(around) else _bucket_folders)(around).items():
        if now - newest > _STALE_SECONDS:
            _remove(folder)


def _local_folders(around: str) -> dict[str, float]:
    """Folders of verifications, and when the newest file in each was written, in seconds since 1970."""
    folders = Path(around).glob(f"{_NAME}*")
    try:
        return {str(one): max(path.stat().st_mtime for path in (one, *one.rglob("*"))) for one in folders}
    except OSError:
        return {}  # one is being removed at this moment


def _bucket_folders(around: str) -> dict[str, float]:
    try:
        names = BucketSource(around).folders()
        found = {f"{around}/{name}": Objects(f"{around}/{name}").newest() for name in names if name.startswith(_NAME)}
    except FerryError:
        return {}
    return {folder: newest.timestamp() for folder, newest in found.items() if newest}


def _remove(shared: str) -> None:
    if is_local(shared):
        shutil.rmtree(shared, ignore_errors=True)
        return
    try:
        everything = Objects(shared)
        everything.delete_all(everything.sizes())
    except FerryError:
        return  # the verdict counts, and the next one uses another folder
