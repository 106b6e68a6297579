"""The `suffix` drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.drafting import Drafter, DraftRequest
from hf_speculate.errors import TargetMismatchError
from hf_speculate.models import num_embeddings
from hf_speculate.speculator import read_options
from hf_speculate.stats import Advice

from .automaton import Mixture
from .contexts import RecycledRows
from .options import SuffixOptions, read_corpus
from .session import SuffixSession, index_kind
from .store import Index, SuffixStore


if TYPE_CHECKING:
    from typing_extensions import Self


class SuffixDrafter(Drafter):
    """Drafts from the text itself, and from other texts where it is told to; fits every target.

    Args:
        vocab_size: of the target.
        options: see `SuffixOptions`.

    Attributes:
        store: outputs of earlier requests; None where `store` is False.
    Raises:
        OptionError: a corpus that cannot be read.
        TargetMismatchError: a corpus with tokens that the target does not have.
        CheckpointError: a store of another vocabulary.
    """

    name = "suffix"
    is_free = True
    options_classes = (SuffixOptions,)

    def __init__(self, vocab_size: int, options: SuffixOptions | None = None):
        self.options = options = options or SuffixOptions()
        self.vocab_size = vocab_size
        kind = index_kind(options)
        self._corpus: Index | None = None
        for tokens in read_corpus(options.corpus, options.tokenizer, vocab_size):
            self._corpus = self._corpus or kind.make()
            self._corpus.extend([], tokens)
        self.store: SuffixStore | None = None
        if options.store is not False:
            self.store = SuffixStore() if options.store is True else options.store
            self.store.attach(kind, vocab_size)
        self._mixtures: dict[tuple[str, bool], Mixture] = {}

    @property
    def advice(self) -> Advice:
        return Advice(
            good="the text repeats itself, its prompt or what it is drafted from often enough",
            poor="The text repeats little of what it is drafted from; a head or a draft model would draft more.",
        )

    def __repr__(self) -> str:
        return f"SuffixDrafter({self.options})"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        parsed = read_options(SuffixOptions, options, cls.name)
        return cls(num_embeddings(target), parsed)

    def check_target(self, target: PreTrainedModel) -> None:
        found = num_embeddings(target)
        has_texts = self.store is not None or self._corpus is not None
        if has_texts and found != self.vocab_size:
            raise TargetMismatchError(
                f"this suffix drafter's store or corpus is of a vocabulary of {self.vocab_size}, the target's has "
                f"{found}: make one for this target."
            )

    def start(self, request: DraftRequest) -> SuffixSession:
        sources: dict[str, Index] = {} if self._corpus is None else {"corpus": self._corpus}
        if self.store is not None:
            sources["store"] = self.store.index(request.adapters)
        # Weights of greedy text are not those of sampled text.
        condition = (request.adapters, request.do_sample)
        mixture = self._mixtures.get(condition, Mixture()).copy()

        def keep(learnt: Mixture) -> None:
            self._mixtures[condition] = learnt

        return SuffixSession(self.options, request, sources, self._rows(request), self.store, mixture, keep)

    def forget(self) -> None:
        """Empties the store."""
        if self.store is not None:
            self.store.clear()

    def _rows(self, request: DraftRequest) -> RecycledRows | None:
        """The memory for the choices of a request: with a store, the one that others share."""
        count, options = self.options.recycled, self.options
        if not (count and options.smoothing and 1 in options.orders):  # they follow one token
            return None
        if self.store is not None:
            return self.store.recycled(request.adapters, count)
        return RecycledRows()
