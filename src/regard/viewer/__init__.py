"""The page: walk through the attention of a model, from the whole matrix to a single product.

Here belongs what the page can ask and how the answers travel: over HTTP, in a notebook's messages, or inside one file.
What is drawn is in `static/`, hand-written modules that a browser runs as they are.
"""
