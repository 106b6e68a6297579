"""JSON by a schema: tokens per round and speed with drafts of the schema, over plain `generate` with the same grammar.

Sixty texts with facts, six schemas, xgrammar. Plain and drafted runs take turns, text by text; the target ends each
answer itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import typer

from hf_speculate.errors import SpeculateError
from hf_speculate.speculator import make_speculator
from hf_speculate.stats import SpeculationStats
from hf_speculate_tools.bench.methods import Method, eager_method, speculator_method
from hf_speculate_tools.bench.runs import Request, TimedRun, fixed_length, generate_once
from hf_speculate_tools.commands import Grid, NewTokens, chat_ids, environment, progress

from .command import TargetSettings, run


_PLAIN = "plain"
_PEOPLE = ("Ada Brown", "Jonas Weber", "Mei Tanaka", "Carlos Ruiz", "Fatima Khan", "Olga Petrova", "Sofia Rossi")
_CITIES = ("Lisbon", "Osaka", "Denver", "Nairobi", "Hamburg", "Lima", "Oslo", "Toronto", "Madrid", "Seoul")
_WARES = ("desk lamp", "keyboard", "rain jacket", "coffee grinder", "office chair", "bike helmet", "wool scarf")


@dataclass(kw_only=True)
class SchemaSettings(TargetSettings):
    """Options. Greedy; with `--fixed` every round drafts all it can, so that tokens per round do not depend on time."""

    QUICK: ClassVar = {"num_texts": 4, "max_new_tokens": 48}

    speculators: Annotated[
        list[str], typer.Option("--speculator", "-s", help="Drafter: NAME_OR_PATH (repeatable).")
    ] = field(default_factory=lambda: ["grammar", "suffix"])
    num_texts: Annotated[int, typer.Option(min=1, help="Texts.")] = 60
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0
    max_new_tokens: NewTokens = 160
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0
    fixed: Annotated[bool, typer.Option(help="Draft in every round.")] = False
    any_whitespace: Annotated[bool, typer.Option(help="Leave white space to the target.")] = True


def bench_schemas(settings: SchemaSettings) -> dict[str, Any]:
    """Every drafter with the schema's drafts beside it, and without them."""
    name, model, tokenizer = settings.load()
    width = model.config.get_text_config(decoder=True).vocab_size
    grammars = _runner(tokenizer, width, settings.any_whitespace)
    methods = [eager_method()]
    for spec in settings.speculators:
        for constraints in (False, True) if spec != "grammar" else (True,):
            options = {"constraints": constraints, **({"adaptive": False} if settings.fixed else {})}
            label = f"{spec}{'' if constraints or spec == 'grammar' else ', without the schema'}"
            methods.append(speculator_method(label, make_speculator(spec, model, **options)))
    tasks = json_tasks(settings.num_texts, settings.seed)
    shared = fixed_length(settings.max_new_tokens, settings.temperature) | {"eos_token_id": tokenizer.eos_token_id}
    runs: list[TimedRun] = []
    with progress("schemas", total=(len(tasks) + 1) * len(methods)) as advance:
        for number, task in enumerate([tasks[0], *tasks]):  # the first one warms up
            ids = _ids(task.prompt, tokenizer).to(model.device)
            request = Request(number, "json", ids, torch.ones_like(ids))
            for method in methods:
                processor = grammars(json.dumps(task.schema))
                runs.append(generate_once(model, method, request, {**shared, "logits_processor": [processor]}))
                advance(method.name)
    runs = [each for each in runs if each.request]
    return {
        "bench": "schemas",
        "target": name,
        "num_texts": len(tasks),
        "temperature": settings.temperature,
        "fixed": settings.fixed,
        "any_whitespace": settings.any_whitespace,
        "environment": environment(model.device),
        "rows": [_row(method, runs, methods[0]) for method in methods],
    }


def _row(method: Method, runs: Sequence[TimedRun], plain: Method) -> dict[str, Any]:
    mine, theirs = ([each for each in runs if each.method == of.name] for of in (method, plain))
    stats = SpeculationStats()
    for each in mine:
        if each.stats is not None:
            stats.merge(each.stats)
    return {
        "method": _PLAIN if method is plain else method.name,
        "tokens_a_text": mean(each.num_tokens for each in mine),
        "speedup": sum(each.seconds for each in theirs) / sum(each.seconds for each in mine),
        "tokens_per_round": stats.tokens_per_round,
        "accepted_by_source": dict(stats.accepted_by_source.most_common()),
        "equal_texts": mean(one.rows == other.rows for one, other in zip(mine, theirs, strict=True)),
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """A table with one line for each drafter."""
    return [
        Grid.of(
            f"JSON by a schema: {result['num_texts']} texts, T={result['temperature']:g}, {result['target']}",
            result["rows"],
            {
                "drafter": "{method}",
                "tokens\na text": "{tokens_a_text:.1f}",
                "tokens\na round": lambda row: "" if not row["tokens_per_round"] else f"{row['tokens_per_round']:.2f}",
                "over plain": "{speedup:.2f}x",
                "texts equal\nto plain": "{equal_texts:.0%}",
            },
        )
    ]


def _runner(tokenizer: Any, width: int, any_whitespace: bool) -> Callable[[str], Any]:
    """A function that makes a fresh processor for a schema."""
    try:
        import xgrammar
    except ImportError as error:
        raise SpeculateError("bench-schemas needs xgrammar: pip install xgrammar") from error
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=width)
    runner = xgrammar.GrammarCompiler(info)
    return lambda schema: xgrammar.contrib.hf.LogitsProcessor(
        runner.compile_json_schema(schema, any_whitespace=any_whitespace)
    )


def _ids(prompt: str, tokenizer: Any) -> torch.Tensor:
    """int64 [1, S]; a chat where the tokenizer has a template."""
    if tokenizer.chat_template:
        return chat_ids([{"role": "user", "content": prompt}], tokenizer)[None]
    return tokenizer(prompt, return_tensors="pt").input_ids


class JsonTask(NamedTuple):
    """A request for facts of a text, and the schema of the answer."""

    prompt: str
    schema: dict[str, Any]


def json_tasks(count: int, seed: int) -> list[JsonTask]:
    """Texts of six kinds in turn."""
    draw, kinds = random.Random(seed), (_person, _order, _event, _ticket, _flat, _book)
    found = []
    for number in range(count):
        text, properties = kinds[number % len(kinds)](draw)
        names = ", ".join(properties)
        found.append(JsonTask(f"Extract {names} from this text as JSON.\n\n{text}", _object(properties)))
    return found


Schemas = dict[str, dict[str, Any]]

_TEXT, _INTEGER, _NUMBER, _YES_NO = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def _object(properties: Schemas) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 4}


def _person(draw: random.Random) -> tuple[str, Schemas]:
    text = (
        f"{draw.choice(_PEOPLE)}, a {draw.randint(19, 70)}-year-old {draw.choice(('teacher', 'nurse', 'chef'))}, has "
        f"lived in {draw.choice(_CITIES)} since {draw.randint(1990, 2020)} and is {draw.choice(('married', 'single'))}."
    )
    status = _one_of("married", "single")
    return text, {"name": _TEXT, "age": _INTEGER, "occupation": _TEXT, "city": _TEXT, "marital_status": status}


def _order(draw: random.Random) -> tuple[str, Schemas]:
    text = (
        f"Order {draw.randint(1000, 9999)}: {draw.choice(_PEOPLE)} bought {draw.randint(1, 5)} x {draw.choice(_WARES)} "
        f"at {draw.randint(5, 200)}.{draw.randint(10, 99)} euros each, shipped to {draw.choice(_CITIES)} by express."
    )
    item = {"product": _TEXT, "quantity": _INTEGER, "unit_price": _NUMBER}
    return text, {
        "order_id": _INTEGER,
        "customer": _object({"name": _TEXT, "city": _TEXT}),
        "item": _object(item),
        "shipping_method": _one_of("standard", "express", "pickup"),
    }


def _event(draw: random.Random) -> tuple[str, Schemas]:
    text = (
        f"The {draw.choice(('jazz', 'film', 'food', 'book'))} festival in {draw.choice(_CITIES)} opens on "
        f"{draw.randint(1, 28)} {draw.choice(('March', 'June', 'October'))} 2025 at {draw.randint(9, 20)}:00. Speakers "
        f"are {' and '.join(draw.sample(_PEOPLE, 2))}. Entry is free."
    )
    names = {"event_name": _TEXT, "location": _TEXT, "date": _TEXT, "start_time": _TEXT}
    return text, {**names, "speakers": _list_of(_TEXT), "is_free": _YES_NO}


def _ticket(draw: random.Random) -> tuple[str, Schemas]:
    text = (
        f"{draw.choice(_PEOPLE)} writes: since the last update the app crashes on my phone whenever I open "
        f"{draw.choice(('settings', 'the camera', 'my invoices'))}. I need this fixed today, it is urgent!"
    )
    return text, {
        "customer_name": _TEXT,
        "category": _one_of("billing", "bug", "feature request"),
        "priority": _one_of("low", "normal", "high"),
        "summary": _TEXT,
        "needs_reply": _YES_NO,
    }


def _flat(draw: random.Random) -> tuple[str, Schemas]:
    text = (
        f"For rent in {draw.choice(_CITIES)}: a bright flat with {draw.randint(1, 5)} rooms and "
        f"{draw.randint(30, 140)} square metres on floor {draw.randint(1, 9)}, {draw.randint(600, 2400)} euros a "
        "month, with balcony, pets allowed."
    )
    sizes = {"number_of_rooms": _INTEGER, "area_square_metres": _INTEGER, "floor": _INTEGER, "monthly_rent": _INTEGER}
    kind = _one_of("rent", "sale")
    return text, {"listing_type": kind, "city": _TEXT, **sizes, "has_balcony": _YES_NO, "pets_allowed": _YES_NO}


def _book(draw: random.Random) -> tuple[str, Schemas]:
    text = (
        f"'{draw.choice(('The Silent', 'A Distant', 'The Last'))} {draw.choice(('Harbour', 'Garden', 'Winter'))}' by "
        f"{draw.choice(_PEOPLE)} was published in {draw.randint(1950, 2023)}, has {draw.randint(120, 700)} pages, and "
        f"readers gave it {draw.randint(2, 4)}.{draw.randint(1, 9)} of 5 stars."
    )
    sizes = {"publication_year": _INTEGER, "page_count": _INTEGER, "average_rating": _NUMBER}
    genres = _list_of(_one_of("fiction", "history", "science"))
    return text, {"title": _TEXT, "author": _TEXT, **sizes, "genres": genres}


if __name__ == "__main__":
    run(SchemaSettings, bench_schemas, tables)
