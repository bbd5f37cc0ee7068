"""What the command line shows: a text read by a model, and how one head comes to its output. Drawn with rich.

Here belongs what is shown and how it looks on a terminal. What there is to show is computed elsewhere, and which
command shows it is decided in `cli`.
"""
