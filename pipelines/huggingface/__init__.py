"""Hugging Face repositories: configs, headers, shards and adapters, no weight read."""
