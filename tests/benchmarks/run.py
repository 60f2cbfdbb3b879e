"""Measures what this project claims of its speed and memory, beside torch.nn where that has the same; `make bench`.

Prints tables, and as its last line one JSON array with an object a benchmark. A figure is a median, ours in bf16; a
ratio of more than 1 speaks for ours. The sides of a comparison take turns, round by round. `spread` is half the
distance between the quartiles of single calls, as a share of their median; `…_rounds` are the lowest and highest of the
rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

import decay_cost
import stored_activations
import torch
import trainer_share
import training_steps
import waiting_for_data
from measuring import Settings, heading, row
from sides import Case

from lmapp.training.memory import kept_between_steps

BENCHMARKS = {
    "step": training_steps,
    "stored": stored_activations,
    "trainer": trainer_share,
    "decay": decay_cost,
    "data": waiting_for_data,
}
"""By the first word of their results' names."""


def main(
    arguments: Sequence[str] | None = None,
    cases: Mapping[str, Sequence[Case]] | None = None,
    products: tuple[int, ...] | None = None,
) -> None:
    """Run the benchmarks.

    Args:
        arguments: in place of the command line's.
        cases: of each benchmark, in place of its own.
        products: that the machine's peak is taken from, as `Settings` has them.
    """
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], help=f"names or words of them: {', '.join(BENCHMARKS)}, 'gru 1x512', 32x64, …"
    )
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="per side and round")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seconds < 0:
        parser.error("--rounds is at least 1, --seconds at least 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but no CUDA device can be used here")
    if products is None:
        products = (8192,) if options.device == "cuda" else defaults.products
    settings = Settings(options.seconds, options.rounds, options.device, tuple(options.only), products)
    found = []
    with kept_between_steps():  # as in training, and for the peer too
        for kind, benchmark in BENCHMARKS.items():
            head = heading(benchmark.TITLE, benchmark.COLUMNS)
            for entry in benchmark.results(settings, (cases or {}).get(kind)):
                if head:
                    print(head)
                    head = ""
                print(row(entry, benchmark.COLUMNS), flush=True)
                found.append(entry)
    if not found:
        parser.error(f"--only: no benchmark is called {' or '.join(options.only)}")
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
