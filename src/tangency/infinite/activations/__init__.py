"""Gaussian moments of activations."""
