"""WHERE bytes come from and go to: Beam, TensorStore, Orbax, file systems, the command line."""
