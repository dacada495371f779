"""The place that a run fills: who works on it, what is finished, and the commit that makes it count."""
