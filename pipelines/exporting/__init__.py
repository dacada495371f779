"""Exporting: an Orbax checkpoint becomes the safetensors files of a Hugging Face repository."""
