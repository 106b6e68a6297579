"""Answers by a server that speaks OpenAI's protocol: vLLM, SGLang, `transformers serve`.

The target's own tokenizer makes the prompts, and the server's tokens must be the same. If it returns the tokens that it
generated (vLLM, `return_token_ids`), the lines hold these. Otherwise its text is tokenised again, which may give other
tokens, and the lines are marked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any

from transformers import PretrainedConfig

from hf_speculate.messages import get_logger

from ..data import Encoder
from .answers import Job
from .connection import CompletionReply, Connection, ReplyChoice, ServerError
from .engine import Engine
from .planning import RegenerateOptions, longest_prompt


logger = get_logger(__name__)

_CHAT, _TEXT = "/chat/completions", "/completions"
_REFUSALS = (400, 422)  # of a field that a server does not know


class ServerEngine(Engine):
    """A model on a server (None for its only one), whose tokenizer and configuration the target has.

    Without a temperature in the options the server's own defaults hold.
    """

    answers_whole_batches = False

    def __init__(
        self,
        connection: Connection,
        tokenizer: Any,
        config: PretrainedConfig,
        options: RegenerateOptions,
        *,
        model: str | None = None,
        concurrency: int = 32,
    ):
        self._connection, self._tokenizer, self._options = connection, tokenizer, options
        self._concurrency = concurrency
        self._encoder = Encoder(tokenizer=tokenizer)
        self._longest_prompt = longest_prompt(tokenizer, config, options)
        self._vocab_size = config.get_text_config().vocab_size
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.model = model or self._only_model()
        # Tried with the first requests; a server that does not know them refuses.
        self._returns_tokens = self._takes_tokens = True
        self._has_returned_tokens = False

    def settings(self) -> dict[str, Any]:
        return {"server": self.model}

    def answered(self, batches: Iterable[list[Job]]) -> Iterator[list[Job]]:
        """Answers several jobs at a time, and yields each when its last turn is answered.

        After a failure it begins no others, and those under way end. The connection is closed in the end.
        """
        jobs, problem, running = chain.from_iterable(batches), None, set[Future[Job]]()
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="regenerate")
        try:
            running = self._begun(pool, jobs, self._concurrency)
            while running:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                failed = [future for future in ended if future.exception() is not None]
                if done := [future.result() for future in ended if future not in failed]:
                    yield done
                if failed:
                    problem = problem or failed[0].exception()
                if problem is None:
                    running |= self._begun(pool, jobs, len(ended))
        finally:
            self._connection.close()  # the answers of those that still run are not needed
            pool.shutdown()
        if problem is not None:
            raise problem

    def _begun(self, pool: ThreadPoolExecutor, jobs: Iterator[Job], count: int) -> set[Future[Job]]:
        return {pool.submit(self._answer, job) for job in islice(jobs, count)}

    def _answer(self, job: Job) -> Job:
        """Every turn of a job."""
        prompt: list[int] | None = job.start()
        turn = 0
        while prompt is not None and not job.finish:
            body = {"model": self.model, "max_tokens": self._options.max_new_tokens, **self._sampling(job, turn)}
            found = self._asked(job, body, prompt)
            answer, ended = self._tokens(job, found, prompt)
            job.take(answer, ended, self._encoder)
            prompt = None if job.finish else job.ask(self._encoder, self._longest_prompt)
            turn += 1
        return job

    def _sampling(self, job: Job, turn: int) -> dict[str, Any]:
        options = self._options
        if options.temperature is None:
            return {}
        given: dict[str, Any] = {"temperature": options.temperature}
        if options.temperature > 0:
            digest = hashlib.sha256(f"{options.seed} {turn} {job.id}".encode()).hexdigest()
            given |= {"top_p": options.top_p, "seed": int(digest[:7], 16)}
            given |= {"top_k": options.top_k} if options.top_k else {}
        return given

    def _asked(self, job: Job, body: dict[str, Any], prompt: list[int]) -> CompletionReply:
        """Sends one request in a form that the server takes: with token ids first, then without."""
        while True:
            returns, takes = self._returns_tokens, self._takes_tokens
            asked = {**body, "return_token_ids": True} if returns else body
            try:
                if job.messages is not None:
                    # Tools are part of the prompt; the answer is to come as it was written.
                    tools = {"tools": job.tools, "tool_choice": "none"} if job.tools else {}
                    return self._connection.ask(_CHAT, {**asked, "messages": job.messages, **tools}, CompletionReply)
                text = prompt if takes else self._tokenizer.decode(prompt)
                return self._connection.ask(_TEXT, {**asked, "prompt": text}, CompletionReply)
            except ServerError as error:
                if error.status not in _REFUSALS or not (returns or (takes and job.messages is None)):
                    raise
            if returns:
                self._returns_tokens = False
            else:
                self._takes_tokens = False

    def _tokens(self, job: Job, found: CompletionReply, prompt: list[int]) -> tuple[list[int], bool]:
        """The tokens of an answer, its end token included, and whether it came to its end."""
        choice = found.choices[0]
        self._check_prompt(found, prompt)
        ended, ids = choice.finish_reason != "length", choice.token_ids
        self._has_returned_tokens |= ids is not None
        if ids is None:  # encoded again, the text may have more tokens than were generated
            job.is_reencoded = True
            ids = self._tokenizer(self._text(choice), add_special_tokens=False, verbose=False)["input_ids"]
        elif len(ids) > self._options.max_new_tokens:
            raise self._too_long(f"{len(ids)} tokens")
        self._check_vocabulary(ids)
        end = self._tokenizer.eos_token_id
        if ended and end is not None and not (ids and ids[-1] in self._tokenizer.all_special_ids):
            ids = [*ids, end]
        if not ids:
            raise self._wrong("an empty answer that has not come to its end")
        return ids, ended

    def _text(self, choice: ReplyChoice) -> str:
        """The text of an answer whose tokens the server keeps to itself."""
        if choice.message is not None and choice.message.is_taken_apart:
            raise ServerError(
                f"{self._connection.url} takes answers apart (reasoning, tool calls): what was generated is not "
                "known then. Start it without parsers for these."
            )
        if self._has_returned_tokens:
            raise self._wrong("an answer without its tokens, after others that had them")
        text = choice.text if choice.message is None else choice.message.content
        if text is None:
            raise self._wrong("an answer with neither text nor tokens")
        if len(text) > self._options.max_new_tokens * (self._longest_token + 1):  # and a blank between tokens
            raise self._too_long(f"{len(text)} characters")
        return text

    def _check_vocabulary(self, ids: list[int]) -> None:
        if ids and max(ids) >= self._vocab_size:
            raise self._wrong(
                f"token {max(ids)}, but the target has {self._vocab_size}. Give --target the model that it serves"
            )

    def _check_prompt(self, found: CompletionReply, prompt: list[int]) -> None:
        """The server must have read the tokens that training takes for its prompt."""
        ids = found.prompt_token_ids or found.choices[0].prompt_token_ids
        count = len(ids) if ids is not None else found.usage and found.usage.prompt_tokens
        if count not in (None, len(prompt)) or (ids is not None and ids != prompt):
            raise ServerError(
                f"{self._connection.url} reads a prompt otherwise than the target's tokenizer: {count} tokens there, "
                f"{len(prompt)} here. It serves another model or with another chat template; give --target the model "
                "that it serves."
            )

    def _too_long(self, found: str) -> ServerError:
        return self._wrong(f"an answer of {found} where it was asked for {self._options.max_new_tokens} tokens")

    def _wrong(self, found: str) -> ServerError:
        return ServerError(f"{self._connection.url} gave {found}.")

    def _only_model(self) -> str:
        names = self._connection.models()
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise ServerError(f"{self._connection.url} has {listed}: name the model with --server-model.")
        return names[0]
