"""regard: attention for PyTorch that is exact, fast with any mask, and open to look into at any length.

attention, attention_with_lse, plan     the function, its log-sum-exp, and what a call would cost
Causal, Window, Prefix, Document, ...   masks: who may attend to whom; they compose with & | ~
Alibi, RelativeBias                     biases: what is added to a score
observe, record, gather, steps          what a call, a model and a layer did
intervene                               a model with single heads changed, by one of regard.interventions
MultiHeadAttention, Block, ...          layers
Encoder, Decoder, EncoderDecoder        models, from one ModelConfig
regard.huggingface                      regard inside transformers
regard.plots                            figures
regard.layouts                          other libraries' weights in regard's layers and models
load                                    a bundled model, or a folder that `regard train` wrote
regard.viewer                           the page
regard.training                         tokenizer, data, loop and files of a language model

Nothing is loaded until it is asked for, torch included: ``regard --help`` and ``import regard`` are quick.
"""

import warnings as _warnings

__version__ = "0.1.0"

# torch warns at its import where there is no numpy, which nothing here needs; of a numpy that is broken it still tells
_warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)

TYPE_CHECKING = False  # to a type checker it is true
if TYPE_CHECKING:
    from regard import bench as bench
    from regard import huggingface as huggingface
    from regard import interventions as interventions
    from regard import layouts as layouts
    from regard import plots as plots
    from regard import training as training
    from regard import viewer as viewer
    from regard.public import *
    from regard.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """A module of regard, or one of the names in `regard.public`."""
        import sys
        from importlib import import_module

        if name == "__all__" or not name.startswith("_"):
            if name in _modules():
                return import_module(f"regard.{name}")
            public = import_module("regard.public")
            globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'regard' has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__"), *_modules()})

    def _modules() -> set[str]:
        from pkgutil import iter_modules

        return {module.name for module in iter_modules(__path__) if module.name[0] != "_"}


del TYPE_CHECKING
