"""Tiers: one file a tier; :mod:`tierkv.tiers.base` is the contract that each of them keeps."""
