"""How often every window of a text occurs, in a trie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Node:
    """A window of tokens, from the root down.

    Attributes:
        count: its occurrences.
        children: the windows that are one token longer, by that token.
    """

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


class WindowCounts:
    """The windows of at most `depth` tokens of some texts. A token costs `depth` steps, to add or to remove."""

    def __init__(self, depth: int):
        self.depth = depth
        self.root = Node()

    def extend(self, cursor: list[Node], tokens: Iterable[int]) -> None:
        """Appends tokens to a text.

        Args:
            cursor: where the text ends: the windows that can still grow, longest first. Empty for a new text; changed.
        """
        for token in tokens:
            cursor.append(self.root)
            del cursor[: -self.depth]
            for place, node in enumerate(cursor):
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = Node()
                child.count += 1
                cursor[place] = child

    def remove(self, tokens: Sequence[int]) -> None:
        """Takes back a whole text."""
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self.depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]  # what is longer has occurred in this text only
                    break
                node = child

    def find(self, tokens: Sequence[int]) -> Node | None:
        """The window, None where it does not occur."""
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token)
            if node is None:
                return None
        return node
