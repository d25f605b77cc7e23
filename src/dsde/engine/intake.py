"""Accepts requests or says in one sentence why not. After this nothing about a request can fail."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq

from dsde.core.errors import InvalidInput
from dsde.core.params import SamplingParams
from dsde.core.rng import derive_stream
from dsde.core.sequence import Sequence
from dsde.engine.request import Completion, Request
from dsde.engine.scheduler import blocks_for
from dsde.engine.text import TextState
from dsde.models.batch import BLOCK_SIZE
from dsde.models.tokenizer import Tokenizer


class Intake:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Seq[int],
        max_model_len: int,
        num_blocks: int,
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.seed = seed
        self._num_requests = 0
        self._num_sequences = 0

    def accept(self, prompt: str | Seq[int], params: SamplingParams, request_id: str | None) -> Request:
        tokens = self.tokenize(prompt)
        self.check(tokens, params)
        number = self._num_requests
        self._num_requests += 1
        request_id = request_id or f"request-{number}"
        completions = [self._completion(request_id, number, index, tokens, params) for index in range(params.n)]
        return Request(request_id, prompt if isinstance(prompt, str) else None, tokens, params, completions)

    def _completion(
        self, request_id: str, number: int, index: int, tokens: list[int], params: SamplingParams
    ) -> Completion:
        own_seed = params.seed is not None
        stop_ids = frozenset(params.stop_token_ids)
        sequence = Sequence(
            request_id=request_id,
            index=index,
            params=params,
            tokens=list(tokens),
            num_prompt_tokens=len(tokens),
            max_tokens=self._max_tokens(tokens, params),
            stop_token_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids,
            stream=derive_stream(params.seed or 0, index) if own_seed else derive_stream(self.seed, number, index),
            arrival=self._num_sequences,
        )
        self._num_sequences += 1
        return Completion(sequence, TextState(self.tokenizer, params.stop_strings))

    def tokenize(self, prompt: str | Seq[int], add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, checked. Any thread may ask."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInput("This model has no tokenizer: give the prompt as a list of token ids.")
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise InvalidInput("The prompt is not valid Unicode: it contains half of a surrogate pair.") from None
            return self.tokenizer.encode(prompt, add_special_tokens)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise InvalidInput(f"A prompt must be text or a list of token ids, got {prompt!r}.") from None
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidInput(f"A prompt's token ids must be from 0 to {self.vocab_size - 1}, got {token}.")
        return tokens

    def _max_tokens(self, tokens: list[int], params: SamplingParams) -> int:
        room = self.max_model_len - len(tokens)
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def check(self, tokens: list[int], params: SamplingParams) -> None:
        """Refuse what could never be served. Reads nothing that changes, so that any thread may ask."""
        if not tokens:
            raise InvalidInput("The prompt is empty: at least one token is needed to continue from.")
        if len(tokens) >= self.max_model_len:
            raise InvalidInput(
                f"The prompt has {len(tokens)} tokens, but prompt and output together may have {self.max_model_len} "
                "(max_model_len): shorten the prompt."
            )
        longest = len(tokens) + self._max_tokens(tokens, params)
        if blocks_for(longest) > self.num_blocks:
            raise InvalidInput(
                f"The request may grow to {longest} tokens, but the KV cache holds {self.num_blocks * BLOCK_SIZE}: "
                "lower max_tokens or raise kv_cache_bytes."
            )
        if params.stop_strings and self.tokenizer is None:
            raise InvalidInput("stop strings need a tokenizer, and this model has none: use stop_token_ids.")
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name):
                if token >= self.vocab_size:
                    raise InvalidInput(f"{name} names token {token}, but ids end at {self.vocab_size - 1}.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise InvalidInput(f"{name} must be at most {self.vocab_size}, the size of the vocabulary.")
