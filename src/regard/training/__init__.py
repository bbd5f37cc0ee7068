"""Training a language model from scratch, from files to a checkpoint.

Here belongs what training alone needs. Nothing prints: a run tells its listener what happens (`report`).
"""
