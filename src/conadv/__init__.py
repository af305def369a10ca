"""Concurrent adversarial learning."""
