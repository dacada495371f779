"""From Hugging Face to MaxText's layout."""
