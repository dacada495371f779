"""The part of Cloud Storage's gRPC API (google.storage.v2) that TensorStore calls, over the objects of the emulator.

Messages are those of google-cloud-storage; it compares generations, which the emulator does not."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import grpc
from gcs_server import Gcs
from google.cloud._storage_v2 import types

_SERVICE = "google.storage.v2.Storage"
_PIECE_BYTES = 1 << 20
_NAMES_AT_ONCE = 7


@dataclass
class GrpcGcs:
    """The server as the tests see it.

    Attributes:
      gcs: holds the objects.
      calls: how often each method was called.
      busy: method to how many of its next calls are answered UNAVAILABLE.
      refused: method to how all of its calls are answered, and to the part of an object's name that they are about.
      written: how often each ``bucket/object`` was written.
    """

    gcs: Gcs
    endpoint: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)
    refused: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    written: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, method: str, context: grpc.ServicerContext) -> None:
        with self.lock:
            self.calls[method] += 1
            is_busy, self.busy[method] = self.busy[method] > 0, self.busy[method] - 1
        if is_busy:
            context.abort(grpc.StatusCode.UNAVAILABLE, "ordered by the test")

    def refuse(self, method: str, name: str, context: grpc.ServicerContext) -> None:
        code, part = self.refused.get(method, (None, ""))
        if code is not None and part in name:
            context.abort(code, f"{name}: as the test wants it")

    def read(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.note("read", context)
        bucket = _bucket(request.bucket)
        self.refuse("read", request.object_, context)
        found = self.gcs.describe(bucket, request.object_)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such object")
        if "if_generation_not_match" in request and str(request.if_generation_not_match) == found["generation"]:
            context.abort(grpc.StatusCode.ABORTED, "as it was")
        if "if_generation_match" in request and str(request.if_generation_match) != found["generation"]:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another generation")
        data = self.gcs.get(bucket, request.object_)
        start = request.read_offset if request.read_offset >= 0 else max(0, len(data) + request.read_offset)
        if start > len(data):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "starts beyond the end")
        end = min(len(data), start + request.read_limit) if request.read_limit else len(data)
        answer = types.ReadObjectResponse(
            metadata=_resource(request.bucket, found),
            content_range=types.ContentRange(start=start, end=end, complete_length=len(data)),
            object_checksums=types.ObjectChecksums(crc32c=google_crc32c.value(data)),
        )
        for at in range(start, max(end, start + 1), _PIECE_BYTES):
            answer.checksummed_data = _checksummed(data[at : min(end, at + _PIECE_BYTES)])
            yield answer
            answer = types.ReadObjectResponse()

    def write(self, requests: Iterable[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        self.note("write", context)
        spec, data = None, bytearray()
        for request in requests:
            spec = request.write_object_spec if "write_object_spec" in request else spec
            if "checksummed_data" in request:
                content = request.checksummed_data.content
                if request.write_offset != len(data) or google_crc32c.value(content) != request.checksummed_data.crc32c:
                    context.abort(grpc.StatusCode.DATA_LOSS, "not the bytes that were sent")
                data += content
            if request.finish_write:
                break
            if request.state_lookup:
                yield types.BidiWriteObjectResponse(persisted_size=len(data))
        if spec is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no spec")
        yield types.BidiWriteObjectResponse(resource=self._put(spec, bytes(data), context))

    def _put(self, spec: Any, data: bytes, context: grpc.ServicerContext) -> Any:
        bucket, name = _bucket(spec.resource.bucket), spec.resource.name
        self.refuse("write", name, context)
        key = f"{bucket}/{name}"
        with self.gcs.object_locks[key]:
            if "if_generation_match" in spec:
                self._refuse_other(bucket, name, spec.if_generation_match, context)
            self.gcs.put(bucket, name, data)
            self.written[key] += 1
            return _resource(spec.resource.bucket, self.gcs.describe(bucket, name))

    def delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        from google.protobuf import empty_pb2

        self.note("delete", context)
        bucket, name = _bucket(request.bucket), request.object_
        with self.gcs.object_locks[f"{bucket}/{name}"]:
            if "if_generation_match" in request:
                self._refuse_other(bucket, name, request.if_generation_match, context)
            if self.gcs.describe(bucket, name) is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such object")
            self.gcs.delete(bucket, name)
        return empty_pb2.Empty()

    def _refuse_other(self, bucket: str, name: str, wanted: int, context: grpc.ServicerContext) -> None:
        found = self.gcs.describe(bucket, name)
        if str(wanted) != (found["generation"] if found else "0"):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another generation")

    def list(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.note("list", context)
        first, last = request.lexicographic_start, request.lexicographic_end
        names = sorted(self.gcs.names(_bucket(request.parent), request.prefix))
        names = [name for name in names if name >= first and (not last or name < last)]
        start = int(request.page_token or 0)
        page = names[start : start + _NAMES_AT_ONCE]
        more = str(start + _NAMES_AT_ONCE) if start + _NAMES_AT_ONCE < len(names) else ""
        found = (self.gcs.describe(_bucket(request.parent), name) for name in page)
        return types.ListObjectsResponse(
            objects=[_resource(request.parent, one) for one in found if one], next_page_token=more
        )

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        from google.protobuf import empty_pb2

        return {
            "ReadObject": grpc.unary_stream_rpc_method_handler(
                self.read, types.ReadObjectRequest.deserialize, types.ReadObjectResponse.serialize),
            "BidiWriteObject": grpc.stream_stream_rpc_method_handler(
                self.write, types.BidiWriteObjectRequest.deserialize, types.BidiWriteObjectResponse.serialize),
            "DeleteObject": grpc.unary_unary_rpc_method_handler(
                self.delete, types.DeleteObjectRequest.deserialize, empty_pb2.Empty.SerializeToString),
            "ListObjects": grpc.unary_unary_rpc_method_handler(
                self.list, types.ListObjectsRequest.deserialize, types.ListObjectsResponse.serialize),
        }  # fmt: skip


def _bucket(resource_name: str) -> str:
    return resource_name.removeprefix("projects/_/buckets/")


def _resource(bucket: str, found: Any) -> Any:
    numbers = {"generation": int(found["generation"]), "size": int(found["size"]), "metageneration": 1}
    return types.Object(name=found["name"], bucket=bucket, **numbers)


def _checksummed(data: bytes) -> Any:
    return types.ChecksummedData(content=data, crc32c=google_crc32c.value(data))


@contextmanager
def serve_grpc(gcs: Gcs) -> Iterator[GrpcGcs]:
    """The server, ended with the ``with`` block."""
    served = GrpcGcs(gcs)
    server = grpc.server(futures.ThreadPoolExecutor(64), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, served.handlers()),))
    served.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield served
    finally:
        server.stop(None).wait()
