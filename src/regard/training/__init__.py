"""Training a language model from scratch, from files to a checkpoint.

disk         one training in a folder, and files that are whole or not there
text         reading text files, and the byte-level tokenizer
corpus       which texts to learn from, which to hold out
data         rows of tokens for the model
settings     how a model is trained, as plain data
checkpoint   a model, and a run, on disk
stopping     signals that ask to stop
metrics      the course of a run as JSON lines
loop         the training itself
measures     how good a model is
card         what is said about it
run          all of that: from texts to a folder
"""
