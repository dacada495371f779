"""Quantisation: which stored tensors make up a logical one, and how codes and scales lie."""
