"""Hooks a TGI server: first its service, and once that has a model, the model's own classes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tgi_patches.contract import (
    EPOCH_VARIABLE,
    IMPORTS_METADATA,
    STRICT_VARIABLE,
    BridgeMiss,
    ContractError,
    ShardSpec,
    new_epoch,
)
from tgi_patches.device.path import DevicePath
from tgi_patches.hooks import graph_joins, guard, log, support
from tgi_patches.hooks.causal import CausalHooks
from tgi_patches.hooks.flash import FlashHooks
from tgi_patches.hooks.identity import KVShape, fingerprint_of
from tgi_patches.hooks.memory import OutOfMemory, out_of_memory
from tgi_patches.hooks.overlay import HEALTH_REQUEST_ID, Overlay, Place
from tgi_patches.hooks.wrap import wrap, wrap_coroutine

_MODELS = "text_generation_server.models"
_DETAIL_CHARS = 300
_POISONED = "A step failed with prefix caching on: TGI's router may count on KV that was never computed."
_BAD_INPUT = 2


class Hooks(Protocol):
    """What `install` needs of either kind."""

    def forget(self) -> None: ...

    def arm(self, model: Any) -> KVShape: ...


def install(env: Mapping[str, str]) -> None:
    """Called once `text_generation_server.server` is imported.

    Never raises; SystemExit where ORCHESTRATOR_TGI_STRICT is set and this TGI is not a known one.
    """
    strict = env.get(STRICT_VARIABLE, "") == "1"
    try:
        spec = ShardSpec.from_env(env)
        ranks = int(env.get("WORLD_SIZE", "1"))
        if ranks > 1 and EPOCH_VARIABLE not in env:
            raise ContractError(f"{ranks} ranks need the epoch that they share in {EPOCH_VARIABLE}.")
        epoch = int(env.get(EPOCH_VARIABLE, new_epoch()))
        place = Place(spec, epoch, int(env.get("RANK", "0")), ranks)
    except (ContractError, ValueError) as error:
        _refuse(strict, f"The shard's spec is not usable: {error}")
        return
    if not spec.arena_dir:
        _refuse(strict, "The shard's spec names no folder for arenas.")
        return
    try:
        _hook_service(place, strict)
    except Exception as error:  # noqa: BLE001 - an overlay that cannot be laid on leaves a stock server
        note = f"The overlay could not be laid on: {error!r}"
        Overlay(place, "unknown").refuse(note)
        _strictly(strict, note)


def _refuse(strict: bool, note: str) -> None:
    log.warn("overlay_not_hooked", reason=note)
    _strictly(strict, note)


def _strictly(strict: bool, note: str) -> None:
    if strict:
        sys.stderr.write(f"{note} ({STRICT_VARIABLE}=1)\n")
        sys.exit(_BAD_INPUT)


def _hook_service(place: Place, strict: bool) -> None:
    unknown = guard.differences(guard.SERVER) + guard.differences(_likely())
    if unknown and strict:
        _refuse(strict, guard.sentence(unknown))
    service = importlib.import_module("text_generation_server.server").TextGenerationService
    laid = _Laid(place, unknown)
    if guard.differences(guard.SERVER):
        laid.unhooked("unknown")
        return
    wrap(service, "__init__", laid.made)
    wrap_coroutine(service, "Warmup", laid.warmed_up)
    wrap_coroutine(service, "Prefill", laid.prefilled)
    wrap_coroutine(service, "Decode", laid.decoded)


def _likely() -> guard.Known:
    """What the model will be made of: TGI takes its flash classes wherever they can be imported."""
    models = importlib.import_module(_MODELS)
    return guard.FLASH if getattr(models, "FLASH_ATTENTION", False) else guard.CAUSAL


class _Laid:
    """The overlay of this process, from the service's making to the end of its warmup."""

    def __init__(self, place: Place, unknown: list[str]) -> None:
        self._place = place
        self._unknown = unknown
        self._overlay: Overlay | None = None
        self._hooks: Hooks | None = None
        self._path: DevicePath | None = None

    def unhooked(self, model_class: str) -> None:
        Overlay(self._place, model_class).refuse(guard.sentence(self._unknown))

    def made(self, original: Callable[..., None], service: Any, *args: Any, **kwargs: Any) -> None:
        original(service, *args, **kwargs)
        try:
            self._hook_model(service.model)
        except Exception as error:  # noqa: BLE001 - never into TGI
            Overlay(self._place, type(service.model).__name__).refuse(f"The overlay failed: {error!r}")

    async def warmed_up(self, original: Callable[..., Any], service: Any, *args: Any) -> Any:
        if self._hooks is not None:
            self._hooks.forget()
        reply = await original(service, *args)
        if self._overlay is not None and self._hooks is not None:
            try:
                self._arm(service.model)
            except BridgeMiss as miss:
                self._overlay.refuse(f"KV cannot be relayed: {miss}.")
            except Exception as error:  # noqa: BLE001 - never into TGI
                self._overlay.refuse(f"The overlay could not be armed: {error!r}")
        return reply

    async def prefilled(self, original: Callable[..., Any], service: Any, request: Any, context: Any) -> Any:
        if self._overlay is not None:
            self._overlay.take_results()  # of a Prefill that failed
        try:
            reply = await original(service, request, context)
        except Exception as error:
            if (harmless := self._step_failed(error, probe=_is_probe(request))) is not None:
                raise harmless from error
            raise
        if self._overlay is not None and (results := self._overlay.take_results()):
            metadata = ((IMPORTS_METADATA, results),)
            self._overlay.shielded(lambda: context.set_trailing_metadata(metadata), None)
        return reply

    async def decoded(self, original: Callable[..., Any], service: Any, *args: Any) -> Any:
        try:
            return await original(service, *args)
        except Exception as error:
            if (harmless := self._step_failed(error, probe=False)) is not None:
                raise harmless from error
            raise

    def _step_failed(self, error: Exception, *, probe: bool) -> OutOfMemory | None:
        """What to raise in place of an error that concerns the running batch alone; None for any other.

        TGI ends a server at every RuntimeError, which torch's out of memory is.  That is right where ranks
        fail alone, which leaves the others in a collective; and with prefix caching, where the router now
        takes prompts for cached that were never computed, chunks of a running one too.  A server that lives
        on all the same asks to be replaced; the router's own health check has no blocks.
        """
        caching = _prefix_caching()
        if self._overlay is not None and caching and not probe:
            self._overlay.wants_relaunch(_POISONED)
        if self._place.world_size > 1 or caching or not out_of_memory(error):
            return None
        log.warn("out_of_memory", error=str(error)[:_DETAIL_CHARS])
        return OutOfMemory("Out of memory in this step: its requests failed, the server goes on.")

    def _hook_model(self, model: Any) -> None:
        served = _served(model)
        overlay = Overlay(self._place, served.model_class)
        causal = served.model_class in support.CAUSAL_CLASSES
        unknown = guard.differences(guard.CAUSAL if causal else guard.FLASH)
        note = support.refusal(served) or (guard.sentence(unknown) if unknown else None)
        if note is not None:
            overlay.refuse(note)
            return
        if not causal:
            self._path = DevicePath.of(model.device, os.environ, log.warn)
        self._hooks = _causal(overlay) if causal else _flash(overlay, served, self._path)
        self._overlay = overlay
        overlay.say()

    def _arm(self, model: Any) -> None:
        assert self._overlay is not None
        assert self._hooks is not None
        shape = self._hooks.arm(model)
        settings = importlib.import_module(f"{_MODELS}.globals")
        fingerprint = fingerprint_of(
            model, self._place.spec, shape, attention=settings.ATTENTION, block_size=settings.BLOCK_SIZE
        )
        self._overlay.arm(fingerprint, shape)
        if self._path is not None and self._overlay.armed:
            self._path.armed(*self._overlay.ring)


def _prefix_caching() -> bool:
    """TGI has read it long ago; a TGI that has it elsewhere is taken for one that caches."""
    return bool(getattr(sys.modules.get(f"{_MODELS}.globals"), "PREFIX_CACHING", True))


def _is_probe(request: Any) -> bool:
    requests = getattr(getattr(request, "batch", None), "requests", ())
    return all(one.id == HEALTH_REQUEST_ID for one in requests)


def _served(model: Any) -> support.Served:
    settings = importlib.import_module(f"{_MODELS}.globals")
    return support.Served(
        model_class=type(model).__name__,
        batch_class=model.batch_type.__name__,
        attention=settings.ATTENTION,
        device=model.device.type,
        ranks=model.world_size,
    )


def _flash(overlay: Overlay, served: support.Served, path: DevicePath | None) -> FlashHooks:
    module = importlib.import_module(f"{_MODELS}.flash_causal_lm")
    tokens = importlib.import_module("text_generation_server.utils.tokens")
    settings = importlib.import_module(f"{_MODELS}.globals")
    hooks = FlashHooks(
        overlay,
        heads_first=support.heads_first(served.attention, served.device),
        request_logprobs=settings.REQUEST_LOGPROBS,
        path=path,
    )
    hooks.install(module, tokens)
    if graph_joins.wanted(os.environ):
        graph_joins.install(module, overlay)
    return hooks


def _causal(overlay: Overlay) -> CausalHooks:
    module = importlib.import_module(f"{_MODELS}.causal_lm")
    tokens = importlib.import_module("text_generation_server.utils.tokens")
    hooks = CausalHooks(overlay)
    hooks.install(module, tokens)
    return hooks
