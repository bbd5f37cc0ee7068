"""Strips on a GPU: blocks of queries, each computed by one program written in Triton.

blocks      a mask as the programs read it
programs    what one of them computes
passes      all of them, forward and backward
"""
