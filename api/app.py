"""Assemble the application: routes, errors, middleware and lifetime.

`uvicorn --factory scorepool.api.app:create_app`, or `python -m scorepool.api`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from scorepool.api.batches.driver import Driver
from scorepool.api.batches.line_jobs import LineJobs
from scorepool.api.batches.services import BatchServices
from scorepool.api.dialects import anthropic, generate_route, openai, openrlhf, swift, tgi, trl, v1_score, vllm
from scorepool.api.http import errors, openapi
from scorepool.api.http.loopback import LoopbackOnly
from scorepool.api.http.middleware import HeadAsGet, RequestId, ShutdownMiddleware
from scorepool.api.metrics.prometheus import MetricsMiddleware
from scorepool.api.page import batches as batches_page
from scorepool.api.page import compare, docs, login, overview, playground, rendering
from scorepool.api.page import jobs as jobs_page
from scorepool.api.page import models as models_page
from scorepool.api.page.live import LiveFragments
from scorepool.api.page.rendering import STATIC, PageFiles
from scorepool.api.repositories.decode import WrongRedisType
from scorepool.api.routes import (
    adapters,
    batches,
    events,
    files,
    foreign_weights,
    jobs,
    message_batches,
    models,
    operations,
    pause,
    responses,
    text_generation_info,
    tinker,
    tokens,
    vllm_server,
    webhook_deliveries,
    webhook_endpoints,
    webhook_secrets,
    weights,
)
from scorepool.api.routes.dialects import router_of
from scorepool.api.state import State
from scorepool.api.trace_context import TraceContext
from scorepool.store import Settings

WEBHOOKS = (webhook_endpoints, webhook_secrets, webhook_deliveries)
DIALECTS = (
    openai.DIALECT,
    anthropic.DIALECT,
    vllm.DIALECT,
    trl.DIALECT,
    generate_route.DIALECT,
    tgi.DIALECT,
    v1_score.DIALECT,
    openrlhf.DIALECT,
    swift.DIALECT,
)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application. Redis need not be up yet. Raises SettingsError."""
    state = State.create(Settings.load() if settings is None else settings)

    driver = Driver(
        BatchServices(
            redis=state.redis_servers[0],
            settings=state.settings,
            files=state.files,
            models=state.models,
            jobs=state.jobs,
            admission=state.admission,
            submission=state.submission,
            line_jobs=LineJobs(state.servers, state.redis_servers, state.reach),
        )
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        driver.start()
        try:
            yield
        finally:
            await driver.close()
            await state.close()

    app = FastAPI(
        title="scorepool",
        version=openapi.VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.scorepool = state
    app.state.live_fragments = LiveFragments(lambda: state.waiting.is_closing)
    of_jobs = (jobs, events, weights, models, adapters, files, batches, message_batches, responses, tokens, tinker)
    for route in (*of_jobs, foreign_weights, pause, vllm_server, text_generation_info, *WEBHOOKS, operations):
        app.include_router(route.router)
    for page in (overview, jobs_page, batches_page, models_page, compare, playground, docs, login):
        app.include_router(page.router)
    app.include_router(playground.script_router)
    app.mount("/static", PageFiles(directory=STATIC), "static")
    for dialect in DIALECTS:
        app.include_router(router_of(dialect))
    errors.install(app, WrongRedisType)
    rendering.install(app)
    openapi.install(app)
    if not state.keyring:
        app.add_middleware(LoopbackOnly)
    app.add_middleware(ShutdownMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=state.metrics)
    if state.tracer is not None:
        app.add_middleware(TraceContext)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestId)  # the outermost
    return app
