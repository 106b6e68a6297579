"""Answers written by a server that speaks OpenAI's protocol: vLLM, SGLang, `transformers serve`.

Prompts are made by the target's own tokenizer and compared with what the server makes of them. Where it returns the
tokens that it generated (vLLM, `return_token_ids`), these are kept; else its text is tokenised again, and the lines say
so: other tokens may come out than went in.
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
from .connection import Connection, ServerError
from .engine import Engine
from .planning import RegenerateOptions, longest_prompt


logger = get_logger(__name__)

_CHAT, _TEXT = "/chat/completions", "/completions"
_REFUSALS = (400, 422)  # of a field that a server does not know
_TAKEN_APART = ("reasoning", "reasoning_content", "tool_calls")


class ServerEngine(Engine):
    """A model that is served elsewhere.

    Args:
        connection: to the server.
        tokenizer, config: of the target: what the server serves.
        options: see `RegenerateOptions`. Without a temperature the server's own defaults hold.
        model: its name there; None: the only one that the server has.
        concurrency: requests at a time.
    Raises:
        ServerError: the server cannot be reached, or has no such model.
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
        self.model = model or self._only_model()
        # Tried with the first requests; a server that does not know them refuses.
        self._returns_tokens = self._takes_tokens = True

    def settings(self) -> dict[str, Any]:
        return {"server": self.model}

    def answered(self, batches: Iterable[list[Job]]) -> Iterator[list[Job]]:
        """A job at a time as its turns are answered; after a failure no others are begun, and those under way end."""
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
            if running:  # nobody wants their answers any more
                self._connection.close()
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

    def _asked(self, job: Job, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        """One request, in the form that the server takes: with token ids first, then without."""
        while True:
            returns, takes = self._returns_tokens, self._takes_tokens
            asked = {**body, "return_token_ids": True} if returns else body
            try:
                if job.messages is not None:
                    # Tools are part of the prompt; the answer is to come as it was written.
                    tools = {"tools": job.tools, "tool_choice": "none"} if job.tools else {}
                    return self._connection.ask(_CHAT, {**asked, "messages": job.messages, **tools})
                text = prompt if takes else self._tokenizer.decode(prompt)
                return self._connection.ask(_TEXT, {**asked, "prompt": text})
            except ServerError as error:
                if error.status not in _REFUSALS or not (returns or (takes and job.messages is None)):
                    raise
            if returns:
                self._returns_tokens = False
            else:
                self._takes_tokens = False

    def _tokens(self, job: Job, found: dict[str, Any], prompt: list[int]) -> tuple[list[int], bool]:
        """The tokens of an answer, its end token included, and whether it came to its end."""
        choice, message = self._choice(found)
        self._check_prompt(found.get("prompt_token_ids") or choice.get("prompt_token_ids"), found, prompt)
        ended, ids = choice["finish_reason"] == "stop", choice.get("token_ids")
        if ids is None:
            if any(message.get(name) for name in _TAKEN_APART):
                raise ServerError(
                    f"{self._connection.url} takes answers apart (reasoning, tool calls): what was generated is not "
                    "known then. Start it without parsers for these."
                )
            job.is_reencoded = True
            ids = self._tokenizer(message.get("content") or "", add_special_tokens=False, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        if ended and end is not None and not (ids and ids[-1] in self._tokenizer.all_special_ids):
            ids = [*ids, end]
        return list(ids), ended

    def _choice(self, found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer, and what of it is a message."""
        try:
            choice = found["choices"][0]
            message = choice["message"] if "message" in choice else {"content": choice["text"]}
            return {"finish_reason": choice["finish_reason"], **choice}, message
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self._connection.url} answers in another form: {str(found)[:200]}.") from error

    def _check_prompt(self, ids: list[int] | None, found: dict[str, Any], prompt: list[int]) -> None:
        """The server must have read what training will be told that it read."""
        count = len(ids) if ids is not None else (found.get("usage") or {}).get("prompt_tokens", len(prompt))
        if count != len(prompt) or (ids is not None and list(ids) != prompt):
            raise ServerError(
                f"{self._connection.url} reads a prompt otherwise than the target's tokenizer: {count} tokens there, "
                f"{len(prompt)} here. It serves another model or with another chat template; give --target the model "
                "that it serves."
            )

    def _only_model(self) -> str:
        names = self._connection.models()
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise ServerError(f"{self._connection.url} has {listed}: say which model it is with --server-model.")
        return names[0]
