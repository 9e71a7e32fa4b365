"""Reduced interaction sampling: existing language models on documents longer than dense attention affords."""
