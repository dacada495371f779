"""Low-rank adapters: what a PEFT adapter holds, and where its factors go in MaxText's tree."""
