"""Serve vLLM's routes that load and unload LoRA adapters. The keys of operators may call them."""

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from scorepool import wire
from scorepool.api.dependencies import AdaptersDep, Operator, SettingsDep, known_query
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message

router = APIRouter(prefix="/v1", tags=["adapters"], dependencies=[Depends(known_query)])
_TEXT = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
_LOAD = openapi.request_body(wire.LoadAdapter, {"lora_name": "sql", "lora_path": "/adapters/sql"})
_UNLOAD = openapi.request_body(wire.UnloadAdapter, {"lora_name": "sql"})
_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 503)


@router.post(
    "/load_lora_adapter",
    summary="Load a LoRA adapter",
    responses={200: _TEXT, **openapi.responses({}, _ERRORS)},
    openapi_extra=_LOAD,
)
async def load_lora_adapter(
    request: Request, _: Operator, settings: SettingsDep, adapters: AdaptersDep
) -> PlainTextResponse:
    """Load an adapter on all live workers of its model, as vLLM's route of this name does.

    It is served when this answers 200, and by workers that start later. If one worker cannot load it, none serves it,
    and the reply is 400 with the reason.
    """
    body = await read_message(request, wire.LoadAdapter, settings.max_body_bytes)
    await adapters.load(body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    responses={200: _TEXT, **openapi.responses({}, _ERRORS)},
    openapi_extra=_UNLOAD,
)
async def unload_lora_adapter(
    request: Request, _: Operator, settings: SettingsDep, adapters: AdaptersDep
) -> PlainTextResponse:
    """Unload an adapter from all live workers of its model. Jobs that run with it end; later ones get 404."""
    body = await read_message(request, wire.UnloadAdapter, settings.max_body_bytes)
    await adapters.unload(body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
