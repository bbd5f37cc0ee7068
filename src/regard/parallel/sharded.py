"""Whole models under a process group: every rank runs the model on its own tokens, attention runs over all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from regard.hooks import Attend, Compute, Heads, Hook, Result, ScoringArguments, Share, hooked
from regard.layers import Block, MultiHeadAttention, check_tokens
from regard.models import Classifier, EncoderDecoder, Stack
from regard.parallel import foreign
from regard.parallel.agreement import agree
from regard.parallel.channel import DEFAULT_TIMEOUT, Channel
from regard.parallel.fingerprint import fingerprint
from regard.parallel.functional import attention, attention_with_lse
from regard.parallel.shards import Shards, check_shards
from regard.recording.watching import checked, unwrapped
from regard.shapes import check_kind

FUNCTION = "parallel.sharded"

MIXING = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention, nn.modules.batchnorm._BatchNorm)
"""Modules of torch that mix tokens with each other: on a rank's own tokens they would compute something else."""


Seen = Callable[[nn.Module, Heads, ScoringArguments, Tensor, Shards, Shards], None]
"""Gets a layer's call: heads of this rank's tokens, scoring of the whole, lse, and where queries and keys lie."""


@contextmanager
def sharded(
    model: nn.Module,
    shards: Shards,
    *,
    source_shards: Shards | None = None,
    group: object = None,
    timeout: float = DEFAULT_TIMEOUT,
    exchange: str = "auto",
) -> Iterator[None]:
    """Inside the block, a model that each rank runs on its own tokens computes what it computes on the whole text.

        with regard.parallel.sharded(model, shards):
            logits = model(shards.take(tokens, rank, dim=1), mask=mask)     # those of the rank's tokens

    Positions are those in the whole text, and each attention layer attends to the tokens of all ranks. The backward
    pass, in the block or after it, gives each rank its own share of the parameters' gradients: the sum over ranks is
    the gradient of the whole (`sum_gradients`, or data parallelism over all ranks). Every rank of the group opens the
    block and runs the model, in the same order. Compiled models run uncompiled.

    Args:
        model: a model of regard, of transformers with ``attn_implementation="regard"``, or a module of your own made of
            regard's layers that treats tokens alone outside of them; wrapped by DDP or FSDP or not.
            A model of regard is given the mask of the whole text; one of transformers, every tensor of this rank's
            tokens (`cut`).
        shards: which positions each rank holds.
        source_shards: for a model with cross-attention, the same for the text that it attends to.
        group: a process group or a device mesh of one axis; None for all processes.
        timeout: seconds to wait for another rank.
        exchange: as in `regard.parallel.attention`.
    Raises:
        TypeError, ValueError: the model cannot be run so, or, in the block, what it is asked: a cache, weights, a
            recording. On every rank.
        ParallelError: no process group; ranks that disagree; a rank that does not answer.
    """
    with over_ranks(model, shards, source_shards, group, timeout, exchange):
        yield


@contextmanager
def over_ranks(
    model: nn.Module,
    shards: Shards,
    source_shards: Shards | None,
    group: object,
    timeout: float,
    exchange: str,
    seen: Seen | None = None,
) -> Iterator[None]:
    """`sharded`, which may also show each call of a layer, as it is made first, to a function."""
    channel = Channel(FUNCTION, group, timeout)
    inside: list[nn.Module] = []

    def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
        inside.append(checked(FUNCTION, model))
        check_shards(FUNCTION, "shards", shards, channel.ranks)
        if source_shards is not None:
            check_shards(FUNCTION, "source_shards", source_shards, channel.ranks)
        _check_model(inside[0], shards, source_shards)
        shown = {"model": type(inside[0]).__name__, "exchange": exchange, "shards": repr(shards),
                 "source_shards": repr(source_shards)}  # fmt: skip
        prints = {name: fingerprint(None if of is None else of.ranges)
                  for name, of in (("shards", shards), ("source_shards", source_shards))}  # fmt: skip
        return shown, prints, []

    agree(channel, check, told=0)

    def around(queries: Shards, keys: Shards, first: bool) -> Hook:
        def hook(layer: nn.Module, attend: Attend) -> Attend:
            def attended(heads: Heads, scoring: ScoringArguments) -> Result:
                if type(attend) is not Compute:
                    raise ValueError(f"{FUNCTION}: {type(layer).__name__} was asked for weights (output_attentions), "
                                     "which no rank has all keys for")  # fmt: skip
                given: dict[str, Any] = {
                    **scoring, "dropout": attend.dropout, "shards": queries, "key_shards": keys, "group": group,
                    "timeout": timeout, "exchange": exchange,
                }  # fmt: skip
                if seen is None:
                    return attention(*heads, **given), None
                output, lse = attention_with_lse(*heads, **given)
                if first:
                    seen(layer, heads, scoring, lse, queries, keys)
                return output, lse

            return attended

        return hook

    with ExitStack() as stack:
        blocks = []
        for (queries, keys), modules in _texts(inside[0], shards, source_shards or shards).items():
            hook, again = around(queries, keys, True), around(queries, keys, False)
            share = Share(keys.length, keys.ranges[channel.rank])
            blocks.append(stack.enter_context(hooked(modules, hook, again=again, innermost=True, share=share)))
            for module in modules:
                if isinstance(module, Stack):
                    gate = _gate(channel, Share(queries.length, queries.ranges[channel.rank]))
                    stack.callback(module.register_forward_pre_hook(gate, with_kwargs=True).remove)
        for outer in foreign.models_in(inside[0], outer_only=True):
            found = foreign.try_out(outer, shards.length)
            for module in foreign.models_in(outer):
                stack.enter_context(foreign.told(module, found, shards, channel))
        yield
    if any(block.elsewhere for block in blocks):
        raise ValueError(
            f"{FUNCTION}: {type(inside[0]).__name__} ran in another thread than the with block, which applies to its "
            "own thread only: what it computed there is of one rank's tokens; open the block in the thread that runs it"
        )


def _check_model(model: nn.Module, shards: Shards, source_shards: Shards | None) -> None:
    """Refuses a model that would not compute the same on a share of its text."""
    theirs = {id(part) for whole in foreign.models_in(model) for part in whole.modules()}
    attends = bool(theirs)
    for name, part in model.named_modules():
        attends = attends or isinstance(part, MultiHeadAttention)
        if isinstance(part, Classifier):
            raise ValueError(f"{FUNCTION}: a Classifier reads the state of the first token, which one rank alone "
                             "holds; run its .encoder")  # fmt: skip
        if isinstance(part, MIXING) and id(part) not in theirs:
            raise ValueError(f"{FUNCTION}: {name or 'the model'} ({type(part).__name__}) mixes tokens outside of "
                             "regard's attention, and a rank has only its own")  # fmt: skip
        if isinstance(part, Block) and part.cross is not None and source_shards is None:
            raise ValueError(f"{FUNCTION}: {type(model).__name__} attends to another text: source_shards has to say "
                             "which of that text's positions each rank holds")  # fmt: skip
    if not attends:
        raise ValueError(f"{FUNCTION}: {type(model).__name__} contains neither a regard.MultiHeadAttention nor a model "
                         "of transformers")  # fmt: skip
    for outer in foreign.models_in(model, outer_only=True):
        foreign.try_out(outer, shards.length)


def _texts(model: nn.Module, own: Shards, source: Shards) -> dict[tuple[Shards, Shards], list[nn.Module]]:
    """The modules by where their queries and their keys lie."""
    of: dict[int, tuple[Shards, Shards]] = {}
    for part in model.modules():
        if isinstance(part, EncoderDecoder):
            of |= {id(module): (source, source) for module in unwrapped(part.encoder).modules()}
        elif isinstance(part, Block) and part.cross is not None:
            of |= {id(module): (own, source) for module in part.cross.modules()}
    found: dict[tuple[Shards, Shards], list[nn.Module]] = {}
    for part in model.modules():
        found.setdefault(of.get(id(part), (own, own)), []).append(part)
    return found


def _gate(channel: Channel, share: Share) -> Any:
    """What a model of regard is given, checked on all ranks before any of them computes."""

    def gate(model: Stack, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
            tokens = arguments[0] if arguments else named.get("tokens")
            check_kind(type(model).__name__, "tokens", tokens, Tensor)
            assert isinstance(tokens, Tensor)
            check_tokens(type(model).__name__, tokens, model.config.vocab_size)
            share.check(type(model).__name__, tokens.shape[1])
            return {"model": type(model).__name__, "batch": len(tokens)}, {}, []

        agree(channel, check, told=0)

    return gate
