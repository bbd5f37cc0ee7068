"""Calls that a type checker has to refuse: mypy fails here where one of them needs no `type: ignore`."""

import torch

import regard

query = torch.zeros(1, 2, 3, 4)
regard.attention(query, query, query)
regard.attention(query, query, query, is_causal=True)  # type: ignore[call-arg]
regard.MultiHeadAttention(8, 2)
regard.MultiHeadAttention(embed_dim=8)  # type: ignore[call-arg]
regard.ModelConfig(hidden_size=8)  # type: ignore[call-arg]
