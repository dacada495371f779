"""The storage formats of a checkpoint, all behind the interface of `sink`."""
