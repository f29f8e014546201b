"""Addresses and sizes in, nothing out; see module.c."""

def supported() -> bool: ...
def join_team(path: str, /) -> bool: ...
def matrix(codes: int, scales: int, rows: int, columns: int, group: int, /) -> bytes: ...
def product(matrix: bytes, x: int, tokens: int, sums: int, out: int, threads: int, torchs: bool, /) -> None: ...
def experts(
    experts: bytes,
    counts: list[int] | None,
    x: int,
    rows: int,
    inner: int,
    sums: int,
    out: int,
    threads: int,
    torchs: bool,
    /,
) -> None: ...
def combine(rows: list[int], weights: list[float], columns: int, out: int, /) -> None: ...
def combine_many(
    addresses: int, weights: int, tokens: int, k: int, columns: int, out: int, threads: int, /
) -> None: ...
def logits(weight: int, x: int, tokens: int, experts: int, columns: int, out: int, /) -> None: ...
def choose(logits: int, tokens: int, experts: int, k: int, normalise: bool, chosen: int, weights: int, /) -> None: ...
def block_workspace(experts: bytes | bytearray, count: int, k: int, tokens: int, threads: int, /) -> int: ...
def block(
    router: int,
    experts: bytes | bytearray,
    count: int,
    k: int,
    columns: int,
    normalise: bool,
    round_weights: bool,
    x: int,
    residual: int,
    tokens: int,
    workspace: int,
    out: int,
    threads: int,
    /,
) -> int: ...
def norm(x: int, weight: int, epsilon: float, rows: int, width: int, out: int, threads: int, /) -> None: ...
def attention(
    query: bytes,
    key: bytes,
    value: bytes,
    output: bytes,
    biases: tuple[int, int, int, int],
    norm_before: int,
    norm_after: int,
    norm_query: int,
    norm_key: int,
    norm_width: int,
    heads: int,
    kv_heads: int,
    head_columns: int,
    epsilon: float,
    scale: float,
    /,
) -> bytes: ...
def workspace(attention: bytes, sequences: int, positions: int, threads: int, /) -> int: ...
def attend(
    attention: bytes,
    workspace: int,
    sequences: int,
    x: int,
    cos: int,
    sin: int,
    one_position: bool,
    first: int,
    keys: int,
    values: int,
    room: int,
    positions: int,
    out: int,
    normed: int,
    threads: int,
    /,
) -> None: ...
def hqq(
    weights: int,
    rows: int,
    columns: int,
    group: int,
    block: int,
    largest: float,
    thresholds: int,
    steps: int,
    codes: int,
    scale: int,
    offset: int,
    workspace: int,
    floats: int,
    shrunk: int,
    threads: int,
    /,
) -> None: ...
def sums(matrix_or_expert: bytes, rows: int, results: int, threads: int, /) -> int: ...
def widen(pairs: int, ladders: int, count: int, run: int, codes: int, /) -> None: ...
