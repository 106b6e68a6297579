"""Tokens per round on tool calls, with and without the tools' schemas. No clock.

Thirty dialogues ask for one or two calls of eight tools. The target writes what it likes. Small models often write an
answer in another format, so each dialogue is also measured with the call's beginning given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, ClassVar

import torch
import typer
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase

from hf_speculate import AutoSpeculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.errors import SpeculateError
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.bench.acceptance import figures
from hf_speculate_tools.bench.methods import Method
from hf_speculate_tools.bench.runs import batches, fixed_length, generate_once
from hf_speculate_tools.commands import Grid, NewTokens, environment, progress

from .command import ACCEPTANCE_COLUMNS, TargetSettings, run


# What stands behind the prompt: nothing, or the beginning of a call as Qwen's chat template asks for it.
BEGINNINGS = {"free": "", "begun": '<tool_call>\n{"name": "'}
_PEOPLE = ("Anna", "Bruno", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana")
_CITIES = ("Paris", "Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Montreal", "Sydney")
_DAYS = ("2026-03-04", "2026-05-17", "2026-07-21", "2026-10-02", "2026-12-11")
_TIMES = ("08:15", "12:30", "17:00", "19:45", "20:00")
_ROOMS = ("kitchen", "bedroom", "living_room", "office")


@dataclass(kw_only=True)
class ToolSettings(TargetSettings):
    """Options. Trees are fixed, so that the figures do not depend on the machine's speed."""

    QUICK: ClassVar = {"num_dialogues": 3, "max_new_tokens": 32}

    nodes: Annotated[list[int], typer.Option(min=1, help="Draft nodes (repeatable).")] = field(
        default_factory=lambda: [16]
    )
    num_dialogues: Annotated[int, typer.Option(min=1, help="Dialogues.")] = 30
    max_new_tokens: NewTokens = 96
    seed: Annotated[int, typer.Option(help="Seed of the dialogues.")] = 0


def bench_tools(settings: ToolSettings) -> dict[str, Any]:
    """Tokens per round of `suffix`, plain and with `schemas=`, on texts that the target ends itself."""
    name, model, tokenizer = settings.load()
    if not tokenizer.chat_template:
        raise SpeculateError(f"{name} has no chat template, which tells a model about its tools.")
    dialogues = tool_dialogues(settings.num_dialogues, settings.seed)
    prompts = {
        name: [_prompt(dialogue, beginning, tokenizer).to(model.device) for dialogue in dialogues]
        for name, beginning in BEGINNINGS.items()
    }
    shared = _shared_beginning(model, prompts["free"])
    arguments = fixed_length(settings.max_new_tokens) | {"eos_token_id": tokenizer.eos_token_id}
    rows = []
    with progress("tools", total=len(BEGINNINGS) * len(settings.nodes) * 2 * len(dialogues)) as advance:
        for beginning, nodes, with_schemas in product(BEGINNINGS, settings.nodes, (False, True)):
            options = {"schemas": TOOLS, "tokenizer": tokenizer} if with_schemas else {}
            speculator = AutoSpeculator.from_name("suffix", target=model, adaptive=False, max_nodes=nodes, **options)
            method = Method(
                name="suffix",
                kind="speculator",
                arguments={"speculator": speculator},
                fresh=lambda: as_cache(deepcopy(shared)),
            )
            runs = []
            for request in batches([(beginning, ids[0]) for ids in prompts[beginning]], 1, model.device):
                runs.append(generate_once(model, method, request, arguments))
                advance(f"{beginning}, {nodes} nodes, schemas: {with_schemas}")
            row = {"beginning": beginning, "nodes": nodes, "schemas": with_schemas}
            row["texts"] = [tokenizer.decode(each.rows[0]) for each in runs]
            row["mean_tokens"] = sum(each.num_tokens for each in runs) / len(runs)
            rows.append(row | figures([each.stats for each in runs if each.stats], [beginning] * len(runs)))
    return {
        "bench": "tools",
        "target": name,
        "num_dialogues": len(dialogues),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "environment": environment(model.device),
        "rows": rows,
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """A table with one line for each beginning, size and kind of drafting."""
    return [
        Grid.of(
            f"Tool calls: {result['num_dialogues']} dialogues, at most {result['max_new_tokens']} tokens each, "
            f"{result['target']}",
            result["rows"],
            {
                "beginning": "{beginning}",
                "nodes": "{nodes:d}",
                "schemas": lambda row: "yes" if row["schemas"] else "no",
                "tokens\na text": "{mean_tokens:.1f}",
                **ACCEPTANCE_COLUMNS,
            },
            groups=("beginning", "nodes"),
        )
    ]


def _prompt(dialogue: str, beginning: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """int64 [1, S]."""
    messages = [{"role": "user", "content": dialogue}]
    text = tokenizer.apply_chat_template(messages, tools=[*TOOLS], add_generation_prompt=True, tokenize=False)
    return tokenizer(f"{text}{beginning}", return_tensors="pt", add_special_tokens=False)["input_ids"]


def _shared_beginning(model: GenerativeModel, prompts: Sequence[torch.Tensor]) -> Cache:
    """The cache of what all prompts begin with, the tools: most of the time would be spent on it."""
    rows = [ids[0] for ids in prompts]
    width = min(map(len, rows))
    is_same = torch.stack([row[:width] == rows[0][:width] for row in rows]).all(dim=0)
    num_same = min(int(is_same.cumprod(dim=0).sum()), width - 1)
    with torch.no_grad():
        found = model(rows[0][None, :num_same], **as_cache(DynamicCache()), use_cache=True)
    return cache_of(found)


def tool_dialogues(count: int, seed: int) -> list[str]:
    """User turns: two thirds need one call, the others two different ones."""
    draw = random.Random(seed)
    names = [tool["function"]["name"] for tool in TOOLS]
    turns = []
    for number in range(count):
        first, second = draw.sample(names, 2)
        wishes = [_WISHES[first](draw)] + ([_WISHES[second](draw)] if number % 3 == 2 else [])
        turns.append(" Then ".join(wishes))
    return turns


def _tool(name: str, description: str, properties: dict[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
    required = [key for key in properties if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_NUMBER, _INTEGER, _BOOLEAN = ({"type": name} for name in ("number", "integer", "boolean"))
TOOLS = [
    _tool(
        "get_weather_forecast",
        "Weather of a city for the next days.",
        {"city": _text("Name of the city."), "unit": _one_of("celsius", "fahrenheit"), "days": _INTEGER},
    ),
    _tool(
        "send_email",
        "Sends an email.",
        {
            "recipient": _text("Name of the person."),
            "subject": _text("Subject line."),
            "body": _text("Text of the message."),
            "priority": _one_of("low", "normal", "high"),
        },
    ),
    _tool(
        "create_calendar_event",
        "Puts an event into the calendar.",
        {
            "title": _text("Title of the event."),
            "date": _text("Date as YYYY-MM-DD."),
            "start_time": _text("Time as HH:MM."),
            "attendees": {"type": "array", "items": _text("Name of a person.")},
            "send_reminder": _BOOLEAN,
        },
    ),
    _tool(
        "search_flights",
        "Finds flights between two cities.",
        {
            "origin": _text("City of departure."),
            "destination": _text("City of arrival."),
            "departure_date": _text("Date as YYYY-MM-DD."),
            "cabin_class": _one_of("economy", "premium_economy", "business", "first"),
            "num_passengers": _INTEGER,
        },
    ),
    _tool(
        "convert_currency",
        "Converts an amount of money.",
        {"amount": _NUMBER, "from_currency": _text("ISO code."), "to_currency": _text("ISO code.")},
    ),
    _tool(
        "set_thermostat",
        "Sets the temperature of a room.",
        {
            "room": _one_of(*_ROOMS),
            "target_temperature": _NUMBER,
            "mode": _one_of("heat", "cool", "auto"),
            "schedule": _object(start_time=_text("Time as HH:MM."), end_time=_text("Time as HH:MM.")),
        },
    ),
    _tool(
        "book_restaurant",
        "Reserves a table.",
        {
            "restaurant_name": _text("Name of the restaurant."),
            "party_size": _INTEGER,
            "reservation_time": _text("Time as HH:MM."),
            "contact": _object(full_name=_text("Name of the guest."), phone_number=_text("Phone number.")),
        },
    ),
    _tool(
        "play_music",
        "Plays music in a room.",
        {"artist": _text("Name of the artist."), "speaker": _one_of(*_ROOMS), "shuffle": _BOOLEAN},
    ),
]

_WISHES: dict[str, Callable[[random.Random], str]] = {
    "get_weather_forecast": lambda draw: (
        f"tell me the weather in {draw.choice(_CITIES)} for the next {draw.randint(2, 7)} days, in "
        f"{draw.choice(('celsius', 'fahrenheit'))}."
    ),
    "send_email": lambda draw: (
        f"write {draw.choice(_PEOPLE)} an email with {draw.choice(('high', 'normal', 'low'))} priority that the "
        f"{draw.choice(('meeting', 'lunch', 'review'))} is moved to {draw.choice(_TIMES)}."
    ),
    "create_calendar_event": lambda draw: (
        f"plan a {draw.choice(('workshop', 'dinner', 'call'))} on {draw.choice(_DAYS)} at {draw.choice(_TIMES)} with "
        f"{' and '.join(draw.sample(_PEOPLE, 2))}, {draw.choice(('with', 'without'))} a reminder."
    ),
    "search_flights": lambda draw: (
        f"find flights from {' to '.join(draw.sample(_CITIES, 2))} on {draw.choice(_DAYS)} for {draw.randint(1, 4)} in "
        f"{draw.choice(('economy', 'business', 'first'))} class."
    ),
    "convert_currency": lambda draw: (
        f"convert {draw.randint(20, 900)} {' to '.join(draw.sample(('USD', 'EUR', 'JPY', 'GBP', 'CHF'), 2))}."
    ),
    "set_thermostat": lambda draw: (
        f"set the {draw.choice(('kitchen', 'bedroom', 'office'))} to {draw.randint(17, 24)} degrees, mode "
        f"{draw.choice(('heat', 'cool', 'auto'))}, from {draw.choice(_TIMES)} to {draw.choice(_TIMES)}."
    ),
    "book_restaurant": lambda draw: (
        f"book a table for {draw.randint(2, 8)} at {draw.choice(('Chez Luc', 'Il Forno', 'Sakura'))} at "
        f"{draw.choice(_TIMES)} for {draw.choice(_PEOPLE)} Novak, phone 555-{draw.randint(1000, 9999)}."
    ),
    "play_music": lambda draw: (
        f"play {draw.choice(('Nina Simone', 'Radiohead', 'Bach', 'Fela Kuti'))} in the "
        f"{draw.choice(('kitchen', 'bedroom', 'office'))}, {draw.choice(('shuffled', 'in order'))}."
    ),
}


if __name__ == "__main__":
    run(ToolSettings, bench_tools, tables)
