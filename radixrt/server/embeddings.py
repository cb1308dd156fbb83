"""Vectors and relevance: ``/v1/embeddings`` (OpenAI), ``/v1/score`` (vLLM) and ``/v1/rerank`` (Jina, Cohere), over an ``EngineClient``.

An embedding is the final hidden states of the input's tokens, pooled. A relevance is what the model makes of a question, asked as its chat
template writes one: the probability of the first of two answers among both, by ``select``'s scores (rule ``total_logprob``).

    prefix  |-- chat: instruction, query --|-- document, question, generation prompt --|  answers: Yes, No
                 the same for all documents: computed once

Invariants: a request is refused before any of it runs; whatever ends one of its prompts ends all of them; each prompt counts once in usage.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from radixrt.checks import flag, integer
from radixrt.engine.embedding import POOLINGS, check_pooling
from radixrt.engine.inputs import check_ids, to_tokens
from radixrt.engine.program_text import ProgramText
from radixrt.errors import InvalidRequest, ModelError, nearest, shown
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import RequestOutput
from radixrt.sampling.choices import Scored, decide
from radixrt.server.errors import Failure, RequestFailed, ignored
from radixrt.server.limits import Gate, check_fields, read_object

T = TypeVar("T")

EMBEDDINGS = ("model", "input", "encoding_format", "dimensions", "user", "pooling", "normalize", "truncate_dimensions", "cache_salt")  # fmt: skip
_ASKING = ("instruction", "template", "answers", "apply_chat_template", "chat_template_kwargs", "cache_salt", "user")
SCORE = ("model", "text_1", "text_2", *_ASKING)
RERANK = ("model", "query", "documents", "top_n", "return_documents", *_ASKING)
INSTRUCTION = "Judge whether the document answers the query."
TEMPLATE = "{instruction}\n\nQuery: {query}\n\nDocument: {document}\n\nDoes the document answer the query? Reply with {yes} or {no} only."
ANSWERS = ("Yes", "No")
_PLACES = ("instruction", "query", "document", "yes", "no")
_PLACE = re.compile(r"\{(" + "|".join(_PLACES) + r")\}")
_MAX_TEXT = 65_536  # characters of an instruction or a template
_MAX_ANSWER = 1024  # characters
_MAX_SALT = 1024
_SMALL = 16_384  # characters: more is tokenized off the event loop
_RENDERED = 1024  # characters that rendering a chat costs as much as
_CHARS_PER_TOKEN = 256  # no text of a context's length is longer than this a token


@dataclass(frozen=True, slots=True)
class Question:
    """How the model is asked about a pair of texts.

    Fields:
        template: the question, with ``{query}`` and ``{document}``, and ``{instruction}``, ``{yes}``, ``{no}`` where wanted.
        answers: what counts as relevant, and as not. chat: it goes through the model's chat template, with ``kwargs``.
    """

    template: str = TEMPLATE
    instruction: str = INSTRUCTION
    answers: tuple[str, str] = ANSWERS
    chat: bool = True
    kwargs: Mapping[str, Any] | None = None

    def text(self, query: str, document: str) -> str:
        """The question. What stands in a text is put in as it is: places are looked for in the template alone."""
        values = dict(zip(_PLACES, (self.instruction, query, document, *self.answers), strict=True))
        return _PLACE.sub(lambda found: values[found[1]], self.template)

    def prompt(self, query: str, document: str, tokenizer: Tokenizer) -> str:
        """What comes before the answer.

        Raises:
            InvalidRequest: the model has no chat template, or one that refuses the question.
        """
        text = self.text(query, document)
        if not self.chat:
            return text
        try:
            return tokenizer.render_chat(
                [{"role": "user", "content": text}], **{"add_generation_prompt": True, **(self.kwargs or {})}
            )
        except ModelError as error:
            problem = f"=true: {error}; or give the whole prompt as template, with apply_chat_template=false"
            raise InvalidRequest("apply_chat_template", problem) from None


@dataclass(frozen=True, slots=True)
class Relevance:
    """Of each pair the probability that it is relevant (0 to 1), and what was read for it."""

    scores: tuple[float, ...]
    tokens: int
    cached: int


def routes(gate: Gate, config: Any) -> list[web.RouteDef]:
    """The routes. They rely on the application's doors for keys, limits of bodies and for errors."""
    here = Embeddings(gate, config)
    return [
        web.post("/v1/embeddings", here.embeddings),
        web.post("/v1/score", here.score),
        web.post("/v1/rerank", here.rerank),
        web.post("/v2/rerank", here.rerank),
    ]


class Embeddings:
    """The handlers of one server.

    Args:
        config: has ``served_model_names``, ``default_chat_template_kwargs``, ``max_batch``, ``unknown_fields``, and ``embeddings``: False
            where the model is not fit for them.
    """

    def __init__(self, gate: Gate, config: Any) -> None:
        self._gate, self._config = gate, config
        self._text: ProgramText | None = None

    # ---- routes

    async def embeddings(self, request: web.Request) -> web.Response:
        data, model, headers = await self._read(request, EMBEDDINGS)
        encoding = data.get("encoding_format", "float")
        if encoding not in ("float", "base64"):
            raise InvalidRequest("encoding_format", f"={shown(encoding)}: must be float or base64")
        pooling = check_pooling(data.get("pooling", POOLINGS[0]))
        normalize = flag("normalize", data.get("normalize", True))
        vectors, tokens, cached = await self.vectors(data, model, pooling, normalize)
        return _json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": i, "embedding": _encoded(vector, encoding)}
                    for i, vector in enumerate(vectors)
                ],
                "model": model,
                "usage": _usage(tokens, cached),
            },
            headers,
        )

    async def vectors(
        self, data: Mapping[str, Any], model: str, pooling: str = POOLINGS[0], normalize: bool = True
    ) -> tuple[list[npt.NDArray[np.float32]], int, int]:
        """Of ``input``'s texts the vectors, of as many ``dimensions`` as are wanted; tokens that were read, and of these the cached ones.

        Raises:
            InvalidRequest: names the field. RequestFailed: also where the model is not fit for vectors.
        """
        if not getattr(self._config, "embeddings", True):
            problem = f"model={shown(model)}: gives no embeddings: the server was started with embeddings off, the model is not fit for them"
            raise RequestFailed(Failure(400, problem, "model", "model_unfit"))
        size, salt = self._dimensions(data), _salt(data)
        prompts = await self._prompts(data.get("input"))
        outputs = await self._all(
            [self._gate.embed(ids, pooling, request_id=uuid.uuid4().hex, cache_salt=salt) for ids in prompts], "input"
        )
        vectors = [_vector(output, size, normalize) for output in outputs]
        return vectors, sum(one.prompt_tokens for one in outputs), sum(one.cached_tokens for one in outputs)

    async def score(self, request: web.Request) -> web.Response:
        """How relevant ``text_2`` is to ``text_1``: one to many, or pair by pair."""
        data, model, headers = await self._read(request, SCORE)
        question, salt = self._question(data), _salt(data)
        for name in ("text_1", "text_2"):
            self._counted(name, data.get(name))
        first, second = _texts("text_1", data.get("text_1")), _texts("text_2", data.get("text_2"))
        if len(first) not in (1, len(second)):
            problem = f" has {len(first)} texts and text_2 {len(second)}: must be one for all, or as many"
            raise InvalidRequest("text_1", problem)
        queries = first * len(second) if len(first) == 1 else first
        found = await self._relevance(question, list(zip(queries, second, strict=True)), salt, "text_2")
        return _json(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(found.scores)],
                "usage": _usage(found.tokens, found.cached),
            },
            headers,
        )

    async def rerank(self, request: web.Request) -> web.Response:
        """``documents`` by their relevance to ``query``, the most relevant first; of equal ones the first."""
        data, model, headers = await self._read(request, RERANK)
        question, salt = self._question(data), _salt(data)
        query = data.get("query")
        if not isinstance(query, str) or not query:
            raise InvalidRequest("query", f"={shown(query)}: must be a text, and not empty")
        given = data.get("documents")
        self._counted("documents", given)
        documents = _texts("documents", _plain_documents(given))
        top = integer("top_n", data.get("top_n", len(documents)), 1, 2**31 - 1)
        back = flag("return_documents", data.get("return_documents", True))
        found = await self._relevance(question, [(query, one) for one in documents], salt, "documents")
        order = sorted(range(len(documents)), key=lambda i: -found.scores[i])[:top]
        results = [
            {"index": i, "relevance_score": found.scores[i], **({"document": {"text": documents[i]}} if back else {})}
            for i in order
        ]
        usage = _usage(found.tokens, found.cached)
        return _json({"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results, "usage": usage}, headers)

    # ---- reading

    async def _read(
        self, request: web.Request, valid: Sequence[str]
    ) -> tuple[dict[str, Any], str, Mapping[str, str] | None]:
        """The fields of a body that are not null, the model's name, and a header about fields that are not known."""
        data, headers = await read_object(request), None
        if getattr(self._config, "unknown_fields", "refuse") == "refuse":
            check_fields(request.path, data, valid)
        else:
            headers = ignored([name for name in data if name not in valid])
        data = {name: value for name, value in data.items() if value is not None}
        names = tuple(getattr(self._config, "served_model_names", None) or (self._gate.info.model,))
        model = data.get("model", names[0])
        if not isinstance(model, str):
            raise InvalidRequest("model", f"={shown(model)}: must be a string")
        if model not in names:
            problem = f"model={shown(model)}: is not served here{nearest(model, names)}"
            raise RequestFailed(Failure(404, problem, "model", "model_not_found"))
        if not isinstance(data.get("user", ""), str):
            raise InvalidRequest("user", f"={shown(data['user'])}: must be a string")
        full = self._gate.full
        if full is not None:
            raise RequestFailed(full)
        return data, model, headers

    def _dimensions(self, data: Mapping[str, Any]) -> int:
        """How many numbers of each vector are wanted."""
        have = self._gate.info.embedding_size
        cut = flag("truncate_dimensions", data.get("truncate_dimensions", False))
        if "dimensions" not in data:
            if cut:
                raise InvalidRequest("truncate_dimensions", "=true: needs dimensions")
            return have
        wanted: int = integer("dimensions", data["dimensions"], 1, 2**31 - 1)
        if wanted > have:
            raise InvalidRequest("dimensions", f"={wanted}: the model's vectors have {have}")
        if wanted < have and not cut:
            problem = (
                f"={wanted}: the model's vectors have {have}, and their first {wanted} say little unless it was trained for "
                f"that; truncate_dimensions=true takes them"
            )
            raise InvalidRequest("dimensions", problem)
        return wanted

    async def _prompts(self, value: Any) -> list[list[int]]:
        """The token ids of each input."""
        single = isinstance(value, str) or (isinstance(value, list) and bool(value) and _is_number(value[0]))
        inputs = [value] if single else value
        if not isinstance(inputs, list) or not inputs:
            problem = "is missing" if value is None else f"={shown(value)}"
            raise InvalidRequest("input", f"{problem}: must be a text, a list of token ids, or a list of one of these")
        self._counted("input", inputs)
        self._bounded("input", inputs)
        info, tokenizer = self._gate.info, self._gate.tokenizer

        def read() -> list[list[int]]:
            found = []
            for i, one in enumerate(inputs):
                field = "input" if single else f"input[{i}]"
                if not isinstance(one, (str, list)) or (isinstance(one, list) and one and not _is_number(one[0])):
                    raise InvalidRequest(field, f"={shown(one)}: must be a text or a list of token ids")
                found.append(_tokens(field, one, tokenizer, info.context_length, info.vocab_size))
            return found

        return await _here_or_aside(sum(len(one) for one in inputs if isinstance(one, (str, list))), read)

    def _question(self, data: Mapping[str, Any]) -> Question:
        chat = flag("apply_chat_template", data.get("apply_chat_template", True))
        kwargs = data.get("chat_template_kwargs", {})
        if not isinstance(kwargs, dict):
            raise InvalidRequest("chat_template_kwargs", f"={shown(kwargs)}: must be an object")
        for name in kwargs:
            if name in _RESERVED or name.endswith("_token"):
                raise InvalidRequest(
                    f"chat_template_kwargs.{shown(name).strip(chr(39))}", "is not for a request to set"
                )
        if kwargs and not chat:
            raise InvalidRequest("chat_template_kwargs", " have no meaning with apply_chat_template=false")
        texts = {"template": TEMPLATE, "instruction": INSTRUCTION}
        for name, default in texts.items():
            texts[name] = text = data.get(name, default)
            if not isinstance(text, str) or len(text) > _MAX_TEXT:
                raise InvalidRequest(name, f"={shown(text)}: must be a text of at most {_MAX_TEXT} characters")
        for place in ("query", "document"):
            if f"{{{place}}}" not in texts["template"]:
                raise InvalidRequest("template", f"={shown(texts['template'])}: must have the place {{{place}}}")
        if "instruction" in data and "{instruction}" not in texts["template"]:
            raise InvalidRequest("instruction", f"={shown(texts['instruction'])}: the template has no {{instruction}}")
        given = data.get("answers", ANSWERS)
        if (
            not isinstance(given, (list, tuple))
            or len(given) != 2
            or not all(isinstance(a, str) and 0 < len(a) <= _MAX_ANSWER for a in given)
        ):
            problem = f"={shown(given)}: must be two texts: the one that says yes, and the other; at most {_MAX_ANSWER} characters each"
            raise InvalidRequest("answers", problem)
        defaults = getattr(self._config, "default_chat_template_kwargs", None) or {}
        return Question(texts["template"], texts["instruction"], (given[0], given[1]), chat, {**defaults, **kwargs})

    def _counted(self, field: str, value: Any) -> None:
        """Refuses a list of too many, before any of it is looked at."""
        most = getattr(self._config, "max_batch", 1024)
        if isinstance(value, list) and len(value) > most:
            raise InvalidRequest(field, f" has {len(value)} entries: at most max_batch={most} are taken")

    def _bounded(self, field: str, texts: Sequence[Any]) -> None:
        longest = self._gate.info.context_length * _CHARS_PER_TOKEN
        for i, text in enumerate(texts):
            if isinstance(text, str) and len(text) > longest:
                problem = f" has {len(text)} characters; context_length={self._gate.info.context_length} tokens cannot hold it"
                raise InvalidRequest(f"{field}[{i}]", problem)

    # ---- asking

    async def _relevance(
        self, question: Question, pairs: Sequence[tuple[str, str]], salt: str, field: str
    ) -> Relevance:
        """The relevance of each pair; ``field`` holds the second text of each."""
        queries, documents = zip(*pairs, strict=True)
        self._bounded(field, documents)
        self._bounded("query" if field == "documents" else "text_1", list(dict.fromkeys(queries)))
        info, tokenizer = self._gate.info, self._gate.tokenizer
        if self._text is None:
            self._text = ProgramText(tokenizer)
        after = self._text.after
        try:
            answers = tuple(tuple(after(answer).tolist()) for answer in question.answers)
        except InvalidRequest as error:
            raise InvalidRequest("answers", f": {error}") from None
        if answers[0] == answers[1] or not all(answers):
            raise InvalidRequest("answers", f"={shown(question.answers)}: nothing tells them apart")

        def read() -> list[list[int]]:
            return [
                _tokens(f"{field}[{i}]", question.prompt(*pair, tokenizer), tokenizer, info.context_length, info.vocab_size)
                for i, pair in enumerate(pairs)
            ]  # fmt: skip

        size = sum(map(len, [*documents, *queries])) + _RENDERED * len(pairs)
        prompts = await _here_or_aside(size, read)
        outputs = await self._all(
            [self._gate.score(ids, answers, request_id=uuid.uuid4().hex, cache_salt=salt) for ids in prompts], field
        )
        scores, tokens, cached, ends = [], 0, 0, sum(map(len, answers))
        for ids, output in zip(prompts, outputs, strict=True):
            if output.scores is None:
                raise RequestFailed(Failure(500, output.error or "was aborted", None, "request_failed"))
            decision = decide(Scored(question.answers, answers, output.scores), "total_logprob")
            scores.append(decision.probabilities[0])
            tokens += len(ids)
            # each answer was a prompt of its own, and found in the cache what the other had computed: that counts once
            cached += max(0, len(ids) - max(0, output.computed_tokens - ends))
        return Relevance(tuple(scores), tokens, cached)

    async def _all(self, jobs: Sequence[Coroutine[Any, Any, RequestOutput]], field: str) -> list[RequestOutput]:
        """What all of them give; whatever ends one of them ends all."""
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            outputs = await asyncio.gather(*tasks)
        except InvalidRequest as error:
            if error.field == "max_waiting_requests":
                raise
            raise InvalidRequest(field, f": {error}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for output in outputs:
            if output.error is not None:
                raise RequestFailed(Failure(500, f"the request failed: {output.error}", None, "request_failed"))
        return outputs


_RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template")


def _tokens(field: str, one: Any, tokenizer: Tokenizer, context: int, vocab: int) -> list[int]:
    try:
        ids = to_tokens(one, tokenizer, context)
        check_ids("prompt", ids, vocab)
    except InvalidRequest as error:
        own, problem = error.__reduce__()[1]
        raise InvalidRequest(field + own.removeprefix("prompt"), problem) from None
    except OverflowError:
        raise InvalidRequest(field, "has an id that is not in the vocabulary") from None
    if len(ids) > context:
        raise InvalidRequest(field, f"has {len(ids)} tokens; context_length={context} must hold it")
    found: list[int] = ids.tolist()
    return found


async def _here_or_aside(size: int, function: Callable[[], T]) -> T:
    """Run a function here, or in a thread where its work is large."""
    return function() if size <= _SMALL else await asyncio.to_thread(function)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _texts(field: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        problem = "is missing" if value is None else f"={shown(value)}"
        raise InvalidRequest(field, f"{problem}: must be a text or a list of texts")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            at = field if isinstance(value, str) else f"{field}[{i}]"
            raise InvalidRequest(at, f"={shown(text)}: must be a text, and not empty")
    return texts


def _plain_documents(value: Any) -> Any:
    """Documents as texts: some clients write them as objects."""
    if not isinstance(value, list):
        return None if value is None else [value]
    return [one["text"] if isinstance(one, dict) and set(one) == {"text"} else one for one in value]


def _salt(data: Mapping[str, Any]) -> str:
    salt = data.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > _MAX_SALT:
        raise InvalidRequest("cache_salt", f"={shown(salt)}: must be a string of at most {_MAX_SALT} characters")
    return salt


def _vector(output: RequestOutput, size: int, normalize: bool) -> npt.NDArray[np.float32]:
    """The first ``size`` numbers, of length 1 where that is wanted."""
    if output.embedding is None:
        raise RequestFailed(Failure(503, "the request was aborted by the server", None, "request_aborted"))
    vector = np.array(output.embedding[:size], dtype=np.float64)
    if normalize:
        length = math.sqrt(float(vector @ vector))
        if not length:
            raise RequestFailed(Failure(500, "the vector is zero: it has no direction to keep", None, "request_failed"))
        vector /= length
    return vector.astype("<f4")


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> str | list[float]:
    """Numbers, or the base64 of their bytes: float32, the least significant first."""
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def _usage(tokens: int, cached: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def _json(value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=headers)


# ---- the description


def describe() -> dict[str, Any]:
    """The OpenAPI paths of these routes."""
    text, boolean = {"type": "string"}, {"type": "boolean"}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    some = {"type": "string", "minLength": 1}
    texts = {"type": "array", "items": some, "minItems": 1}
    document = {"type": "object", "properties": {"text": some}, "required": ["text"], "additionalProperties": False}
    types: dict[str, dict[str, Any]] = {
        "input": {"oneOf": [some, texts, ids, {"type": "array", "items": ids, "minItems": 1}]},
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": {"type": "integer", "minimum": 1},
        "pooling": {"enum": list(POOLINGS)},
        "normalize": boolean,
        "truncate_dimensions": boolean,
        "cache_salt": {"type": "string", "maxLength": _MAX_SALT},
        "instruction": {"type": "string", "maxLength": _MAX_TEXT},
        "template": {"type": "string", "maxLength": _MAX_TEXT},
        "answers": {"type": "array", "items": some, "minItems": 2, "maxItems": 2},
        "apply_chat_template": boolean,
        "chat_template_kwargs": {"type": "object"},
        "text_1": {"oneOf": [some, texts]},
        "text_2": {"oneOf": [some, texts]},
        "query": some,
        "documents": {"type": "array", "items": {"oneOf": [some, document]}, "minItems": 1},
        "top_n": {"type": "integer", "minimum": 1},
        "return_documents": boolean,
    }

    def post(summary: str, fields: Sequence[str], *required: str) -> dict[str, Any]:
        body = {
            "type": "object",
            "properties": {name: types.get(name, text) for name in fields},
            "required": list(required),
            "additionalProperties": False,
        }
        error = {"description": "why not", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}  # fmt: skip
        done = {"description": "done", "content": {"application/json": {"schema": {}}}}
        answers = {"200": done} | {str(status): error for status in (400, 401, 403, 404, 413, 415, 429, 503)}
        return {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": answers,
            }
        }

    ranked = post("Documents by their relevance (Jina, Cohere)", RERANK, "query", "documents")
    return {
        "/v1/embeddings": post("A vector for each text (OpenAI)", EMBEDDINGS, "input"),
        "/v1/score": post("How relevant texts are to each other (vLLM)", SCORE, "text_1", "text_2"),
        "/v1/rerank": ranked,
        "/v2/rerank": ranked,
    }
