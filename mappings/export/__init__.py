"""The way home: which arrays of an Orbax tree become which tensors of which safetensors file."""
