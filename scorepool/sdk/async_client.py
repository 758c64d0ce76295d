"""The client for asyncio."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self, Unpack

from scorepool import wire
from scorepool.options import (
    ClassifyOptions,
    CompareOptions,
    EmbedOptions,
    GenerateOptions,
    ScoreOptions,
    TokenizeOptions,
)
from scorepool.sdk.async_batches import AsyncBatches
from scorepool.sdk.async_jobs import AsyncJobs
from scorepool.sdk.async_models import AsyncModels
from scorepool.sdk.async_webhooks import AsyncWebhooks
from scorepool.sdk.chats import with_structs
from scorepool.sdk.comparing import compare_requests
from scorepool.sdk.connection import RETRY_S, AsyncConnection, url_and_key
from scorepool.sdk.embedding_jobs import EmbedInput, embed_requests
from scorepool.sdk.errors import ScorepoolError
from scorepool.sdk.splitting import (
    ClassifyInput,
    Division,
    Item,
    ItemsRequest,
    classify_requests,
    result_of,
    score_requests,
)


class AsyncClient(AsyncJobs, AsyncModels, AsyncBatches, AsyncWebhooks):
    """A connection to one API, for one event loop. Safe to share between its tasks.

    Calls are repeated for `retry_s` while the API is away or busy. Waits for jobs and their tokens outlive any restart;
    so do `score`, `generate` and `gather`, once the API has answered. Leaving `async with` cancels the jobs that were
    submitted here and not awaited, unless they were detached.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, retry_s: float = RETRY_S) -> None:
        """Use the API at a URL, or at a unix socket: `unix:///PATH`.

        Without them, SCOREPOOL_URL and SCOREPOOL_API_KEY are used; without the former, the address of
        `scorepool serve`.
        """
        super().__init__(AsyncConnection(*url_and_key(url, api_key), retry_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, model: str, items: Iterable[Item], **options: Unpack[ScoreOptions]) -> wire.Result:
        """Score (prompt, completion) pairs, or completions of one `prompt`, and wait for the result.

        Any number of items is divided into jobs, and their results are joined. Options are the fields of `Score`.
        Raises JobFailed, ScorepoolError, Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return await self._run_all(score_requests(model, items, options))

    async def compare(
        self, model: str, base: str, items: Iterable[Item], **options: Unpack[CompareOptions]
    ) -> wire.Result:
        """Compare a model with its base on (prompt, completion) pairs, or completions of one `prompt`.

        Any number of items is divided into jobs, and their results are joined: `comparison` of the result says how far
        the models are apart, `sequences` what `model` finds. Options are fields of `Compare`. Raises JobFailed,
        ScorepoolError, Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return await self._run_all(compare_requests(model, base, items, options))

    async def classify(
        self, model: str, items: Iterable[ClassifyInput], **options: Unpack[ClassifyOptions]
    ) -> wire.Result:
        """Classify texts, token ids or chats, and wait for the result. Options are the fields of `Classify`.

        Any number of items is divided into jobs, and their results are joined. Raises JobFailed, ScorepoolError,
        Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return await self._run_all(classify_requests(model, items, options))

    async def embed(self, model: str, items: Iterable[EmbedInput], **options: Unpack[EmbedOptions]) -> wire.Result:
        """Embed texts or token ids, and wait for the result. Options are the fields of `Embed`.

        Any number of items is divided into jobs, and their results are joined. Raises JobFailed, ScorepoolError,
        Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return await self._run_all(embed_requests(model, items, options))

    async def _run_all(self, requests: Iterable[ItemsRequest]) -> wire.Result:
        """Run the jobs of one call, and join their results."""
        division = Division(requests)
        jobs: list[wire.Job] = []
        try:
            async for job in self.gather(division):
                jobs.append(job)
        except ScorepoolError as error:
            raise division.refusal(error, len(jobs)) from None
        return division.join(jobs, self.url)

    async def generate(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> wire.Result:
        """Continue a prompt, or answer `messages`, and wait for the result. Options are the fields of `Generate`.

        Raises JobFailed, ScorepoolError, Unreachable.
        """
        return result_of(await self._run(wire.Generate(model=model, prompt=prompt, **with_structs(options))), self.url)

    async def tokenize(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[TokenizeOptions]
    ) -> wire.SequenceResult:
        """Return the tokens of a text or of `messages`, without logprobs. Options are the fields of `Tokenize`.

        Raises JobFailed, ScorepoolError, Unreachable.
        """
        job = await self._run(wire.Tokenize(model=model, prompt=prompt, **with_structs(options)))
        return result_of(job, self.url).sequences[0]

    async def detokenize(self, model: str, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises JobFailed, ScorepoolError, Unreachable."""
        return (await self.tokenize(model, token_ids)).text
