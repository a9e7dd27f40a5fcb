"""Generated protobuf code of `control.proto`; regenerate with `make generate`."""
