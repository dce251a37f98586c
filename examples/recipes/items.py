"""Items: the next item of a history, by semantic ids (TIGER; Rajput et al. 2023), and two baselines.

python -m examples.recipes.items data inter.json index_rqvae.json data/items
python -m examples.recipes.items baselines data/items
pretrain evaluate runs/items --hook retrieval
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import parse_json
from examples.recipes.masked_spans import show
from pretrain.evaluate.retrieval import ndcg, recall

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LAST = 20  # items of a history that are read
_CUTOFFS = (5, 10)
_LEVELS = "abcdefgh"


@app.command("data", epilog="Example: python -m examples.recipes.items data inter.json index_rqvae.json data/items")
def _data(
    histories: Annotated[Path, path_argument("HISTORIES", "A JSON file: user to the list of items, in order.")],
    codes: Annotated[Path, path_argument("CODES", "A JSON file: item to the list of its codes.")],
    out: Annotated[Path, path_argument("OUT", "The new folder.")],
) -> None:
    """Write pairs of a history and its next item, and items.txt, a list of all items.

    Of each user, the last item is in test.tsv, the item before it in validation.tsv, and each earlier one but the first
    in train.tsv. A history is cut to its last 20 items. An item is a word for each code: a228 b220 c159 d91.
    """
    if out.exists():
        raise UserError(f"{out}: exists")
    users = parse_json(histories.read_bytes(), dict[str, list[int]], str(histories))
    index = parse_json(codes.read_bytes(), dict[str, list[int]], str(codes))
    names = {int(item): " ".join(f"{level}{code}" for level, code in zip(_LEVELS, parts, strict=False))
             for item, parts in index.items()}  # fmt: skip
    if len({*names.values()}) < len(names):
        raise UserError(f"{codes}: two items have the same codes")
    if lacking := {item for items in users.values() for item in items} - names.keys():
        raise UserError(f"{codes}: has no codes for {len(lacking):,} items, such as {min(lacking)}")
    splits = pairs(list(users.values()))
    out.mkdir(parents=True)
    for split, rows in splits.items():
        lines = [
            "\t".join((" ".join(names[item] for item in history), names[following])) for history, following in rows
        ]
        (out / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{out / split}.tsv: {len(lines):,} pairs")
    (out / "items.txt").write_text("".join(f"{names[item]}\n" for item in sorted(names)), encoding="utf-8")


def pairs(users: Sequence[Sequence[int]]) -> dict[str, list[tuple[Sequence[int], int]]]:
    """(history, next item) of the users' items in `train`, `validation` and `test`: leave-one-out."""
    found: dict[str, list[tuple[Sequence[int], int]]] = {"train": [], "validation": [], "test": []}
    for items in users:
        for end in range(1, len(items)):
            left = len(items) - end
            split = "test" if left == 1 else "validation" if left == 2 else "train"
            found[split].append((items[max(0, end - _LAST) : end], items[end]))
    return found


@app.command("baselines", epilog="Example: python -m examples.recipes.items baselines data/items")
def _baselines(
    folder: Annotated[Path, path_argument("DATA", "The folder that `data` has written.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of test.tsv, the first ones.")] = 5000,
    out: Annotated[Path | None, path_option("--out", "A CSV file. Default: the table is printed.")] = None,
) -> None:
    """Recommend popular items, and items that followed a history's last item in training; both without seen items."""
    levels = len((folder / "items.txt").read_text(encoding="utf-8").partition("\n")[0].split())
    train, test = (_pairs(folder / f"{split}.tsv", levels) for split in ("train", "test"))
    popular = Counter(following for _, following in train)
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for history, following in train:
        after[history[-1]][following] += 1
    found: dict[str, list[tuple[list[str], str]]] = {"popular items": [], "items after the last one": []}
    ranking = [item for item, _ in popular.most_common()]
    for history, following in test[:rows]:
        seen = {*history}
        rest = [item for item in ranking[: 10 * max(_CUTOFFS)] if item not in seen]
        last = ranked(after.get(history[-1], {}), popular, seen)
        found["popular items"].append((rest, following))
        found["items after the last one"].append(([*last, *(item for item in rest if item not in last)], following))
    show(
        ["recommended", *(f"{metric}@{k}" for metric in ("recall", "NDCG") for k in _CUTOFFS)],
        [[name, *_scores(lists)] for name, lists in found.items()],
        out,
    )


def ranked(counts: Mapping[str, int], popular: Mapping[str, int], seen: set[str]) -> list[str]:
    """The items of `counts` that aren't `seen`: the most frequent first, of equally frequent items the most popular."""
    return sorted(counts.keys() - seen, key=lambda item: (-counts[item], -popular[item], item))


def _pairs(path: Path, levels: int) -> list[tuple[list[str], str]]:
    """(the items of the history, the next item) of each line."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        history, _, following = line.partition("\t")
        words = history.split()
        found.append(([" ".join(words[start : start + levels]) for start in range(0, len(words), levels)], following))
    return found


def _scores(lists: Sequence[tuple[list[str], str]]) -> list[str]:
    return [
        f"{math.fsum(metric(items, [right], k) for items, right in lists) / len(lists):.4f}"
        for metric in (recall, ndcg)
        for k in _CUTOFFS
    ]


if __name__ == "__main__":
    run_command(app)
