"""The page: walk through the attention of a model, from the whole matrix to a single product.

    recording.view()                        in a notebook
    regard.viewer.write(recording, path)    as one file, which works offline

Here belongs what the page can ask and how the answers travel: over HTTP, in a notebook's messages, or inside one file.
What is drawn is in `static/`, hand-written modules that a browser runs as they are.
"""

from regard.viewer.notebook import view, write

__all__ = ["view", "write"]
