"""Generated sets whose answers are known: needles, variables, facts in two hops. Everything follows from the seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from fusionrag_engine.errors import ConfigError

CHUNK_TOKENS = 200
_PEOPLE = ["Mara", "Ilias", "Tove", "Renko", "Sunniva", "Bastian", "Odile", "Kasimir", "Petra", "Yusuf"]
_PLACES = ["Norrvik", "Castelbruno", "Alderholt", "Miravent", "Ostkamp", "Quillon", "Brandsee", "Tarnow"]
_THINGS = ["lantern", "compass", "ledger", "violin", "kettle", "barometer", "saddle", "anvil", "loom", "sextant"]
_FILLER = [
    "The ferry was late again, and the people on the pier talked about the weather.",
    "A new roof was laid on the market hall before the first snow came.",
    "Nobody remembered who had planted the pear trees behind the school.",
    "The clerk copied the list twice and put one copy into the drawer.",
    "In spring the river rose to the second step and went down within a week.",
    "Two carts of coal stood in front of the bakery until noon.",
    "The choir practised on Tuesdays, and on Thursdays when the organ was free.",
    "Every window on the north side had been painted green that year.",
    "The old road was shorter, but most drivers took the new one.",
    "A notice on the door said that the office opened at nine.",
]


@dataclass(frozen=True)
class Settings:
    """What a generated set is made with.

    Attributes:
        length: tokens of all chunks together, about.
        depth: where the fact that is asked for stands, 0 (first chunk) to 1 (last chunk).
        keys: needles in the text; one of them is asked for.
        hops: assignments that a variable's value goes through.
        seed: of everything drawn.
    """

    length: int = 1000
    depth: float = 0.5
    keys: int = 1
    hops: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Made:
    """A generated question over the texts of its chunks."""

    question: str
    answers: list[str]
    texts: list[str]


def generate(name: str, parameters: str, count: int, count_tokens: Callable[[str], int]) -> list[Made]:
    """`count` questions of the set `name`; `parameters` is "length=2000,depth=0.5,keys=4".

    Raises:
        ConfigError: an unknown parameter, or a value that is not accepted.
    """
    settings = read_settings(parameters)
    made = []
    for number in range(count):
        draw = random.Random(f"{name} {settings} {number}")
        chunks = _filler(draw, settings.length, count_tokens)
        question, answer, facts = GENERATORS[name](draw, settings)
        for place, fact in _places(draw, settings, facts, len(chunks)):
            chunks[place].insert(draw.randint(0, len(chunks[place])), fact)
        made.append(Made(question, [answer], [" ".join(sentences) for sentences in chunks]))
    return made


def read_settings(parameters: str) -> Settings:
    settings = Settings()
    kinds = {item.name: type(getattr(settings, item.name)) for item in fields(Settings)}
    for part in filter(None, parameters.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ConfigError(f"a generated set has no parameter {name!r}; accepted: {', '.join(kinds)}")
        try:
            settings = replace(settings, **{name: kinds[name](value)})
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} is not accepted; give a {kinds[name].__name__}") from error
    is_accepted = settings.length >= 1 and 0 <= settings.depth <= 1 and settings.keys >= 1 and settings.hops >= 1
    if not is_accepted or settings.keys > len(_THINGS):
        raise ConfigError(
            f"{settings} is not accepted; length and hops must be at least 1, depth from 0 to 1, keys from 1 to "
            f"{len(_THINGS)}"
        )
    return settings


def _filler(draw: random.Random, length: int, count_tokens: Callable[[str], int]) -> list[list[str]]:
    """Sentences in chunks, at least two; each begins with its own page number, so that no two are alike."""
    chunks = []
    for page in range(max(2, round(length / CHUNK_TOKENS))):
        sentences = [f"Page {page + 1} of volume {draw.randint(100, 999)}."]
        size = count_tokens(sentences[0])
        while size < min(CHUNK_TOKENS, length / 2):
            sentences.append(draw.choice(_FILLER))
            size += count_tokens(sentences[-1])
        chunks.append(sentences)
    return chunks


def _places(draw: random.Random, settings: Settings, facts: Sequence[str], num_chunks: int) -> list[tuple[int, str]]:
    """A chunk for each fact. The first, which holds the answer, stands at `depth`; the others in other chunks where
    there are enough of them."""
    first = round(settings.depth * (num_chunks - 1))
    others = [index for index in range(num_chunks) if index != first]
    draw.shuffle(others)
    return [(first, facts[0]), *((others[i % len(others)], fact) for i, fact in enumerate(facts[1:]))]


def needle(draw: random.Random, settings: Settings) -> tuple[str, str, list[str]]:
    """`keys` numbers under different names; one is asked for."""
    things = draw.sample(_THINGS, settings.keys)
    numbers = draw.sample(range(10000, 99999), settings.keys)
    facts = [f"The code of the {thing} is {number}." for thing, number in zip(things, numbers, strict=True)]
    return f"What is the code of the {things[0]}?", str(numbers[0]), facts


def variables(draw: random.Random, settings: Settings) -> tuple[str, str, list[str]]:
    """A value handed from variable to variable; the last one's is asked for. The value itself stands at `depth`."""
    names = [f"X{number}" for number in draw.sample(range(100, 999), settings.hops + 1)]
    value = str(draw.randint(10000, 99999))
    facts = [f"The variable {names[0]} is {value}."]
    facts += [f"The variable {after} is equal to {before}." for before, after in itertools.pairwise(names)]
    return f"What number is the variable {names[-1]}?", value, facts


def two_hop(draw: random.Random, _settings: Settings) -> tuple[str, str, list[str]]:
    """Two facts in two chunks that answer only together, and two that mislead."""
    person, other = draw.sample(_PEOPLE, 2)
    place, elsewhere = draw.sample(_PLACES, 2)
    thing, another = draw.sample(_THINGS, 2)
    facts = [
        f"{person} lives in the town of {place}.",
        f"The {thing} belongs to {person}.",
        f"{other} lives in the town of {elsewhere}.",
        f"The {another} belongs to {other}.",
    ]
    return f"In which town does the owner of the {thing} live?", place, facts


GENERATORS: dict[str, Callable[[random.Random, Settings], tuple[str, str, list[str]]]] = {
    "needle": needle,
    "variables": variables,
    "two_hop": two_hop,
}
