"""Models over many ranks: what each rank runs, in a module that the processes import."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.utils.checkpoint
import transformers
import transformers.models.llama.modeling_llama  # here, so that it is imported once for all ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import regard
from regard.models import Decoder, Encoder, EncoderDecoder, MaskedLanguageModel
from regard.parallel import Shards, cut, mean_loss, sharded, sum_gradients
from small import VOCAB, config, spread

regard.huggingface.register()


def masked(config):
    return MaskedLanguageModel(Encoder(config))


def regard_model(kind, changes, seed=1):
    torch.manual_seed(seed)
    return spread({"decoder": Decoder, "encoder": masked, "translator": EncoderDecoder}[kind](config(**changes)))


class Mine(nn.Module):
    """A model of one's own, made of regard's layers: cross-attention to states, and a checkpoint around each layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.rotary = regard.Rotary(4)
        self.layers = nn.ModuleList(
            regard.MultiHeadAttention(8, 2, rotary=self.rotary, mask=regard.Causal(), sink=True) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer, reentrant in zip(self.layers, (False, True), strict=True):
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        return x @ self.embedding.weight.T


def transformers_model(kind, changes, seed=1):
    small = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "attn_implementation": "regard", "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**small | changes)
    torch.manual_seed(seed)
    name = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel", "ModernBert": "ModernBertForMaskedLM"}.get(kind)
    return spread(getattr(transformers, name or f"{kind.removesuffix('Text')}ForCausalLM")(config))


def made(kind, changes):
    if kind == "mine":
        torch.manual_seed(1)
        return spread(Mine())
    return (transformers_model if kind[0].isupper() else regard_model)(kind, changes)


def call(model, given):
    """Logits of a model for the arguments of a call; "tokens" and "source" are positional."""
    given = dict(given)
    texts = [given.pop(name) for name in ("source", "tokens") if name in given]
    found = model(*texts, **given)
    return found if isinstance(found, torch.Tensor) else found.logits


def losses_of(logits, targets):
    return F.cross_entropy(logits.mT, targets, reduction="none")


def whole_step(kind, changes, given, targets, train=False):
    """Loss, logits and gradients on one process."""
    model = made(kind, changes).train(train)
    torch.manual_seed(5)
    logits = call(model, given)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), logits.detach(), grads_of(model)


def grads_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def share_step(group, kind, changes, given, targets, shards, source_shards=None, train=False):
    """The same on one rank: its logits, and gradients summed over ranks."""
    rank = dist.get_rank(group)
    model = made(kind, changes).train(train)
    if hasattr(model, "gradient_checkpointing_enable"):
        model.train().gradient_checkpointing_enable()  # as on one process, without dropout
    torch.manual_seed(5 if rank == 0 else 1000 + rank)
    mine = {}
    for name, part in given.items():
        of = source_shards if name == "source" else shards
        cuts = isinstance(part, torch.Tensor)
        mine[name] = of.take(part, rank, dim=1) if cuts else part
    with sharded(model, shards, source_shards=source_shards, group=group, timeout=600):
        logits = call(model, mine)
    target = shards.take(targets, rank, dim=1)
    loss = mean_loss(losses_of(logits, target), target != -100, group=group, timeout=600)
    loss.backward()
    sum_gradients(model, group=group, timeout=600)
    return loss.detach(), logits.detach(), grads_of(model)


def refused(group, kind, changes, given, how="", length=12):
    """What a rank says to a call that cannot be made over ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = Shards.contiguous(length, ranks)
    if kind == "classifier":
        model = regard.Classifier(config(labels=["a", "b"]))
    elif kind == "convolution":
        model = nn.Sequential(nn.Conv1d(3, 3, 1), regard.MultiHeadAttention(8, 2))
    else:
        model = made(kind, changes).eval()
    tokens = torch.arange(length)[None] % VOCAB
    local = {
        name: shards.take(part, rank, 1) if isinstance(part, torch.Tensor) else part for name, part in given.items()
    }
    around = nullcontext()
    if how == "uneven" and rank == 1:
        tokens = tokens[:, :-1]
    if how == "recording":
        around = regard.record(model)
    mine = tokens[:, rank * (length // ranks) : (rank + 1) * (length // ranks)]
    with sharded(model, shards, group=group, timeout=30.0), around:
        if how == "generate":
            return model.generate(mine, max_new_tokens=2)
        if how == "cache":
            return model(mine, cache=model.cache())
        if how == "whole":
            return model(tokens)
        if how == "checkpointed":
            return torch.utils.checkpoint.checkpoint(model, mine, use_reentrant=False)
        return model(mine, **local)


def recorded(group, kind, changes, given, shards, path, heads=None):
    rank = dist.get_rank(group)
    model = made(kind, changes).eval()
    mine = {name: shards.take(t, rank, 1) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    with regard.parallel.record(model, shards, values=True, heads=heads, group=group, timeout=600) as recording:
        call(model, mine)
    recording.save(path)
    return recording.layers


def records_nothing(group):
    with regard.parallel.record(made("mine", {}), Shards.contiguous(12, 2), group=group) as recording:
        pass
    recording.save("nowhere")


def cuts(group, batches, shards):
    return cut(batches[dist.get_rank(group) % len(batches)], shards, group=group)


# --- data parallelism beside it ---------------------------------------------------------------------------------------


def grid_step(group, way, changes, tokens, targets, lr):
    """One step of SGD on 2 x 2 ranks, each pair of which holds the rows of a batch; the parameters after it.

    Args:
        way: "ddp" or "fsdp". tokens, targets: of all rows.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    context, model = mesh["context"], regard_model("decoder", changes)
    if way == "ddp":
        running = nn.parallel.DistributedDataParallel(model)
    else:
        for block in model.layers:
            fully_shard(block, mesh=mesh)  # copies over "data", shards over "context"
        running = fully_shard(model, mesh=mesh)
    rows = tokens.chunk(2)[mesh["data"].get_local_rank()], targets.chunk(2)[mesh["data"].get_local_rank()]
    shards = Shards.zigzag(tokens.shape[1], 2)
    optimizer = torch.optim.SGD(running.parameters(), lr=lr)
    batch = cut({"tokens": rows[0], "targets": rows[1]}, shards, group=context)
    with sharded(running, shards, group=context, timeout=600):
        logits = running(batch["tokens"])
    counted = batch["targets"] != -100
    loss = mean_loss(losses_of(logits, batch["targets"]), counted, averaged=True, timeout=600)  # over all four ranks
    loss.backward()
    optimizer.step()
    found = {name: p.detach() for name, p in model.named_parameters()}
    return loss.detach(), {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in found.items()}


def resume(folder, model, optimizer, **more):
    """What any number of ranks saved, put into a model and its optimizer."""
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments}
    dcp.load(saved, checkpoint_id=folder, **more)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def step_and_save(group, changes, tokens, targets, into, since=None):
    """One step of AdamW with FSDP2, on 2 x 2 ranks or 2 in a row, which goes on from what others saved.

    Args:
        into: where all is saved after the step. since: where others saved; None: the first step.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if dist.get_world_size(group) == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        context, share = mesh["context"], mesh["data"].get_local_rank()
        tokens, targets = tokens.chunk(2)[share], targets.chunk(2)[share]
    else:
        mesh = context = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("context",))
    model = fully_shard(regard_model("decoder", changes, seed=1 if since is None else 2), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if since is not None:
        resume(since, model, optimizer, process_group=group)
    shards = Shards.zigzag(tokens.shape[1], 2)
    batch = cut({"tokens": tokens, "targets": targets}, shards, group=context)
    with sharded(model, shards, group=context, timeout=600):
        losses = losses_of(model(batch["tokens"]), batch["targets"])
    mean_loss(losses, batch["targets"] != -100, group=group, averaged=True, timeout=600).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=into, process_group=group)
