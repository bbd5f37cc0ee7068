"""Training a language model from scratch, from files to a checkpoint.

- `text`: reading text files, and the byte-level tokenizer.
- `data`: which files to learn from, which to hold out, and rows of tokens for the model.
- `loop`: the training itself.
- `checkpoint`: a run on disk, complete enough to go on from.
"""
