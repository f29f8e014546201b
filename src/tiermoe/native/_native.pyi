"""Addresses and sizes in, nothing out; see module.c."""

_Projection = tuple[bytes, int]  # matrix, bias
_Norm = tuple[int, int, int, float, int]  # weight, bias, width, epsilon, kind

def instruction_sets() -> list[str]: ...
def use(name: str, /) -> None: ...
def used() -> str: ...
def join_team(path: str, /) -> bool: ...
def matrix(
    coding: int,
    weights: int,
    scales: int,
    rows: int,
    columns: int,
    group: int,
    ladders: int,
    scale_kind: int = 0,
    scale_rows: int = 1,
    scale_columns: int = 1,
    factor_rows: int = 1,
    /,
) -> bytes: ...
def product(matrix: bytes, x: int, tokens: int, room: int, out: int, threads: int, torchs: bool, /) -> None: ...
def expert(
    first: bytes,
    second: bytes,
    first_bias: int,
    second_bias: int,
    gate: int,
    limit: float,
    alpha: float,
    /,
) -> bytes: ...
def experts(
    experts: bytes,
    counts: list[int] | None,
    x: int,
    rows: int,
    inner: int,
    room: int,
    out: int,
    threads: int,
    torchs: bool,
    /,
) -> None: ...
def combine(rows: list[int], weights: list[float], columns: int, out: int, /) -> None: ...
def combine_many(
    addresses: int, weights: int, tokens: int, k: int, columns: int, out: int, threads: int, /
) -> None: ...
def router(
    weight: int,
    bias: int,
    correction: int,
    experts: int,
    columns: int,
    k: int,
    groups: int,
    kept: int,
    judges: int,
    scoring: int,
    exact_logits: bool,
    round_weights: bool,
    normalise: bool,
    epsilon: float,
    scale: float,
    /,
) -> bytes: ...
def route(router: bytes, x: int, tokens: int, chosen: int, weights: int, /) -> None: ...
def logits(weight: int, x: int, tokens: int, experts: int, columns: int, out: int, /) -> None: ...
def choose(logits: int, tokens: int, experts: int, k: int, normalise: bool, chosen: int, weights: int, /) -> None: ...
def block_workspace(router: bytes, experts: bytes | bytearray, tokens: int, threads: int, /) -> int: ...
def block_call(
    router: bytes, experts: bytes | bytearray, x: int, tokens: int, workspace: int, threads: int, /
) -> bytes: ...
def block_route(call: bytes, chosen: int, /) -> None: ...
def block_routed(call: bytes, chosen: int, weights: int, /) -> None: ...
def block_experts(call: bytes, which: list[int], row: int, /) -> int: ...
def block_sum(call: bytes, residual: int, out: int, /) -> None: ...
def block(call: bytes, residual: int, out: int, /) -> int: ...
def neurons(
    records: int,
    record_bytes: int,
    width: int,
    group: int,
    bits: int,
    used: int,
    count: int,
    gates: int,
    x: int,
    workspace: int,
    floats: int,
    out: int,
    threads: int,
    /,
) -> None: ...
def gather(source: int, target: int, row_bytes: int, used: int, count: int, /) -> None: ...
def norm(x: int, weight: int, epsilon: float, kind: int, rows: int, width: int, out: int, threads: int, /) -> None: ...
def delta(
    taps: int,
    rates: int,
    biases: int,
    norm: int,
    epsilon: float,
    kept: int,
    key_heads: int,
    heads: int,
    key_columns: int,
    value_columns: int,
    /,
) -> bytes: ...
def delta_workspace(delta: bytes, tokens: int, /) -> int: ...
def run_delta(
    delta: bytes,
    tokens: int,
    rows: int,
    ends: int,
    source: int,
    target: int,
    mixed: int,
    mixed_stride: int,
    gates: int,
    gates_stride: int,
    betas: int,
    betas_stride: int,
    decays: int,
    decays_stride: int,
    inputs: int,
    states: int,
    workspace: int,
    out: int,
    threads: int,
    /,
) -> None: ...
def attention(
    projections: tuple[_Projection | None, ...],  # query, key, value, output, query_first, key_up
    norms: tuple[_Norm | None, ...],  # before, after, query_norm, key_norm
    sinks: int,
    heads: int,
    kv_heads: int,
    key_columns: int,
    value_columns: int,
    rotary_columns: int,
    latent_columns: int,
    window: int,
    gated: bool,
    interleaved: bool,
    scale: float,
    residual_multiplier: float,
    /,
) -> bytes: ...
def slabs(
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    slabs: int,
    kv_heads: int,
    room: int,
    key_columns: int,
    value_columns: int,
    ring: bool,
    /,
) -> bytes: ...
def step(
    tokens: int,
    slabs: int,
    positions: int,
    first: int,
    cos: int,
    sin: int,
    rotary_columns: int,
    chosen: int,
    most: int,
    /,
) -> bytes: ...
def workspace(attention: bytes, step: bytes, slabs: bytes, threads: int, /) -> int: ...
def attend(
    attention: bytes, step: bytes, slabs: bytes, workspace: int, x: int, out: int, normed: int, threads: int, /
) -> None: ...
def prompt_workspace(slabs: bytes, threads: int, /) -> int: ...
def prompt_state(slabs: bytes, tokens: int, heads: int, /) -> int: ...
def attend_prompt(
    slabs: bytes,
    query: int,
    out: int,
    sinks: int,
    tokens: int,
    heads: int,
    slab: int,
    first: int,
    window: int,
    scale: float,
    begin: int,
    end: int,
    state: int,
    workspace: int,
    threads: int,
    /,
) -> None: ...
def hqq(
    weights: int,
    rows: int,
    columns: int,
    wide: bool,
    group: int,
    block: int,
    largest: float,
    thresholds: int,
    steps: int,
    codes: int,
    scale: int,
    offset: int,
    shrunk: int,
    threads: int,
    /,
) -> None: ...
def encode(
    coding: int,
    weights: int,
    rows: int,
    columns: int,
    wide: bool,
    group: int,
    exact: bool,
    scales: int,
    zeros: int,
    codes: int,
    chosen: int,
    ladders: bytes,
    together: int,
    squares: int,
    threads: int,
    /,
) -> None: ...
def uneven(
    coding: int,
    weights: int,
    rows: int,
    columns: int,
    group: int,
    candidates: int,
    count: int,
    steps: int,
    blocks: int,
    threads: int,
    /,
) -> None: ...
def prepared(matrix_or_expert: bytes, rows: int, results: int, threads: int, /) -> int: ...
def widen(pairs: int, ladders: int, count: int, run: int, codes: int, /) -> None: ...
