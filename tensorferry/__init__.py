"""Tensorferry moves terabyte model checkpoints between the layouts that training teams use."""
