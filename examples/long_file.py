"""Where does the attention of a long file go? 32,768 tokens, through a windowed head and through a full one.

The bundled model reads a file of Python's own library, far longer than the 1,024 tokens it was trained on. Every head
has a window, so that none looks farther back than it has learnt to. One head is recorded, and asked where it looks: as
it was, and with the window taken away, so that the same queries meet all keys before them. The matrix of its weights
would hold a thousand million numbers, 4 GiB; none is made.

    python examples/long_file.py
    python examples/long_file.py --file some/other.py --tokens 8192 --window 128 --layer 2 --head 1
"""

import argparse
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch

import regard
from regard.observation import Distance, Entropy, Top
from regard.training.checkpoint import load
from regard.training.text import read_text

FILE = Path(sysconfig.get_path("stdlib")) / "_pydecimal.py"


@torch.inference_mode()
def main(
    file: Path = FILE, tokens: int = 32_768, window: int = 256, layer: int = 5, head: int = 0
) -> dict[str, regard.Observation]:
    """Prints where the weight goes, and returns what was seen: of the windowed head, and of the full one."""
    loaded = load("stdlib")
    ids = [loaded.tokenizer.end_id, *loaded.tokenizer.encode(read_text(file))][:tokens]
    pieces = loaded.tokenizer.pieces(ids)
    lines = torch.tensor([piece.count("\\n") for piece in pieces]).cumsum(0) + 1
    model = regard.Decoder(replace(loaded.model.config, context_length=len(ids), window=window)).eval()
    model.load_state_dict(loaded.model.state_dict())

    start = time.perf_counter()
    with regard.record(model, layers=[layer], heads=[head]) as recording:
        model.states(torch.tensor([ids]))
    print(f"{Path(file).name}: {len(ids):,} tokens, read in {time.perf_counter() - start:.1f} s")
    windowed = recording[0]
    full = regard.observe(windowed.query, windowed.key, mask=regard.Causal())
    found = {f"window of {window}": windowed, "full": full}
    for name, seen in found.items():
        start = time.perf_counter()
        entropy, distance, top = seen.gather(Entropy(), Distance(), Top(1))
        print(f"\nlayer {layer}, head {head}, {name} (asked in {time.perf_counter() - start:.1f} s)")
        print(f"  a token spreads over e^entropy = {float(entropy.exp().mean()):,.1f} tokens")
        print(f"  and looks {float(distance.mean()):,.0f} tokens back, on average")
        weights, keys = top.weights[0, 0, :, 0], top.keys[0, 0, :, 0]
        back = torch.arange(len(ids)) - keys
        print("  the farthest look with most of the weight on one token:")
        for query in (back * (weights > 0.5)).topk(3).indices.tolist():
            key = int(keys[query])
            print(
                f"    {weights[query]:.2f} from {pieces[query]!r} in line {int(lines[query]):,} to {pieces[key]!r} "
                f"in line {int(lines[key]):,}, {query - key:,} tokens back"
            )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--tokens", type=int, default=32_768, help="how many of the file's first tokens to read")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--layer", type=int, default=5)
    parser.add_argument("--head", type=int, default=0)
    main(**vars(parser.parse_args()))
