"""What clients of llama.cpp's server read beside OpenAI's fields: `/props`, `/slots`, and `timings` of answers. Names
are those of its `tools/server/README.md`."""

from __future__ import annotations

from fastapi import FastAPI

from tiermoe.engine.request import Piece, RequestState
from tiermoe.engine.sampling import Sampling
from tiermoe.serve.dialects import Json, Refused
from tiermoe.serve.served import Served
from tiermoe.version import VERSION


def timings_of(piece: Piece) -> Json:
    """`timings` of an answer up to a piece."""
    spent = piece.timings
    drafts = {"draft_n": spent.drafted, "draft_n_accepted": spent.accepted} if spent.drafted else {}
    return {
        "cache_n": piece.cached,
        **_rates("prompt", spent.read, spent.read_s),
        **_rates("predicted", spent.tokens, spent.answer_s),
        **drafts,
    }


def _rates(name: str, count: int, seconds: float) -> dict[str, float]:
    """Tokens, and their milliseconds. A single token of an answer takes none: time is counted from it."""
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""
    loop = served.worker.loop

    @app.get("/props")
    async def props() -> Json:
        tokenizer = served.tokenizer
        return {
            "default_generation_settings": {"n_ctx": served.context, "params": _params(served.sampling, -1)},
            "total_slots": loop.rows,
            "model_alias": served.name,
            "model_path": served.name,  # where the model lies is the server's affair
            "modalities": {"vision": False, "audio": False},
            "chat_template": served.chat.text,
            "bos_token": getattr(tokenizer, "bos_token", None) or "",
            "eos_token": getattr(tokenizer, "eos_token", None) or "",
            "build_info": f"tiermoe-{VERSION}",
        }

    @app.get("/slots")
    async def slots(fail_on_no_slot: str = "") -> list[Json]:
        at_work = loop.scheduler.at_work()
        if fail_on_no_slot and len(at_work) >= loop.rows:
            raise Refused(503, f"all {loop.rows} slots are at work; ask again later", kind="unavailable_error")
        return [_slot(index, at_work.get(index), served.context) for index in range(loop.rows)]


def _slot(index: int, row: RequestState | None, context: int) -> Json:
    """What a row of the batch does, without its texts."""
    slot: Json = {"id": index, "id_task": -1, "n_ctx": context, "is_processing": row is not None}
    if row is None:
        return slot
    request, decoded, read = row.request, len(row.answer), row.read
    return slot | {
        "id_task": row.number,
        "n_past": read,
        "n_prompt_tokens": len(request.ids) + decoded,  # it grows there too
        "n_prompt_tokens_processed": max(0, min(read, len(request.ids)) - row.cached),
        "n_prompt_tokens_cache": row.cached,
        "params": _params(request.sampling, request.sampling.max_tokens),
        "next_token": [
            {"has_next_token": True, "n_remain": request.sampling.max_tokens - decoded, "n_decoded": decoded}
        ],
    }


def _params(sampling: Sampling, most: int) -> Json:
    """Sampling under llama-server's names. most: tokens of an answer; -1: as many as the context has."""
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    penalty = sampling.repetition_penalty
    return {
        "n_predict": most,
        "max_tokens": most,
        **{name: getattr(sampling, name) for name in names},
        "repeat_penalty": 1.0 if penalty is None else penalty,
    }
