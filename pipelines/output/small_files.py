"""Small files and receipts under a path or a url, whichever it is."""

from pathlib import Path

from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.objects import Objects


def read_small(folder: str, name: str) -> bytes | None:
    """A file's content; None where there is no such file.

    Raises:
      FerryError: the bucket refuses.
      OSError: the file system does.
    """
    if not is_local(folder):
        return Objects(folder).read(name)
    try:
        return Path(folder, name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_small(folder: str, name: str, data: bytes) -> None:
    """Writes a file into a folder that is there.

    Raises:
      FerryError: the bucket refuses.
      OSError: the file system does.
    """
    if is_local(folder):
        Path(folder, name).write_bytes(data)
    else:
        Objects(folder).write(name, data)


def receipts_at(folder: str) -> Receipts | BucketReceipts:
    """A folder of receipts."""
    return Receipts(folder) if is_local(folder) else BucketReceipts(folder)
