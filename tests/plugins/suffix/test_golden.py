"""Drafts by counts beside arctic-inference's own, recorded in ../shared/golden/suffix-arctic."""

from __future__ import annotations

import json

import pytest

from hf_speculate_plugins.suffix.windows import MatchRule, WindowCounts, best_draft, best_of

from ...support.paths import SHARED


FOLDER = SHARED / "golden" / "suffix-arctic"
STREAMS = sorted(path.stem for path in FOLDER.glob("*.jsonl")) if FOLDER.is_dir() else []
TOLERANCE = 1e-4


class Replay:
    """The two tries of a stream: prompt and output of each active request, and the outputs of all."""

    def __init__(self, config):
        self.depth, self.is_global = config["max_tree_depth"], config["max_cached_requests"] != 0
        self.outputs_counts = WindowCounts(self.depth)
        self.local, self.texts, self.outputs = {}, {}, {}
        self.local_cursors, self.cursors = {}, {}

    def start(self, req, prompt, evicted=()):
        self.evict(*evicted)
        self.local[req], self.texts[req], self.outputs[req] = WindowCounts(self.depth), [], []
        self.local_cursors[req], self.cursors[req] = [], []
        self._extend_local(req, prompt)

    def add(self, req, tokens):
        self._extend_local(req, tokens)
        self.outputs[req] += tokens
        if self.is_global:
            self.outputs_counts.extend(self.cursors[req], tokens)

    def stop(self, req):
        del self.local[req]

    def evict(self, *requests):
        for req in requests:
            self.outputs_counts.remove(self.outputs.pop(req))

    def speculate(self, req, rule):
        tries = {"local": self.local[req], "global": self.outputs_counts}
        return {name: best_draft(counts, self.texts[req], rule) for name, counts in tries.items()}

    def _extend_local(self, req, tokens):
        self.texts[req] += tokens
        self.local[req].extend(self.local_cursors[req], tokens)


def rule_of(option):
    return MatchRule(
        max_tokens=option["max_spec_tokens"],
        factor=option["max_spec_factor"],
        offset=option["max_spec_offset"],
        floor=option["min_token_prob"],
        tree=option["use_tree_spec"],
    )


def paths(tokens, parents, probs):
    """Token path -> probability of every node."""
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return dict(zip(found, probs, strict=True))


def check(ours, theirs, is_tree, is_tie_free):
    if is_tree or is_tie_free:
        assert ours.match_len == theirs["match_len"]
        assert ours.score == pytest.approx(theirs["score"], abs=TOLERANCE)
        assert sorted(ours.probs) == pytest.approx(sorted(theirs["probs"]), abs=TOLERANCE)
    if is_tie_free:
        expected = paths(theirs["token_ids"], theirs["parents"], theirs["probs"])
        assert paths(ours.tokens, ours.parents, ours.probs) == pytest.approx(expected, abs=TOLERANCE)
    return is_tie_free


@pytest.mark.skipif(not STREAMS, reason="../shared/golden/suffix-arctic is not here")
@pytest.mark.parametrize("stream", STREAMS)
def test_every_draft_is_arctic_inferences(stream):
    config, *events = map(json.loads, (FOLDER / f"{stream}.jsonl").read_text().splitlines())
    replay, num_exact, num_drafts = Replay(config), 0, 0
    for event in events:
        match event["op"]:
            case "start":
                replay.start(event["req"], event["prompt"], event.get("evicted", ()))
            case "add":
                replay.add(event["req"], event["tokens"])
            case "stop":
                replay.stop(event["req"])
            case "evict":
                replay.evict(event["req"])
            case "speculate":
                option = config["opts"][event["opt"]]
                ours = replay.speculate(event["req"], rule_of(option))
                assert event["context_len"] == min(len(replay.texts[event["req"]]), replay.depth)
                for name in ("local", "global"):
                    num_drafts += 1
                    num_exact += check(ours[name], event[name], option["use_tree_spec"], event[name]["tie_free"])
                # Scores of paths are arbitrary where children tie.
                if option["use_tree_spec"] or all(event[name]["tie_free"] for name in ("local", "global")):
                    assert best_of(ours.values()) is ours[event["chosen"]]
    assert num_exact > num_drafts / 4 > 10
