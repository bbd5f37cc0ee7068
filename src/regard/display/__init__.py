"""What the command line shows: a text read by a model, and how one head comes to its output. Drawn with rich.

palette    colours that fit a background and a number of colours
ground     which background and how many colours the terminal has
letters    text as a terminal can show it, whatever is in it
reading    a text read by a model, and what of it is worth showing
paper      a console with its width and colours
page       the page of `regard look`
explained  the page of `regard explain`
data       both as plain data
"""
