"""Recording and calibrating real models: against transformers' own routers on the plain model, and end to end."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
import tiny
from commands import Command
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, ModelError
from tiermoe.lab.cli.trace import trace as trace_command
from tiermoe.lab.measure import calibrate, searches
from tiermoe.lab.measure.calibrate import (
    Calibration,
    CalibrationOptions,
    FailedProfile,
    MadeProfile,
    make_profiles,
    prepare,
)
from tiermoe.lab.measure.neurons import find_theta
from tiermoe.lab.measure.record import Recorder, expert_bytes, header_of
from tiermoe.lab.measure.texts import SequenceShape, cut_sequences
from tiermoe.lab.simulate import ReplaySettings, replay
from tiermoe.lab.trace import Header, Pass, TraceWriter, read_trace
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload.composition import filled
from tiermoe.offload.policies.precision import Fixed, PrecisionContext
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import profile_path, read_profile

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen; Winston Smith slipped quickly. " * 8
IDS = torch.tensor([5, 40, 77, 12, 9, 100, 33, 8, 61, 25, 90, 14])
PROMPT = 6


class Captured:
    """A plain model's routers: what each was given and said, of the last pass."""

    def __init__(self, model: Any) -> None:
        self.routers = [
            module.gate for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")
        ]
        self.said: list[tuple[torch.Tensor, ...]] = [()] * len(self.routers)
        for index, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def record(_: Any, arguments: Any, output: Any) -> None:
            self.said[index] = (arguments[0].reshape(-1, arguments[0].shape[-1]), *output)

        return record

    def last(self) -> list[tuple[torch.Tensor, ...]]:
        return list(self.said)


def _record(directory: Path) -> tuple[Any, list[Pass]]:
    model, _ = tiermoe.load(directory, bits=16, preset="lru", lanes=1)
    with Recorder(model) as recorder:
        list(recorder.passes(IDS[: PROMPT + 1], PROMPT))  # routers are asked as the model itself has called them
        passes = list(recorder.passes(IDS, PROMPT))
    return model, passes


@pytest.mark.parametrize("model_type", ["qwen2_moe", "olmoe"])
@torch.inference_mode()
def test_recorded_routing_is_the_plain_routers(model_type: str, tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model", model_type, torch.float32)
    model, passes = _record(directory)
    plain = tiny.oracle(directory, model_type, torch.float32)
    captured = Captured(plain)
    top_k = captured.routers[0].top_k
    cache = None
    assert [passed.phase for passed in passes] == ["prefill"] + ["decode"] * (len(IDS) - PROMPT)
    assert [token for passed in passes for token in passed.tokens] == IDS.tolist()
    for number, passed in enumerate(passes):
        ids = IDS[None, :PROMPT] if number == 0 else IDS[None, PROMPT + number - 1 : PROMPT + number]
        if number:
            _check_little(plain, captured, passed, ids, copy.deepcopy(cache), top_k)
        cache = plain(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
        said = captured.last()
        for index, layer in enumerate(passed.layers):
            hidden, _, weights, chosen = said[index]
            assert layer.experts == chosen.tolist()
            assert torch.allclose(torch.tensor(layer.weights), weights.float(), rtol=1e-4, atol=1e-6)
            for distance in (1, 2, 3):
                target = index + distance
                if target >= len(said):
                    assert distance not in layer.forecasts
                    continue
                logits, _, named = captured.routers[target](hidden)[:3]
                tokens = Counter(named.flatten().tolist()) if len(hidden) > 1 else {}
                assert layer.counts.get(distance, []) == sorted(tokens.items(), key=lambda pair: (-pair[1], pair[0]))
                _check_ranked(layer.forecasts[distance], logits.float().softmax(-1).sum(0), len(hidden), top_k)
    model.tiermoe.close()


def _check_ranked(ranked: list[tuple[int, float]], expected: torch.Tensor, tokens: int, top_k: int) -> None:
    """All of a prompt's ranking, of one token's twice K, and at least what lies above the 75th percentile of 8."""
    kept = 8 if tokens > 1 else min(max(2 * top_k, 3), 8)
    values, order = expected.sort(descending=True)
    assert [expert for expert, _ in ranked] == order[:kept].tolist()
    assert [weight for _, weight in ranked] == pytest.approx(values[:kept].tolist(), rel=1e-3)


def _check_little(plain: Any, captured: Captured, passed: Pass, ids: torch.Tensor, cache: Any, top_k: int) -> None:
    """Against the plain model with routers that choose half: its confidence, and the K that its inputs would get."""
    for router in captured.routers:
        router.top_k = (top_k + 1) // 2
    logits = plain(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
    for router in captured.routers:
        router.top_k = top_k
    said = captured.last()
    assert passed.little is not None
    assert passed.little.confidence == pytest.approx(float(logits.softmax(-1).max()), rel=1e-4)
    for index, layer in enumerate(passed.little.layers):
        _, weights, chosen = captured.routers[index](said[index][0])
        order = weights[0].argsort(descending=True, stable=True)
        assert layer.experts == [chosen[0, order].tolist()]
        assert layer.weights[0] == pytest.approx(weights[0, order].tolist(), rel=1e-4)


def test_the_little_pass_disturbs_nothing(mixtral: Path) -> None:
    model, with_little = _record(mixtral)
    engine = model.tiermoe
    assert engine.context.observer is None
    assert not engine.context.needs_weights
    with Recorder(model, little=False) as recorder:
        alone = list(recorder.passes(IDS, PROMPT))
    assert all(passed.little is None for passed in alone)
    assert [passed.layers for passed in with_little] == [passed.layers for passed in alone]
    engine.close()


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("switch"), "switch_transformers", torch.float32)


def test_an_encoder_decoder_model_reads_the_prompt_through_its_encoder(switch: Path) -> None:
    model, passes = _record(switch)
    assert not any(layer.forecasts for passed in passes for layer in passed.layers)
    assert all(passed.little is None for passed in passes)
    prefill, *decode = passes
    assert [len(layer.experts) for layer in prefill.layers] == [PROMPT, PROMPT, 1, 1]
    assert all([len(layer.experts) for layer in passed.layers] == [0, 0, 1, 1] for passed in decode)
    plain = tiny.oracle(switch, "switch_transformers", torch.float32)
    masks: list[torch.Tensor] = []
    for module in plain.modules():
        if type(module).__name__.endswith("Top1Router"):
            module.register_forward_hook(lambda _, __, output: masks.append(output[0 if output[0].dim() == 3 else 1]))
    with torch.inference_mode():
        encoded = plain.get_encoder()(input_ids=IDS[None, :PROMPT])
        output = plain(encoder_outputs=encoded, decoder_input_ids=torch.tensor([[0]]), use_cache=True)
        del masks[:]
        plain(
            encoder_outputs=encoded, decoder_input_ids=IDS[None, PROMPT : PROMPT + 1],
            past_key_values=output.past_key_values,
        )  # fmt: skip
    chosen = [[[int(row.argmax())] if row.any() else [] for row in mask.reshape(-1, 8)] for mask in masks]
    assert chosen == [layer.experts for layer in decode[0].layers[2:]]
    model.tiermoe.close()


def test_recording_a_lossy_preset_is_refused(mixtral: Path) -> None:
    model, _ = tiermoe.load(mixtral, preset="mobile")
    with pytest.raises(ConfigError, match=r"mobile is lossy \(routing=confident\)"):
        Recorder(model)
    model.tiermoe.close()


def test_sequences_are_spread_over_the_text_and_refused_with_numbers(shipped: Path) -> None:
    from tiermoe.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shipped)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    start = [tokenizer.bos_token_id] if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else []
    rows = cut_sequences(tokenizer, TEXT, SequenceShape(96, 8, 32))
    assert rows.shape == (3, 32)
    body = 32 - len(start)
    assert rows[0].tolist() == [*start, *ids[:body]]
    assert rows[2].tolist() == [*start, *ids[-body:]]
    with pytest.raises(ConfigError, match=r"the text has [\d,]+ tokens; recording 8,192 .* or use --tokens \d+"):
        cut_sequences(tokenizer, TEXT, SequenceShape(8192, 8, 32))
    with pytest.raises(ConfigError, match="longer than the model's context of 16"):
        cut_sequences(tokenizer, TEXT, SequenceShape(96, 8, 32), longest=16)
    with pytest.raises(ConfigError, match="longer than its prompt"):
        SequenceShape(96, 32, 32)
    with pytest.raises(ConfigError, match="less than one sequence"):
        SequenceShape(31, 8, 32)


@torch.inference_mode()
def test_theta_is_the_quantile_of_the_gates_activations(mixtral: Path) -> None:
    model, _ = tiermoe.load(mixtral, bits=16, preset="lru")
    ids = IDS[None]
    theta = find_theta(model.tiermoe, inspect_model(mixtral, "tiny"), ids, 0.55, lambda done, total: None)
    model.tiermoe.close()
    plain = tiny.oracle(mixtral, "mixtral", torch.float32)
    captured = Captured(plain)
    plain(input_ids=ids)
    modules = [module for module in plain.modules() if hasattr(module, "gate_up_proj")]
    layers = []
    for module, (hidden, _, _, chosen) in zip(modules, captured.last(), strict=True):
        rows = [
            torch.nn.functional.silu(module.gate_up_proj[expert][:64] @ row)
            for row, experts in zip(hidden, chosen.tolist(), strict=True)
            for expert in experts
        ]
        layers.append(torch.cat(rows).abs())
    every = torch.cat(layers)
    assert theta.theta == pytest.approx(float(every.sort().values[round(0.55 * len(every)) - 1]), rel=1e-4)
    shares = [float((values > theta.theta).double().mean()) for values in layers]
    assert theta.active_share == pytest.approx(shares, abs=2e-3)
    assert theta.tokens == len(IDS)


@torch.inference_mode()
def test_losses_of_popularity_are_of_perplexity(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first share that loses too much, against another precision and torch's own cross entropy."""
    changes = {"precision": "popularity", "low_popularity": 0.3, "cache": "none"}
    model, _ = tiermoe.load(mixtral, preset="lru", set=changes)
    ids = torch.stack([IDS, IDS.flip(0)])

    def nll() -> float:
        logits = torch.stack([model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in ids])
        return float(torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), ids[:, 1:].flatten()))

    before = model.tiermoe.scheduler.precision
    low = nll()
    with model.tiermoe.scheduler.ruled_by(Fixed(PrecisionContext(4, [2] * 3))):
        expected = math.exp(low - nll()) - 1
    monkeypatch.setattr(searches, "TOLERATED", math.inf)
    losses = searches.popularity_losses(model.tiermoe, ids, 2, _quiet)
    assert [share for share, _ in losses] == list(searches.SHARES)
    assert dict(losses)[0.3] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert expected != 0
    assert model.tiermoe.scheduler.precision is before
    monkeypatch.setattr(searches, "TOLERATED", -math.inf)
    assert len(searches.popularity_losses(model.tiermoe, ids, 2, _quiet)) == 1
    model.tiermoe.close()


SHAPE = SequenceShape(64, 8, 32)


def _quiet(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LEAST_TOKENS", 32)


def _prepare(directory: Path, store: Path, shape: SequenceShape = SHAPE) -> Calibration:
    return prepare(str(directory), "text.txt", TEXT, shape, {"store": store})


@pytest.fixture(scope="module")
def calibrated(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with profiles."""
    store = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibrate, "LEAST_TOKENS", 32)
        results = make_profiles(_prepare(mixtral, store), ["hobbit", "fate", "corm"], _quiet)
    assert all(isinstance(result, MadeProfile) and not result.kept for result in results), results
    return store


def test_profiles_hold_what_their_presets_need(mixtral: Path, calibrated: Path) -> None:
    fingerprint = inspect_model(mixtral, "tiny").checkpoint.fingerprint()
    profiles = {
        name: read_profile(profile_path(calibrated, name), fingerprint, "") for name in ("hobbit", "fate", "corm")
    }
    for name, profile in [*profiles.items(), ("eap", profiles["fate"])]:
        assert filled(PRESETS[name], profile).missing() == []
        assert profile.made_from["text"] == "text.txt"
        assert profile.made_from["tokens"] == 64
    assert [row.count(2) for row in profiles["corm"].data["table"]] == [2] * 3  # 30 % of 8
    assert 1 <= profiles["fate"].settings["boundary"] <= 2
    assert set(profiles["fate"].data["paths"]) == {"1", "2"}
    model, _ = tiermoe.load(mixtral, preset="hobbit", store=calibrated)
    model(input_ids=IDS[None])
    model.tiermoe.close()


class Recordings:
    """Stands for loading the model and recording it: counts, and writes a trace of nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._fingerprint = ""
        monkeypatch.setattr(Calibration, "on_engine", self._on_engine)
        monkeypatch.setattr(calibrate, "write_trace", self._write)
        for name in ("hobbit", "fate"):
            monkeypatch.setitem(calibrate.CALIBRATORS, name, self.calibrate)

    def _on_engine(self, changes: Any, use: Any, progress: Any, logits: bool = False) -> Any:
        return use(None, None)

    def _write(
        self, path: Path, model: Any, ids: Any, shape: SequenceShape, made_from: Any, progress: Any, **_: Any
    ) -> None:
        self.count += 1
        header = Header("", self._fingerprint, [8], [2], {4: [1]}, None, frozenset(), made_from=made_from)
        with TraceWriter(path, header):
            pass

    def calibrate(self, calibration: Calibration, progress: Any) -> Any:
        self._fingerprint = calibration.fingerprint
        calibration.trace(progress)
        return {"found": self.count}, {}, {}


def _kept(results: list[MadeProfile | FailedProfile]) -> list[bool]:
    return [result.kept for result in results if isinstance(result, MadeProfile)]


def test_an_interrupted_calibration_resumes(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = Recordings(monkeypatch)
    calibration = _prepare(mixtral, tmp_path)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(calibrate.CALIBRATORS, "fate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_profiles(calibration, ["hobbit", "fate"], _quiet)
    monkeypatch.setitem(calibrate.CALIBRATORS, "fate", recordings.calibrate)
    assert _kept(make_profiles(calibration, ["hobbit", "fate"], _quiet)) == [True, False]
    assert recordings.count == 1
    assert _kept(make_profiles(calibration, ["hobbit", "fate"], _quiet)) == [True, True]
    fewer_tokens = _prepare(mixtral, tmp_path, SequenceShape(32, 8, 32))
    assert _kept(make_profiles(fewer_tokens, ["hobbit"], _quiet)) == [False]
    assert recordings.count == 2
    assert _kept(make_profiles(fewer_tokens, ["hobbit"], _quiet, force=True)) == [False]
    assert recordings.count == 3


def test_a_damaged_recording_is_made_anew(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = Recordings(monkeypatch)
    calibration = _prepare(mixtral, tmp_path)
    make_profiles(calibration, ["hobbit"], _quiet)
    recording = tmp_path / "profiles" / "calibration.trace"
    recording.write_bytes(recording.read_bytes()[:-20])
    make_profiles(calibration, ["fate"], _quiet)
    assert recordings.count == 2


def test_a_model_without_gates_keeps_the_other_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.write(tmp_path / "model", "gpt_oss", torch.float32)
    Recordings(monkeypatch)
    failed, found = make_profiles(_prepare(directory, tmp_path / "store"), ["corm", "hobbit"], _quiet)
    assert isinstance(failed, FailedProfile)
    assert "its experts have biases" in str(failed.error)
    assert isinstance(found, MadeProfile)
    assert not profile_path(tmp_path / "store", "corm").exists()


def _fake_bitwidths(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The bitwidth search is tested elsewhere: here stands what it returns."""
    asked: dict[str, Any] = {}

    def find_bitwidths(
        blueprint: Any, settings: Any, task: Any, loss: float, progress: Any, processes: Any, path: Any, ray: bool
    ) -> Any:
        asked.update(settings=settings, loss=loss, processes=processes, task=task, ray=ray)
        table = [[4] * layer.experts for layer in blueprint.layers]
        table[0][0] = 2
        return {"table": table, "importance": [], "loss": 0.01, "loss_error": 0.002, "metric": task.name}

    monkeypatch.setattr(calibrate, "find_bitwidths", find_bitwidths)
    return asked


def test_an_encoder_decoder_model_is_calibrated_for_edgemoe_alone(
    switch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _fake_bitwidths(monkeypatch)
    calibration = _prepare(switch, tmp_path)
    edgemoe, fate = make_profiles(calibration, ["edgemoe", "fate"], _quiet)
    assert isinstance(edgemoe, MadeProfile)
    assert isinstance(fate, FailedProfile)
    assert isinstance(fate.error, ModelError)
    assert (asked["settings"].quantizer, asked["loss"], tuple(asked["task"].ids.shape)) == ("linear", 0.05, (2, 32))
    assert set(edgemoe.profile.data["paths"]) == {"3"}  # the decoder's second MoE layer, after its first
    assert sum(edgemoe.profile.data["frequencies"][0]) <= 2 * 8  # its prompts' tokens
    assert edgemoe.facts["bitwidths"] == "1 experts at 2 bits, 31 experts at 4 bits"
    assert edgemoe.facts["loss"].startswith("1.00% ± 0.20% of perplexity on text that the search has not seen")


def test_bitwidths_by_the_rouge2_of_summaries(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the longest context goes; other pairs make another profile."""
    pytest.importorskip("rouge_score")
    told = _fake_bitwidths(monkeypatch)

    def made(*pairs: tuple[str, str]) -> list[bool]:
        asked = CalibrationOptions(metric="rouge2", pairs=pairs)
        calibration = prepare(str(mixtral), "text.txt", TEXT, SHAPE, {"store": tmp_path}, asked)
        return _kept(make_profiles(calibration, ["edgemoe"], _quiet))

    assert made(("a document", "short")) == [False]
    longest = inspect_model(mixtral, "tiny").max_context()
    assert (told["task"].name, told["task"].tokens) == ("rouge2", min(512 + 64, longest or 576))
    assert made(("a document", "short")) == [True]
    assert made(("another", "short")) == [False]


def test_trace_command_writes_what_a_replay_reads(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out.trace"
    trace_command(
        model=str(mixtral), text=tmp_path / "text.txt", out=out, tokens=64, prompt=8, sequence=32,
        store=tmp_path / "store",
    )  # fmt: skip
    assert capsys.readouterr().out.strip() == str(out)
    found = read_trace(out)
    assert found.header.holds == {"weights", "tokens", "forecasts", "counts", "little"}
    assert list(found.header.forecast_distances) == [1, 2]
    assert len(found.passes) == 2 * (1 + 24)
    assert found.header.times is not None
    assert found.header.expert_bytes.keys() == {16, 8, 4, 3, 2}
    assert found.header.made_from["tokens"] == 64
    assert {passed.sequence for passed in found.passes} == {0, 1}
    for preset in ("lru", "mixtral-offload", "mobile"):
        replay(found, PRESETS[preset], ReplaySettings(CacheSize(fraction=0.5), 1e9))
    with pytest.raises(ConfigError, match="folder"):
        trace_command(model=str(mixtral), text=tmp_path / "text.txt", out=tmp_path / "none" / "t", tokens=64)


def test_calibrate_command(mixtral: Path, calibrated: Path, tmp_path: Path, tiermoe_: Command) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    start = ("calibrate", mixtral, "--text", text, "--tokens", 64, "--prompt", 8, "--sequence", 32)
    for words, cause in {
        "--tokens 32 --prompt 4 --sequence 20": "20 tokens in whole sequences of 20 are too few",
        "--tokens 65536": "the text has",
        "--tolerated-loss 0%": "tolerated-loss must be above 0%",
        "--tolerated-loss five": "write it like 5%",
        "--fallback-ratio few": "fallback-ratio 'few' is not a share",
        "--fallback-ratio 1.5": "fallback-ratio must be from 0% to 100%",
        "--metric bleu": "metric must be one of perplexity, rouge2",
        "--metric rouge2": "give both or none",
        "--for mobile,lru": "'lru' needs no calibration",
        "--for fete": "'fete' is no preset",
    }.items():
        assert cause in tiermoe_(*start, *words.split()).cause, words
    ended = tiermoe_(*start, "--for", "fate, corm,fate", "--tolerated-loss", "0.05", "--store", calibrated)
    assert ended.code == 0, ended.err
    assert "theta" in ended.out
    assert ended.out.count("fate (made before)") == 1


def test_a_precision_that_no_store_holds_yet_weighs_what_packing_makes_of_it(mixtral: Path, tmp_path: Path) -> None:
    found = []
    for bits in (4, 2):
        model, _ = tiermoe.load(mixtral, bits=bits, store=tmp_path, memory="2GiB")
        header = header_of(model, None, frozenset(), (), {})
        packed = expert_bytes(model.tiermoe.store, model.tiermoe.settings.quantizer_used)
        model.tiermoe.close()
        found.append((header.expert_bytes, packed))
    (before, alone), (after, both) = found
    assert (alone.keys(), both.keys()) == ({4}, {4, 2})
    assert before == after == before | both
