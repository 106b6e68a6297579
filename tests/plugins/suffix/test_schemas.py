"""Schemas and tools as they are given, and the text that is forecast from them."""

from __future__ import annotations

import json

import pytest

from hf_speculate.errors import OptionError
from hf_speculate_plugins.suffix.forecast import Forecaster
from hf_speculate_plugins.suffix.json_text import JsonText
from hf_speculate_plugins.suffix.schemas import read_schemas


CITY = {"type": "string"}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": CITY,
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": CITY}, "required": ["lat"]},
            "hourly": {"type": "boolean"},
        },
        "required": ["city", "unit", "place"],
    },
}
CLOCK = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}


def lookup(query: str, limit: int = 3):
    """Looks something up.

    Args:
        query: words to look for
        limit: most results
    """


def forecast(text, *schemas, stop="<end>", arguments="arguments"):
    """(kind, texts) behind a text; None if nothing is forecast."""
    reader = JsonText()
    reader.feed(text)
    found = Forecaster(read_schemas(schemas, arguments), stop)(reader)
    return None if found is None else (found.kind, [way.text for way in found.ways])


def objects(properties, **more):
    return {"type": "object", "properties": properties, **more}


class TestCalls:
    def test_from_the_brace_to_the_first_free_value(self):
        for tool in (WEATHER, {"type": "function", "function": WEATHER}):
            assert forecast("{", tool) == ("open", ['"name": "get_weather", "arguments": {"city": "'])
        assert forecast('{"na', lookup) == ("open", ['me": "lookup", "arguments": {"query": "'])

    def test_forecast_branches_between_tools_until_the_name_decides(self):
        kind, ways = forecast('{"name": "get_', WEATHER, CLOCK) or ("", [])
        assert ways[0] == 'weather", "arguments": {"city": "'
        assert ways[1] == 'time", "arguments": {}}<end>'
        assert forecast('{"name": "get_t', WEATHER, CLOCK) == (kind, ['ime", "arguments": {}}<end>'])
        assert forecast('{"name": "get_time", ', WEATHER, CLOCK) == ("key", ['"arguments": {}}<end>'])
        assert forecast('{"name": "set', WEATHER, CLOCK) is None or forecast('{"name": "set"', WEATHER, CLOCK) is None

    def test_keys_follow_in_the_order_of_the_schema(self):
        begun = '{"name": "get_weather", "arguments": {"city": '
        assert forecast(begun, WEATHER) == ("choice", ['"'])
        assert forecast(begun + '"', WEATHER) is None
        assert forecast(begun + '"Rome', WEATHER) == ("text", ['", "unit": "'])
        assert forecast(begun + '"Rome"', WEATHER) == ("more", [', "unit": "'])
        kind, ways = forecast(begun + '"Rome", "unit": "', WEATHER) or ("", [])
        assert (kind, ways) == ("choice", [f'{each}", "place": {{"lat": ' for each in ("celsius", "fahrenheit")])

    def test_optional_keys_may_be_left_out(self):
        begun = '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius", "place": {"lat": 4'
        kind, ways = forecast(begun, WEATHER) or ("", [])
        assert (kind, ways) == ("number", [', "name": "', '}, "hourly": ', "}}}<end>"])
        kind, ways = forecast(begun + '}, "hourly": ', WEATHER) or ("", [])
        assert (kind, ways) == ("choice", ["true}}<end>", "false}}<end>"])
        assert forecast(begun + '}, "hourly": fa', WEATHER) == ("choice", ["lse}}<end>"])
        assert forecast('{"b": 1', objects({"a": CITY, "b": CITY, "c": CITY}, required=["c"])) == (
            "number",
            [', "c": "'],
        )

    def test_the_tag_or_fence_around_a_call_is_closed(self):
        begun = '<tool_call>\n{"name": "get_time", "arguments": {'
        ends = ["\n</tool_call><end>", "\n</tool_call>\n<tool_call>\n", "<end>"]
        assert forecast(begun, CLOCK) == ("key", ["}}" + end for end in ends])
        assert forecast(begun + "}}\n</to", CLOCK) is None
        assert forecast('```json\n{"name": "get_time", "arguments": {}', CLOCK) == ("more", ["}\n```<end>"])

    def test_another_call_is_forecast_like_the_first(self):
        first = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name"'
        assert forecast(first, CLOCK) == ("key", [': "get_time", "arguments": {}}' + end for end in _ENDS])

    def test_the_key_of_the_arguments_is_the_template_s(self):
        assert forecast("{", CLOCK, arguments="parameters") == ("open", ['"name": "get_time", "parameters": {}}<end>'])


_ENDS = ["\n</tool_call><end>", "\n</tool_call>\n<tool_call>\n", "<end>"]


class TestStyle:
    def test_forecast_follows_compact_json(self):
        assert forecast('{"name":"get_weather","arguments":{"city":"Rome"', WEATHER) == ("more", [',"unit":"'])

    def test_forecast_follows_indented_json(self):
        begun = '{\n  "name": "get_weather",\n  "arguments": {'
        assert forecast(begun, WEATHER) == ("key", ['\n    "city": "'])
        begun += '\n    "city": "Rome",\n    "unit": "celsius",\n    "place": {'
        assert forecast(begun, WEATHER) == ("key", ['\n      "lat": '])
        _, ways = forecast(begun + '\n      "lat": 4', WEATHER) or ("", [])
        assert ways == [',\n      "name": "', '\n    },\n    "hourly": ', "\n    }\n  }\n}<end>"]
        assert forecast("{\n", WEATHER) == ("open", ['  "name": "get_weather",\n  "arguments": {\n    "city": "'])


class TestSchemas:
    def test_forecast_follows_references_and_alternatives(self):
        schema = {
            "$defs": {"node": objects({"value": {"const": 7}, "next": {"$ref": "#/$defs/node"}}, required=["value"])},
            "anyOf": [
                objects({"kind": {"const": "a"}, "node": {"$ref": "#/$defs/node"}}, required=["kind", "node"]),
                objects({"kind": {"const": "b"}, "size": {"type": ["integer", "null"]}}, required=["kind", "size"]),
            ],
        }
        _, ways = forecast('{"kind": "', schema) or ("", [])
        assert ways[0] == 'a", "node": {"value": 7, "next": {"value": 7, "next": {"value": 7, "next": {'  # and so on
        assert 'b", "size": ' in ways
        assert forecast('{"kind": "b"', schema) == ("more", [', "size": ', ', "size": null}<end>'])
        _, ways = forecast('{"kind": "a", "node": {"value": 7, "next": {', schema) or ("", [])
        assert ways[0].startswith('"value": 7, "next": {')

    def test_all_of_joins_properties(self):
        schema = {"allOf": [objects({"a": CITY}, required=["a"]), objects({"b": CITY}, required=["b"])]}
        assert forecast('{"a": "x"', schema) == ("more", [', "b": "'])

    def test_forecast_continues_and_closes_arrays(self):
        schema = objects({"names": {"type": "array", "items": CITY}, "n": {"type": "integer"}}, required=["names", "n"])
        assert forecast("{", schema) == ("open", ['"names": ["'])
        assert forecast('{"names": ["x"', schema) == ("more", [', "', '], "n": '])
        assert forecast('{"names": ["x", "y', schema) == ("text", ['", "', '"], "n": '])

    def test_forecast_stops_at_unknown_schemas(self):
        schema = objects({"a": {"not": {}}, "b": {"$ref": "other.json"}, "c": True}, required=["a", "b", "c"])
        assert forecast('{"a": 1', schema) == ("number", [', "b": '])
        assert forecast('{"a": 1, "b": [1], "c"', schema) == ("key", [": "])
        assert forecast('{"z": 1', schema) is None
        assert forecast("[1, 2", schema) is None

    def test_a_reference_to_itself_ends(self):
        schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
        assert forecast("{", schema) is None

    @pytest.mark.parametrize("item", [{"const": 1}, {"type": "null"}, objects({"a": {"const": 1}}), objects({})])
    def test_forecasts_end_where_constants_repeat(self, item):
        assert forecast('{"a": ', objects({"a": {"type": "array", "items": item}}, required=["a"]))
        many = objects({f"key{number}": item for number in range(500)})
        assert forecast("{", many)

    def test_names_of_other_alphabets(self):
        schema = objects({"größe": {"enum": ["weiß", "grün"]}}, required=["größe"])
        assert forecast('{"gr', schema) == ("open", ['öße": "'])
        assert forecast('{"gr\\u00f6\\u00dfe": "w', schema) == ("choice", ['eiß"}<end>'])


@pytest.mark.parametrize(
    ("schemas", "found"),
    [
        ({"type": "object"}, "schemas is a list, got one dict"),
        (json.dumps([WEATHER]), "schemas is a list, got one str"),
        ([3], "schema 0 is a int. Possible are JSON schemas, tools"),
        ([WEATHER, {"title": "x"}], r"schema 1 is a dict with \['title'\]. Possible"),
        ([{"type": "function", "function": "f"}], '"function" is a str'),
        ([{"name": "f", "parameters": []}, {"name": "g", "parameters": 3}], "parameters of 'g', is a int"),
        ([objects([1])], "'properties' that are a list"),
        ([objects({"a": {"anyOf": [{"items": 5}]}})], "properties 'a' anyOf items is a int"),
        ([lambda x: x], "no schema can be made of the function <lambda>"),
    ],
)
def test_read_schemas_refuses_other_values(schemas, found):
    with pytest.raises(OptionError, match=found):
        read_schemas(schemas, "arguments")
