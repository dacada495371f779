"""Small objects below a url, by TensorStore: the same credentials, retries and emulator as the arrays beside them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tensorferry.pipelines.sinks.sink import store_error
from tensorferry.pipelines.storage.kvstores import kvstore, worker_context
from tensorferry.pipelines.storage.remote_source import BucketSource

if TYPE_CHECKING:
    import tensorstore as ts

_AT_ONCE = 256
# The generation of an object that is not there.
NOTHING = b""


@dataclass(frozen=True)
class Objects:
    """Objects below a url, by the rest of their name. Picklable.

    Attributes:
      url: ``gs://bucket/path``.
    """

    url: str

    def read(self, name: str) -> bytes | None:
        """An object's content, or None when there is none.

        Raises:
          FerryError: the store refuses.
        """
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """The content of several objects, many at once; those that are not there are left out."""
        names, found = list(names), {}
        for start in range(0, len(names), _AT_ONCE):
            window = names[start : start + _AT_ONCE]
            results = self._do(f"{window[0]} …" if len(window) > 1 else window[0], "an object that can be read",
                               lambda store, window=window: [store.read(name) for name in window])  # fmt: skip
            found |= {name: bytes(r.value) for name, r in zip(window, results, strict=True) if r.state == "value"}
        return found

    def write(self, name: str, data: bytes) -> None:
        """Writes an object, whole or not at all."""
        self._do(name, "an object that can be written", lambda store: [store.write(name, data)])

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object unless there is one, as far as the store honours that; whether it was written."""
        return self.replace(name, data, NOTHING) is not None

    def read_generation(self, name: str) -> tuple[bytes | None, bytes]:
        """An object's content, and the generation that `replace` takes; None and `NOTHING` when there is none."""
        (found,) = self._do(name, "an object that can be read", lambda store: [store.read(name)])
        return (bytes(found.value), found.stamp.generation) if found.state == "value" else (None, NOTHING)

    def replace(self, name: str, data: bytes | None, generation: bytes) -> bytes | None:
        """Writes an object, or deletes it for want of data, if it still has a generation (``ifGenerationMatch``).

        Returns:
          The new generation; None when it had another one, and nothing was changed.
        """
        expected, wanted = "an object that can be written", generation or _nothing()
        (stamp,) = self._do(name, expected, lambda store: [store.write(name, data, if_equal=wanted)])
        return stamp.generation or None

    def delete(self, name: str) -> None:
        """Deletes an object, if there is one."""
        self._do(name, "an object that can be deleted", lambda store: [store.write(name, None)])

    def delete_all(self, names: Iterable[str]) -> None:
        """Deletes objects, many at once."""
        names = list(names)
        for start in range(0, len(names), _AT_ONCE):
            window = names[start : start + _AT_ONCE]
            self._do(window[0], "objects that can be deleted",
                     lambda store, window=window: [store.write(name, None) for name in window])  # fmt: skip

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Every object below a folder, by name: its size in bytes.

        Raises:
          FerryError: the store refuses.
        """
        # Not TensorStore's own listing: refused for want of a permission, it is an empty list (0.1.86).
        return BucketSource(self.url).sizes_below(folder)

    def newest(self, folder: str = "") -> datetime | None:
        """When the object below a folder that was written last was written, by the store's clock.

        Raises:
          FerryError: the store refuses.
        """
        entries = BucketSource(self.url).entries_below(folder).values()
        return max((entry["last_modified"] for entry in entries), default=None)

    def _do(self, name: str, expected: str, call: Callable[["ts.KvStore"], list[Any]]) -> list[Any]:
        """Waits for what a call has started."""
        try:
            return [future.result() for future in call(_open(self.url))]
        except Exception as error:
            raise store_error(f"{self.url}/{name}", expected, error) from None


def _open(url: str) -> "ts.KvStore":
    import tensorstore as ts

    return ts.KvStore.open(kvstore(url), context=worker_context()).result()


def _nothing() -> bytes:
    """TensorStore's generation of an object that is not there; an empty one would be no condition at all."""
    import tensorstore as ts

    return ts.KvStore.open("memory://").result().read("nothing").result().stamp.generation
