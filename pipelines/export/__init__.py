"""From MaxText's layout to a Hugging Face repository, or to the folder of an adapter."""
