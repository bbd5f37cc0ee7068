"""Calls over many ranks: what each rank runs, in a module that the processes import."""

import os
import time

import torch
import torch.distributed as dist

import regard
from regard.parallel import Shards, attention_with_lse


def share(group, tensors, weights, arguments, shards, key_shards=None, exchange="keys"):
    """One rank's output and lse, and the gradients of query, key and value and of what all ranks share.

    Args:
        tensors: query, key and value of the whole sequence. weights: gradients of output and lse, of the whole.
        arguments: of the call; "sink" and a "bias" tensor get gradients.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    of_query = shards or Shards.contiguous(tensors[0].shape[2], size)
    of_key = key_shards or (of_query if shards else Shards.contiguous(tensors[1].shape[2], size))
    along = of_query, of_key, of_key
    mine = [of.take(t.detach(), rank).clone().requires_grad_() for t, of in zip(tensors, along, strict=True)]
    arguments = dict(arguments)
    learned = [arguments[name] for name in ("sink", "bias") if isinstance(arguments.get(name), torch.Tensor)]
    for tensor in learned:
        tensor.requires_grad_()
    if "dropout" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(5 if rank == 0 else 1000 + rank)
    output, lse = attention_with_lse(
        *mine, **arguments, shards=shards, key_shards=key_shards, group=group, timeout=600, exchange=exchange
    )
    total = (output * of_query.take(weights[0], rank)).sum()
    total = total + (lse * of_query.take(weights[1], rank)).masked_fill(lse.isinf(), 0.0).sum()
    grads = torch.autograd.grad(total, [*mine, *learned])
    return output.detach(), lse.detach(), *grads


def whole(attend, tensors, weights, arguments):
    """The same of the whole sequence, by a function on one process."""
    mine = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    arguments = dict(arguments)
    learned = [name for name in ("sink", "bias") if isinstance(arguments.get(name), torch.Tensor)]
    for name in learned:
        arguments[name] = arguments[name].detach().to(mine[0].dtype).requires_grad_()
    if "dropout" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(5)
    output, lse = attend(*mine, **arguments)
    total = (output * weights[0].to(output)).sum()
    total = total + (lse * weights[1].to(lse)).masked_fill(lse.isinf(), 0.0).sum()
    grads = torch.autograd.grad(total, [*mine, *[arguments[name] for name in learned]])
    return output.detach(), lse.detach(), *grads


def reference(*tensors, **arguments):
    return regard.attention_with_lse(*tensors, **arguments, kernel="reference")


def share_by_table(group, tensors, weights, table, shards, key_shards):
    """The gradient of a table of relative biases on one rank."""
    table.requires_grad_()
    rank = dist.get_rank(group)
    mine = [of.take(t.detach(), rank) for t, of in zip(tensors, (shards, key_shards, key_shards), strict=True)]
    bias = regard.RelativeBias(table, max_distance=6)
    output, lse = attention_with_lse(
        *mine, bias=bias, mask=regard.Causal(), shards=shards, key_shards=key_shards, group=group, timeout=600
    )
    total = (output * shards.take(weights[0], rank)).sum()
    total = total + (lse * shards.take(weights[1], rank)).masked_fill(lse.isinf(), 0.0).sum()
    return torch.autograd.grad(total, table)[0]


every = 0
"""Which keys the rules below show: a number that they name, which a rank may have set otherwise."""


def by_name(batch, head, query, key):
    return (query + key) % every == 0


class ByName(regard.Mask):
    def rule(self, batch, head, query, key):
        return by_name(batch, head, query, key)


class BiasByName(regard.Bias):
    def rule(self, batch, head, query, key):
        return (query + key).float() * every


def even(number):
    return number == 0 or odd(number - 1)


def odd(number):
    return number != 0 and even(number - 1)


OWN = {"function": regard.Where(by_name), "class": ByName()}


def call(group, given, timeout=30.0):
    """A call of 12 tokens with arguments of its own on each rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = {"length": 12 // size, "dim": 4, "dtype": torch.float32} | given.get(rank, given.get("all", {}))
    query = torch.ones(1, 2, mine.pop("length"), mine.pop("dim"), dtype=mine.pop("dtype"))
    function = mine.pop("function", "attention")
    global every
    every = mine.pop("every", 0)
    if isinstance(mine.get("mask"), str):
        mine["mask"] = OWN.get(mine["mask"], mine["mask"])
    if "bias" in mine:
        mine["bias"] = BiasByName()
    if "sleep" in mine:
        time.sleep(mine["sleep"])
        return None
    for _ in range(mine.pop("times", 1)):
        getattr(regard.parallel, function)(query, query, query, group=group, timeout=timeout, **mine)
    return "no error"


def calls_as_an_outsider(group):
    query = torch.ones(1, 2, 6, 4)
    return regard.parallel.attention(query, query, query, group=dist.GroupMember.NON_GROUP_MEMBER)


def compiled_step(group):
    """Loss and gradients of a step that torch.compile was given, and of the same as it is."""
    shards = Shards.zigzag(12, dist.get_world_size(group))

    def step(query):
        output = regard.parallel.attention(query * 2, query, query, mask=regard.Causal(), shards=shards, group=group)
        loss = regard.parallel.mean_loss((output**2).sum(-1), group=group)
        loss.backward()
        return loss.detach()

    found = []
    for run in (torch.compile(step, backend="eager"), step):
        query = shards.take(torch.linspace(-1, 1, 96).view(1, 2, 12, 4), dist.get_rank(group)).clone().requires_grad_()
        found.append((run(query), query.grad))
    return found


def differentiates_twice(group, exchange):
    query = torch.ones(1, 2, 6, 4, requires_grad=True)
    output = regard.parallel.attention(query, query, query, group=group, exchange=exchange)
    return torch.autograd.grad((output**2).sum(), query, create_graph=True)


def dies_between_the_passes(group):
    """The last rank ends after the forward pass; the others go on."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    query = torch.ones(1, 2, 6, 4, requires_grad=True)
    output = regard.parallel.attention(query, query, query, group=group, timeout=20.0)
    if rank == size - 1:
        os._exit(1)
    began = time.monotonic()
    try:
        output.sum().backward()
    except regard.parallel.ParallelError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


class Squares(regard.PerQuery):
    """A statistic of one's own."""

    def of(self, tile):
        return tile.weights.square().sum(-1)


def statistics(groups):
    return (
        regard.Entropy(), regard.Top(3), regard.Received(), regard.Mass(groups), regard.Distance(), regard.MaxScore(),
        regard.Viewers(), regard.Visible(), regard.Spread(), regard.Image(5), regard.Image(4, "mean"),
        regard.Pyramid(4), Squares(),
    )  # fmt: skip


def seen(group, query, key, arguments, shards, key_shards, groups, lse):
    """What one rank's observation says, asked at once and one by one."""
    rank = dist.get_rank(group)
    mine = shards.take(query.detach(), rank), key_shards.take(key.detach(), rank)
    given = None if lse is None else shards.take(lse, rank)
    found = regard.parallel.observe(*mine, **arguments, lse=given, shards=shards, key_shards=key_shards, group=group)
    return found.gather(*statistics(groups)), found.received(), found.lse


def asks_for_what_cannot_be_joined(group):
    class Last(regard.Statistic):
        pass

    query = torch.zeros(1, 1, 2, 4)
    return regard.parallel.observe(query, query, group=group).gather(Last())
