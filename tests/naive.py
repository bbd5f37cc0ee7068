"""Attention once more, number by number, in plain Python: written from the definition and from nothing else.

score(b, h, i, j) = softcap(scale * sum_d query[d] * key[d]) + bias(b, h, i, j)     only where allowed(b, h, i, j)
weight = exp(score) / (sum exp(score) + exp(sink));   output = sum_j weight * value;   lse = log of the denominator
"""

import math

import torch


def naive(query, key, value, *, allowed=None, bias=None, scale=None, softcap=None, sink=None, v=None):
    """Output and lse as float64 tensors.

    Args:
        allowed, bias: functions of (b, h, i, j), or None.
        sink: one number per head; v: one list of numbers per head (additive similarity).
    """
    query, key, value = query.tolist(), key.tolist(), value.tolist()
    outputs, denominators = [], []
    for b, heads in enumerate(query):
        outputs.append([])
        denominators.append([])
        for h, rows in enumerate(heads):
            kv = h // (len(heads) // len(key[b]))
            answers = [
                _one_query(b, h, i, row, key[b][kv], value[b][kv], allowed, bias, scale, softcap, sink, v)
                for i, row in enumerate(rows)
            ]
            outputs[b].append([output for output, _ in answers])
            denominators[b].append([lse for _, lse in answers])
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(denominators, dtype=torch.float64)


def _one_query(b, h, i, row, keys, values, allowed, bias, scale, softcap, sink, v):
    scores = {}
    for j, column in enumerate(keys):
        if allowed is not None and not allowed(b, h, i, j):
            continue
        if v is None:
            score = sum(x * y for x, y in zip(row, column, strict=True))
            score *= 1 / math.sqrt(len(row)) if scale is None else scale
        else:
            score = sum(u * math.tanh(x + y) for u, x, y in zip(v[h], row, column, strict=True))
            score *= 1 if scale is None else scale
        if softcap is not None:
            score = softcap * math.tanh(score / softcap)
        if bias is not None:
            score += bias(b, h, i, j)
        if score != -math.inf:
            scores[j] = score
    total = sum(math.exp(score) for score in scores.values()) + (0.0 if sink is None else math.exp(sink[h]))
    output = [sum(math.exp(s) / total * values[j][e] for j, s in scores.items()) for e in range(len(values[0]))]
    return output, math.log(total) if total else -math.inf
