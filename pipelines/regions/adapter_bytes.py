"""A checkpoint's files and an adapter's in one: what is marked as the adapter's is read from its folder."""

from dataclasses import dataclass

from tensorferry.mappings.lora.merged_weights import ADAPTER_MARK
from tensorferry.pipelines.storage.byte_source import ByteSource, open_source


@dataclass(frozen=True)
class WithAdapter:
    """A byte source whose files are a checkpoint's, and an adapter's where their path bears the mark.

    Attributes:
      base: the checkpoint.
      adapter: the adapter's folder.
    """

    base: ByteSource
    adapter: ByteSource

    @property
    def url(self) -> str:
        return self.base.url

    def revision(self) -> str:
        return self.base.revision()

    def etags(self) -> dict[str, str]:
        return self.base.etags()

    def list(self) -> dict[str, int]:
        return self.base.list()

    def folders(self) -> tuple[str, ...]:
        return self.base.folders()

    def size(self, path: str) -> int:
        source, own = self.place(path)
        return source.size(own)

    def read(self, path: str, start: int, length: int) -> bytes:
        source, own = self.place(path)
        return source.read(own, start, length)

    def readinto(self, path: str, start: int, buffer: memoryview) -> None:
        source, own = self.place(path)
        source.readinto(own, start, buffer)

    def place(self, path: str) -> tuple[ByteSource, str]:
        """The source that holds a file, and its path there."""
        if path.startswith(ADAPTER_MARK):
            return self.adapter, path.removeprefix(ADAPTER_MARK)
        return self.base, path


def open_with_adapter(source: str, adapter: str) -> ByteSource:
    """The byte source for a checkpoint and, unless it is empty, for an adapter.

    Raises:
      FerryError: see :func:`tensorferry.pipelines.storage.byte_source.open_source`.
    """
    base = open_source(source)
    return WithAdapter(base, open_source(adapter)) if adapter else base
