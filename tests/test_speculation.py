"""Speculation: drafts from earlier tokens, guesses that change no token, and what they may lose."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speculation import Forced
from native_experts import checkpoint
from serving import Counted, Letters, WrappedEngine
from small_engines import NATIVE, alone, engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.engine.drafts import LONGEST, MATCH, DraftModel, Lookup, PromptLookup, check_vocabulary
from tiermoe.engine.request import Piece, Request, ThoughtBudget
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.engine.speculation import LOSS, MOST, CachedSequence, Speculation
from tiermoe.errors import LoadError, ModelError
from tiermoe.model.cache.kv import KVCache
from tiermoe.types import MOST_VERIFIED
from tiny import oracle, write

VOCABULARY = 128
WRONG = 0.2  # share of an `Informed`'s guesses
REPEATED = [*tokens(12, 3) * 3, *tokens(5, 4), *tokens(12, 3)]
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {"intermediate_size": 128},
    "qwen3_5_moe_text": {  # 16 rows of betas, which the kernels do not take at 4 bits
        "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_value_head_dim": 16,
    },
    "qwen4_exp_text": {
        "indexer_head_dim": 32, "indexer_n_heads": 3, "hc_lowrank": 64, "ple_embed_dim": 64,
        "linear_value_head_dim": 32,
    },
    "kimi_linear": {**_LATENT, "linear_head_dim": 64, "intermediate_size": 128},
    "glm5_next_text": {
        **_LATENT, "qk_rope_head_dim": 0, "q_lora_rank": 64, "linear_head_dim": 64, "intermediate_size": 128,
        "index_head_dim": 64, "index_topk": 12, "index_kpool": 3,
    },
    "bailing_hybrid": {**_LATENT, "head_dim": 64, "intermediate_size": 128},
    "granitemoehybrid": {
        "mamba_n_heads": 16, "mamba_d_state": 16, "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "mamba_num_heads": 16, "ssm_state_size": 16, "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 64, "intermediate_size": 128,
    },
    "jamba": {"mamba_d_state": 32, "mamba_dt_rank": 64},
    "lfm2_moe": {"intermediate_size": 128},
}  # fmt: skip
"""Families with recurrent states, in sizes that the kernels take."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 12},
    "deepseek_v32": {**_LATENT, "q_lora_rank": 64, "index_head_dim": 128, "index_topk": 12, "intermediate_size": 64},
    "olmoe": {},
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 64, "o_lora_rank": 32, "sliding_window": 6,
        "index_topk": 3, "index_head_dim": 32,
    },
    "minimax_m3_vl_text": {},
    "gemma4_text": {"intermediate_size": 64, "global_head_dim": 512},
    "flex_olmo": {},
    "afmoe": {"intermediate_size": 128},
    "phimoe": {},
    "kolibri1": {"shared_expert_intermediate_size": 64},
    **RECURRENT,
}  # fmt: skip
"""Grouped heads, sinks and windows, latents that are chosen, compressed positions, groups of heads that choose, a dense
block beside the experts, attention apart from its norms, routers that no kernel computes, recurrent states."""


class Eager(Speculation):
    """Verifies every guess that there is, whatever it costs."""

    def allows(self, rows: int) -> bool:
        self.share = 1e-9
        return True


class Informed:
    """Drafts from answers that are known, by prompt. Some are empty, and some tokens wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._answers = answers
        self._drawn = random.Random(seed)

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: CachedSequence | None = None
    ) -> list[int]:
        drawn = self._drawn
        known = self._answers[tuple(prompt)][len(answer) :][: drawn.randint(0, most)]
        return [drawn.randrange(VOCABULARY) if drawn.random() < WRONG else token for token in known]


def eager() -> Speculation:
    return Eager(Lookup())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = checkpoint(tmp_path_factory.mktemp("speculation"), request.param, **FAMILIES[request.param])
    engine = engine_of(directory, bits=4, dense_bits=4, chunk=16, batch=3, context=120, cache="50%")
    assert engine.decoder.can_verify_draft is (native.available() or request.param not in RECURRENT)
    assert engine.decoder.batch_invariant is native.available()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write(tmp_path_factory.mktemp("speculation"), "qwen3_moe", torch.bfloat16, **NATIVE)
    engine = engine_of(directory, bits=4, dense_bits=4, chunk=16, batch=3, context=120)
    yield engine
    engine.close()


def answers(loop: RequestLoop, asked: Sequence[Request]) -> list[list[int]]:
    found: dict[int, list[int]] = {loop.add(each): [] for each in asked}
    while not loop.scheduler.idle:
        for piece in loop.step():
            assert piece.error is None, piece.error
            found[piece.number] += piece.tokens
    return list(found.values())


def requests(seed: int | None = None) -> list[Request]:
    """Prompts that repeat, of which greedy answers repeat soon too."""
    sampling = {} if seed is None else {"temperature": 0.7, "seed": seed, "top_p": 0.9}
    prompts = ([*tokens(at, at + 9), *REPEATED] for at in range(3))
    return [Request(each, Sampling(max_tokens=40, repetition_penalty=1.0, **sampling)) for each in prompts]


def written(text: Sequence[int]) -> Request:
    """A request whose answer is `text`, with the log probability that the model gives to each token."""
    return Request([*tokens(9), *REPEATED], Sampling(max_tokens=len(text)), logprobs=1, grammar=Forced(text))


def logprobs(loop: RequestLoop, text: Sequence[int]) -> list[Any]:
    loop.add(written(text))
    found = list[Any]()
    while not loop.scheduler.idle:
        found += [each for piece in loop.step() for each in piece.logprobs]
    return found


def test_guesses_change_no_bit_of_a_family(family: Any) -> None:
    """The prompt's own text with a wrong end now and then: rows of right guesses, and of wrong ones."""
    text = [*REPEATED[:20], 90, *REPEATED[3:14], 91, 92, *REPEATED[:9]]
    plain, guessed = Counted(family), Counted(family)
    expected = logprobs(RequestLoop(plain, Letters(), 1, set()), text)
    assert logprobs(RequestLoop(guessed, Letters(), 1, set(), speculation=eager()), text) == expected
    if family.decoder.can_verify_draft:
        assert guessed.steps < plain.steps
        assert guessed.ran > plain.ran


def test_tokens_behind_any_number_of_right_guesses_have_their_bits(family: Any) -> None:
    """Three wrong guesses behind them each time: a window goes on, an entry ends amid them, a block is chosen."""
    if not family.decoder.can_verify_draft:
        pytest.skip("verifies no draft")
    ids, wrong, at = tokens(90), tokens(90, seed=9), 30
    expected = alone(family, ids, at)
    cache = family.new_cache(1)
    slab = cache.open()
    family.step(Batch((prompt(slab, ids[:at]),)), cache)
    for right in (0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 1, 9):
        row = verify(slab, at, [*ids[at : at + 1 + right], *wrong[:3]])
        assert cache.can_crop(slab, at, len(row.tokens))
        found = family.step(Batch((row,)), cache, every=True)
        assert torch.equal(found[: 1 + right], expected[at - 30 :][: 1 + right])
        at += 1 + right
        cache.crop(slab, at)


def test_answers_side_by_side_have_the_bits_of_each(family: Any) -> None:
    """Two with guesses, of which one is longer than what is chosen, beside a third; then two others. Of each one's
    guesses another number is right. In one call: no more tokens than a chunk has."""
    if not family.decoder.batch_invariant:
        pytest.skip("verifies one answer at a time")
    read, wrong = (50, 9, 21), tokens(9, seed=9)
    texts = [tokens(first + 12, seed=first) for first in read]
    expected = [alone(family, ids, first) for ids, first in zip(texts, read, strict=True)]
    cache, at = family.new_cache(3), list(read)
    slabs = [cache.open() for _ in texts]
    for slab, ids, first in zip(slabs, texts, read, strict=True):
        family.step(Batch((prompt(slab, ids[:first]),)), cache)
    for rights in ((3, 2, 0), (2, 0, 3)):
        ends = [first + 1 + right for first, right in zip(at, rights, strict=True)]
        rows = [
            verify(slab, first, [*ids[first:end], *wrong[:right]])
            for slab, ids, first, end, right in zip(slabs, texts, at, ends, rights, strict=True)
        ]
        found = family.step(Batch(tuple(rows)), cache, every=True).split([len(row.tokens) for row in rows])
        for each, first, begin, end in zip(range(3), read, at, ends, strict=True):
            assert torch.equal(found[each][: end - begin], expected[each][begin - first : end - first])
            cache.crop(slabs[each], end)
        at = ends


def verified(engine: Any, ids: list[int], count: int) -> tuple[KVCache, int]:
    """A cache of three sequences with one of the first 13 tokens, behind which `count` have been verified."""
    cache = engine.new_cache(3)
    if cache.recurrent is None or not engine.decoder.can_verify_draft:
        pytest.skip("has no recurrent state, or verifies no draft")
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:13]),)), cache)
    found = engine.step(Batch((verify(slab, 13, ids[13 : 13 + count]),)), cache, every=True)
    assert torch.equal(found, alone(engine, ids[: 13 + count], 13))
    return cache, slab


def test_a_recurrent_state_amid_guesses_is_with_the_sequence_alone(family: Any, tmp_path: Path) -> None:
    ids = tokens(20)
    cache, slab = verified(family, ids, 7)
    other = cache.fork(slab)
    with pytest.raises(ValueError, match="cannot be wound back to 16"):
        cache.crop(other, 16)
    with pytest.raises(ValueError, match="cannot go on from position 16"):
        family.step(Batch((decode(slab, 16, ids[16]),)), cache)
    cache, slab = verified(family, ids, 7)
    cache.crop(slab, 16)
    cache.save(slab, tmp_path / "sequence")
    fresh = family.new_cache(1)
    for kept, its in ((cache, cache.fork(slab, 16)), (fresh, fresh.load(tmp_path / "sequence")), (cache, slab)):
        assert torch.equal(family.step(Batch((decode(its, 16, ids[16]),)), kept), alone(family, ids, 16)[:1])


def test_no_recurrent_state_is_kept_amid_too_many_guesses(family: Any) -> None:
    cache, slab = verified(family, tokens(60), MOST_VERIFIED + 1)
    with pytest.raises(ValueError, match="cannot be wound back"):
        cache.crop(slab, 15)


@pytest.mark.parametrize("name", ["deepseek_v4", "minimax_m3_vl_text", "gemma4_text", "phimoe"])
def test_answers_with_guesses_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Without native kernels for the dtype: each token runs by itself."""
    engine = engine_of(write(tmp_path, name, torch.float32), bits=16, dense_bits=16, chunk=16, context=120, cache="50%")
    ids, plain = REPEATED[:20], oracle(tmp_path, name, torch.float32)
    said = plain.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, attention_mask=torch.ones(1, 20))
    expected = said[0, 20:].tolist()
    informed = Informed({tuple(ids): expected}, 1)
    counted = Counted(engine)
    loop = RequestLoop(counted, Letters(), 1, {2}, speculation=Eager(lambda _: informed))
    assert answers(loop, [Request(ids, Sampling(max_tokens=40, repetition_penalty=1.0))]) == [expected]
    assert 0 < loop.counts.right_guesses < loop.counts.guessed_tokens
    assert counted.steps < 0.5 * len(expected)
    engine.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_every_sampler_chooses_what_it_chooses_without_guesses(engine: Any, rows: int) -> None:
    named: dict[str, Any] = {
        "temperature": 0.7, "seed": 3, "top_p": 0.95, "typical_p": 0.9, "top_n_sigma": 3.0, "xtc_probability": 0.3,
        "xtc_threshold": 0.05, "dry_multiplier": 0.1, "dry_allowed_length": 4, "dry_sequence_breakers": (),
        "repetition_penalty": 1.02, "repeat_last_n": 9, "min_tokens": 20, "logit_bias": {5: 60.0, 6: 59.5, 7: 59.0},
    }  # fmt: skip
    asked = [Request(each.ids, Sampling(max_tokens=40, **named)) for each in requests()]
    expected = answers(RequestLoop(engine, Letters(), rows, {7, 9}), asked)
    loop = RequestLoop(engine, Letters(), rows, {7, 9}, speculation=eager())
    assert answers(loop, asked) == expected
    assert loop.counts.right_guesses > 0


def test_timings_count_the_draft_tokens_that_ran(engine: Any) -> None:
    """A step of an answer runs one token and draft tokens, and gives one token and those that were right, each in a
    piece of its own."""
    text = [*REPEATED[:20], 90, *REPEATED[3:14], 91, 92, *REPEATED[:9]]
    plain, guessed = Counted(engine), Counted(engine)
    logprobs(RequestLoop(plain, Letters(), 1, set()), text)
    loop, asked, pieces = RequestLoop(guessed, Letters(), 1, set(), speculation=eager()), written(text), list[Piece]()
    loop.add(asked)
    while not loop.scheduler.idle:
        pieces += loop.step()
    steps = guessed.steps - (plain.steps - (len(text) - 1))  # those of the prompt are the same
    timings = pieces[-1].timings
    assert (timings.read, timings.tokens) == (len(asked.ids), len(text))
    assert timings.accepted == len(text) - 1 - steps > 0
    assert timings.drafted == guessed.ran - len(asked.ids) - steps > timings.accepted
    assert steps < 0.7 * len(text)
    assert [len(piece.tokens) for piece in pieces] == [1] * len(text)
    assert [piece.finish for piece in pieces] == [None] * (len(text) - 1) + ["stop"]  # the grammar has ended
    assert loop.counts.generated_tokens == len(text)


def test_an_answer_ends_where_it_ends_without_guesses(engine: Any) -> None:
    (whole,) = answers(RequestLoop(engine, Letters(), 1, set()), requests()[:1])
    for end in {whole[5], whole[-1]}:
        expected = answers(RequestLoop(engine, Letters(), 1, {end}), requests()[:1])
        assert answers(RequestLoop(engine, Letters(), 1, {end}, speculation=eager()), requests()[:1]) == expected
    for most in (1, 2, 7):
        short = [Request(requests()[0].ids, Sampling(max_tokens=most))]
        assert answers(RequestLoop(engine, Letters(), 1, set(), speculation=eager()), short) == [whole[:most]]


def test_what_a_request_left_is_found_again_without_its_wrong_guesses(family: Any) -> None:
    """An answer that its length ends, and one that ends amid guesses."""

    class Known:
        def draft(self, prompt: Sequence[int], answer: Sequence[int], most: int, *rest: Any) -> list[int]:
            return whole[len(answer) :][:most] if prompt == requests()[0].ids else []

    (whole,) = answers(RequestLoop(family, Letters(), 2, set()), requests()[:1])
    last = max(whole.index(token) for token in whole[:-8])
    for ends in (set[int](), {whole[last]}):
        loop, plain = (
            RequestLoop(family, Letters(), 2, ends, speculation=Eager(lambda _: Known())),
            RequestLoop(family, Letters(), 2, ends),
        )
        (first,) = answers(loop, requests()[:1])
        assert first == whole[: last + 1 if ends else None]
        assert answers(plain, requests()[:1]) == [first]
        turn = [Request([*requests()[0].ids, *first, 5, 6], Sampling(max_tokens=12))]
        assert answers(loop, turn) == answers(plain, turn)
        assert loop.counts.cached_tokens == plain.counts.cached_tokens > 0


def test_an_answer_does_not_fail_by_a_guess(engine: Any) -> None:
    class Damaged(WrappedEngine):
        def step(self, batch: Any, *rest: Any) -> Any:
            if any(row.kind == "verify" for row in batch.rows):
                raise LoadError("an expert that a guess asks for is damaged")
            return self._engine.step(batch, *rest)

    for rows in (1, 3):
        expected = answers(RequestLoop(engine, Letters(), rows, set()), requests())
        assert (
            answers(RequestLoop(Damaged(engine), Letters(), rows, set(), speculation=eager()), requests()) == expected
        )


def test_a_preempted_answer_that_was_guessed_goes_on(family: Any) -> None:
    expected = answers(RequestLoop(family, Letters(), 3, set()), requests())
    assert with_preemptions(RequestLoop(family, Letters(), 3, set(), speculation=eager()), requests()) == expected


def with_preemptions(loop: RequestLoop, asked: Sequence[Request]) -> list[list[int]]:
    """Answers that are preempted now and then."""
    found: dict[int, list[int]] = {loop.add(each): [] for each in asked}
    for step in range(10_000):
        if loop.scheduler.idle:
            break
        if step % 7 == 6 and loop.scheduler.running > 1:
            preempt_last(loop)
        for piece in loop.step():
            found[piece.number] += piece.tokens
    assert loop.counts.preemptions > 0
    return list(found.values())


class UntilEnd:
    """A thought that ends with the tokens of `THOUGHT_END`."""

    inside = True

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text
        self.inside = Letters().decode(THOUGHT_END) not in self._text


class Beginning(Forced):
    """Forces the beginning of an answer alone."""

    ended = False  # type: ignore[assignment]

    def restrict(self, logits: Any) -> Any:
        return super().restrict(logits) if self._at < len(self._answer) else logits


THOUGHT_END = [7, 8, 9]


def test_a_budget_of_thoughts_is_exact(engine: Any) -> None:
    """Alone, in a batch, with guesses and after preemption: the free answer's first tokens, the end of the thought, and
    what follows. Oracle: the answer whose beginning a grammar forces."""
    most = 6

    def budgeted(seed: int | None) -> list[Request]:
        return [replace(each, budget=ThoughtBudget(most, THOUGHT_END, UntilEnd())) for each in requests(seed)]

    for seed in (None, 1):
        plain = RequestLoop(engine, Letters(), 1, set())
        alone = [answers(plain, [each])[0] for each in budgeted(seed)]
        free = [answers(plain, [each])[0] for each in requests(seed)]
        assert [each[: most + 3] for each in alone] == [[*each[:most], *THOUGHT_END] for each in free]
        if seed is None:
            forced = [Beginning([*each[:most], *THOUGHT_END]) for each in free]
            asked = [replace(each, grammar=one) for each, one in zip(requests(), forced, strict=True)]
            assert answers(plain, asked) == alone
        for rows in (1, 3):
            assert answers(RequestLoop(engine, Letters(), rows, set(), speculation=eager()), budgeted(seed)) == alone
        loop = RequestLoop(engine, Letters(), 3, set(), speculation=eager())
        assert with_preemptions(loop, budgeted(seed)) == alone


def preempt_last(loop: Any) -> None:
    row = loop.scheduler.answering[-1] if loop.scheduler.answering else loop.scheduler.reading[-1]
    loop.scheduler.preempt(row)


def test_lossy_presets_take_no_guesses(engine: Any) -> None:
    class Lossy(Counted):
        composition = type("composition", (), {"lossy": ["skip"]})

    counted, plain = Lossy(engine), Counted(engine)
    answers(RequestLoop(counted, Letters(), 1, set(), speculation=eager()), requests()[:1])
    answers(RequestLoop(plain, Letters(), 1, set()), requests()[:1])
    assert (counted.steps, counted.ran) == (plain.steps, plain.ran)


# drafts


def latest_longest(sequence: Sequence[int]) -> tuple[int, int]:
    """(place, length) of the longest match behind the sequence's end, the latest of several; (0, 0) without one."""
    best = (0, 0)
    for place in range(MATCH, len(sequence)):
        length = 0
        while length < min(place, LONGEST) and sequence[place - 1 - length] == sequence[-1 - length]:
            length += 1
        if length >= MATCH and length >= best[1]:
            best = (place, length)
    return best


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 8), st.lists(st.integers(1, 59), max_size=4))
def test_a_draft_is_what_followed_the_longest_match(sequence: list[int], most: int, cuts: list[int]) -> None:
    lookup, done = PromptLookup(places=1000), 0
    for cut in sorted({min(cut, len(sequence)) for cut in cuts} | {len(sequence)}):
        lookup.extend(sequence[done:cut])
        done = cut
        draft, length = lookup.draft(most)
        place, expected = latest_longest(sequence[:cut])
        assert length == expected
        after = list(sequence[place:cut])
        assert draft == ([after[at % len(after)] for at in range(most)] if expected else [])


# what guesses may lose


def decoded(speculation: Speculation, text: Sequence[int], prompt: Sequence[int], guess_s: float) -> float:
    """Seconds that an answer `text` takes with a computed clock: a step takes one, and guess_s for each guess."""
    drafter, answer, took = speculation.drafter(), [text[0]], 0.0
    while len(answer) < len(text):
        guesses = drafter.draft(prompt, answer, min(MOST, len(text) - len(answer)), 1)
        right = 0
        while right < len(guesses) and guesses[right] == text[len(answer) + right]:
            right += 1
        came = list(text[len(answer) : len(answer) + right + 1])
        seconds = 1 + guess_s * len(guesses)
        speculation.record(1, len(guesses), len(came), seconds)
        answer += came
        took += seconds
    return took


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0, 1.6])
@pytest.mark.parametrize("seed", [1, 2])
def test_guesses_lose_little_where_they_are_wrong(share: float, seed: int) -> None:
    """Five kinds of tokens: there is a match at nearly every place, and it says nothing."""
    drawn, speculation = random.Random(seed), Speculation(Lookup())
    text = [drawn.randrange(5) for _ in range(4000)]
    took = decoded(speculation, text, [], share)
    worst = (MOST + 8) * max(share, 1)  # a step's, and what one begins with
    assert took <= (1 + LOSS) * len(text) + worst


def test_guesses_that_lost_are_withheld_for_a_while() -> None:
    losing, waiting, missing = Speculation(Lookup()), Speculation(Lookup()), Speculation(Lookup())
    for speculation in (losing, waiting, missing):
        for _ in range(3):
            speculation.record(1, 0, 1, 1.0)
        lost = 0.0
        while speculation.allows(1):
            speculation.record(1, 5, 1, 4.0)
            lost += 3
            assert lost < 20
        assert lost > 2
    steps = 0
    while not waiting.allows(1):
        waiting.record(1, 0, 1, 1.0)
        steps += 1
    assert steps > 0.5 / LOSS
    for _ in range(20):
        missing.record_withheld(True)
        losing.record_withheld(False)
    assert missing.allows(1)
    assert not losing.allows(1)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_cost_of_a_guess_is_what_it_adds_to_a_step(rows: int) -> None:
    speculation = Speculation(Lookup())
    for at in range(400):
        guesses = 0 if at < 5 else 1 + at % 7
        speculation.record(rows, guesses, rows + guesses, 2.0 + 0.3 * guesses)
    assert speculation.share == pytest.approx(0.3 * rows / 2.0, rel=0.05)


@pytest.mark.parametrize(("share", "least"), [(0.2, 3.0), (0.5, 1.6), (0.8, 1.05)])
def test_guesses_win_where_a_text_repeats(share: float, least: float) -> None:
    drawn = random.Random(1)
    prompt = [drawn.randrange(1000) for _ in range(300)]
    assert len(prompt) / decoded(Speculation(Lookup()), prompt, prompt, share) >= least


def test_guesses_come_back_after_they_have_lost() -> None:
    """A long match that ends, again and again, uses up what may be lost; then the text repeats."""
    drawn, speculation = random.Random(3), Speculation(Lookup())
    prompt = [drawn.randrange(1000) for _ in range(400)]
    misleading = [token for at in range(0, 400, 8) for token in (*prompt[at : at + 7], 1000 + at)]
    decoded(speculation, misleading, prompt, 0.9)
    drafter_s = decoded(speculation, prompt, prompt, 0.3)
    assert len(prompt) / drafter_s > 1.3


# a draft model


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model of the same vocabulary with other weights."""
    directory = write(tmp_path_factory.mktemp("draft"), "mixtral", torch.bfloat16)
    engine = engine_of(directory, bits=4, dense_bits=4, chunk=16, batch=3, context=120)
    yield engine
    engine.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_model_changes_no_token(engine: Any, draft: Any, rows: int) -> None:
    for seed in (None, 1):
        expected = answers(RequestLoop(engine, Letters(), rows, set()), requests(seed))
        loop = RequestLoop(engine, Letters(), rows, set(), speculation=Eager(DraftModel(draft, 128, 2, 120)))
        assert answers(loop, requests(seed)) == expected
        assert loop.counts.guessed_tokens > 0


def test_a_model_drafts_for_itself_what_it_then_says(engine: Any) -> None:
    """Sequences one after the other over one slab of the draft model."""
    loop = RequestLoop(engine, Letters(), 1, set(), speculation=Eager(DraftModel(engine, 128, 1, 120)))
    (whole,) = answers(RequestLoop(engine, Letters(), 1, set()), requests()[:1])
    assert answers(loop, requests()[:1]) == [whole]
    assert loop.counts.right_guesses == loop.counts.guessed_tokens > 30
    assert answers(loop, requests()[1:]) == answers(RequestLoop(engine, Letters(), 1, set()), requests()[1:])


def test_the_kv_cache_of_a_draft_model_has_what_its_sequence_has(draft: Any) -> None:
    """A sequence that goes on, one that goes back, and one that takes the other's place."""
    model = DraftModel(draft, 128, 1, 120)
    one, other = (model(Eager(model)) for _ in range(2))
    for drafter, ids in (
        (one, tokens(9)),
        (one, tokens(12)),
        (one, tokens(4)),
        (other, tokens(7, 2)),
        (one, tokens(9)),
    ):
        fresh = DraftModel(draft, 128, 1, 120)
        expected = fresh.run(fresh(Eager(fresh)), list(ids))
        torch.testing.assert_close(model.run(drafter, list(ids)), expected, rtol=2e-2, atol=1e-3)


def test_a_draft_model_with_another_tokenizer_is_refused() -> None:
    check_vocabulary({"a": 0, "b": 1}, {"a": 0, "b": 1}, "small")
    for draft in ({"a": 0, "b": 2}, {"a": 0}, {"a": 0, "b": 1, "c": 2}):
        with pytest.raises(ModelError, match=r"small cannot draft for this model: of its .* same tokenizer"):
            check_vocabulary({"a": 0, "b": 1}, draft, "small")
