"""The `suffix` drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_speculate.drafting import Drafter, DraftRequest
from hf_speculate.errors import TargetMismatchError
from hf_speculate.speculator import read_options
from hf_speculate.stats import Advice
from hf_speculate.target import GenerativeModel, num_embeddings

from .automaton import Mixture
from .contexts import ContextCounts, RecycledRows
from .guide import Guide, first_weights
from .options import SuffixOptions, read_corpus
from .schemas import read_schemas
from .session import SuffixSession
from .store import SuffixStore


if TYPE_CHECKING:
    from typing_extensions import Self


class SuffixDrafter(Drafter):
    """Drafts from the text itself, and from other texts if options ask for it; fits every target.

    Attributes:
        store: outputs of earlier requests; None if the option `store` is False.
    Raises:
        OptionError: a corpus or schemas that cannot be read.
        TargetMismatchError: a corpus with tokens that the target does not have.
        CheckpointError: a store of another vocabulary.
    """

    name = "suffix"
    is_free = True
    options_classes = (SuffixOptions,)

    def __init__(self, vocab_size: int, options: SuffixOptions | None = None):
        self.options = options = options or SuffixOptions()
        self.vocab_size = vocab_size
        self._corpus: ContextCounts | None = None
        for tokens in read_corpus(options.corpus, options.tokenizer, vocab_size):
            self._corpus = self._corpus or ContextCounts()
            self._corpus.extend([], tokens)
        self._guide: Guide | None = None
        if shapes := read_schemas(options.schemas, _key_of_arguments(options.tokenizer)):
            self._guide = Guide(shapes, options.tokenizer, vocab_size)
        self.store: SuffixStore | None = None
        if options.store is not False:
            self.store = SuffixStore() if options.store is True else options.store
            self.store.attach(vocab_size)
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
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        parsed = read_options(SuffixOptions, options, cls.name)
        return cls(num_embeddings(target), parsed)

    def check_target(self, target: GenerativeModel) -> None:
        num_tokens = num_embeddings(target)
        has_texts = self.store is not None or self._corpus is not None or self._guide is not None
        if has_texts and num_tokens != self.vocab_size:
            raise TargetMismatchError(
                f"this suffix drafter's store, corpus or tokenizer is of a vocabulary of {self.vocab_size}, the "
                f"target's has {num_tokens}: make one for this target."
            )

    def start(self, request: DraftRequest) -> SuffixSession:
        sources = {} if self._corpus is None else {"corpus": self._corpus}
        recycled = RecycledRows()
        if self.store is not None:
            sources["store"] = self.store.counts(request.adapters)
            recycled = self.store.recycled(request.adapters)
        # Weights of greedy text are not those of sampled text.
        kind = (request.adapters, request.do_sample)
        first = Mixture({} if self._guide is None else first_weights())
        mixture = self._mixtures.get(kind, first).copy()

        def keep(learnt: Mixture) -> None:
            self._mixtures[kind] = learnt

        return SuffixSession(self.options, request, sources, recycled, self.store, mixture, keep, self._guide)

    def forget(self) -> None:
        """Empties the store."""
        if self.store is not None:
            self.store.clear()


def _key_of_arguments(tokenizer: Any) -> str:
    """The key of a call's arguments: "arguments", or "parameters" (Llama 3) if the chat template names only that."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return "parameters" if '"parameters"' in template and '"arguments"' not in template else "arguments"
